"""Backends by name. Each is imported when it is asked for, so that what a machine lacks harms nobody else."""

from __future__ import annotations

from chunkrt.backends.base import Backend, Executable, Support
from chunkrt.errors import BackendUnavailableError, unknown_name

__all__ = ["BACKENDS", "Backend", "Executable", "Support", "make_backend"]

BACKENDS = ("native", "onnxrt", "reference")
"""Those on CPU threads. The NPU has `chunkrt.backends.qnn.QnnBackend`, which needs to know more to be made."""


def make_backend(name: str, *, threads: int) -> Backend:
    """Make a backend.

    Args:
        name: "native", "onnxrt" or "reference".
        threads: the thread budget that its kernels share with the executor's workers.

    Raises:
        ConfigError: there is no backend of that name.
        BackendUnavailableError: its library is not on this machine.
    """
    if name == "native":
        try:
            from chunkrt.backends.native import NativeBackend
        except ImportError as error:
            raise BackendUnavailableError(
                f"the native kernels are not built ({error}); run `pip install .` in the source folder"
            ) from error
        return NativeBackend(threads)
    if name == "onnxrt":
        from chunkrt.backends.onnxrt import OnnxRuntimeBackend

        return OnnxRuntimeBackend()
    if name == "reference":
        from chunkrt.backends.reference import ReferenceBackend

        return ReferenceBackend()
    raise unknown_name("backend", name, BACKENDS)
