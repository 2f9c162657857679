"""For those who write a backend: the contract of `chunkrt/backends/base.py` as a test suite.

One call is all: `check_backend(MyBackend())`.
"""

from chunkrt.testing.conformance import check_backend
from chunkrt.testing.error import ConformanceError

__all__ = ["ConformanceError", "check_backend"]
