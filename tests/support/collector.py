"""Check that objects are freed by reference counting, without the garbage collector."""

import gc
from contextlib import contextmanager


@contextmanager
def without_collector():
    """Disable the garbage collector in the block, so that reference cycles are never freed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
