"""Conformance suite for authors of backends: the contract of `chunkrt/backends/base.py` as tests.

One call runs all checks: `check_backend(MyBackend())`.
"""

from chunkrt.testing.conformance import check_backend
from chunkrt.testing.executables import ConformanceError

__all__ = ["ConformanceError", "check_backend"]
