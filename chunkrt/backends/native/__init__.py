"""The native backend: a whole subgraph in one call into the C++ core, without the GIL."""

from chunkrt.backends.native.backend import NativeBackend

__all__ = ["NativeBackend"]
