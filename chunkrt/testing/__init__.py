"""Checks for authors of backends and of decoder families.

`check_backend(MyBackend())` checks the contract of `chunkrt/backends/base.py`. `check_family(folder, expected)`
compares a decoder with the values that `make_expected` took from Transformers.
"""

from chunkrt.testing.conformance import check_backend
from chunkrt.testing.executables import ConformanceError
from chunkrt.testing.families import ComparisonError, check_family, make_expected

__all__ = ["ComparisonError", "ConformanceError", "check_backend", "check_family", "make_expected"]
