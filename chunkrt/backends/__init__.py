"""Backends by name. Each is imported when it is asked for, so that what a machine lacks harms nobody else."""

from __future__ import annotations

from collections.abc import Callable

from chunkrt.backends.base import AttentionMath, Backend, Executable, Support
from chunkrt.errors import BackendUnavailableError, ChunkrtError, unknown_name
from chunkrt.plugins import Plugin, PluginGroup

__all__ = ["BACKENDS", "PLUGINS", "Backend", "Executable", "Support", "make_backend"]

BACKENDS = ("native", "onnxrt", "reference")
"""Those on CPU threads. The NPU has `chunkrt.backends.qnn.QnnBackend`, which needs to know more to be made."""

PLUGINS: PluginGroup[Callable[..., Backend]] = PluginGroup(
    "chunkrt.backends", error=BackendUnavailableError, own=("auto", "qnn", *BACKENDS, "off")
)
"""Each is a function of the keyword argument `threads` that makes the backend, and may be called more than once."""

_ATTRIBUTES = ("name", "concurrency", "cache_dtypes", "supports", "compile")


def make_backend(name: str, *, threads: int, attention_math: AttentionMath = "float32") -> Backend:
    """Make a backend.

    Args:
        name: "native", "onnxrt" or "reference", or a plug-in's.
        threads: the thread budget that its kernels share with the executor's workers.
        attention_math: what "native" multiplies in; the others have float32 alone, and do not mind it.

    Raises:
        ConfigError: there is no backend of that name.
        BackendUnavailableError: its library is not on this machine, or the plug-in is broken.
    """
    if name == "native":
        try:
            from chunkrt.backends.native.backend import NativeBackend
        except ImportError as error:
            raise BackendUnavailableError(
                f"the native kernels are not built ({error}); run `pip install .` in the source folder"
            ) from error
        return NativeBackend(threads, attention_math)
    if name == "onnxrt":
        from chunkrt.backends.onnx.onnxrt import OnnxRuntimeBackend

        return OnnxRuntimeBackend()
    if name == "reference":
        from chunkrt.backends.reference import ReferenceBackend

        return ReferenceBackend()
    if plugin := PLUGINS.find(name):
        return _make_plugin(plugin, threads)
    raise unknown_name("backend", name, (*BACKENDS, *PLUGINS.names))


def _make_plugin(plugin: Plugin[Callable[..., Backend]], threads: int) -> Backend:
    make = plugin.load()
    try:
        backend = make(threads=threads)
    except ChunkrtError:
        raise
    except (Exception, SystemExit) as error:  # whatever another's code raises
        raise BackendUnavailableError(
            f"the {plugin} cannot make its backend: {type(error).__name__}: {error}; repair it, or choose another"
        ) from error
    if missing := [name for name in _ATTRIBUTES if not hasattr(backend, name)]:
        found = f"a {type(backend).__name__} without {', '.join(missing)}"
        raise BackendUnavailableError(f"the {plugin} made {found}; expected what chunkrt.backends.Backend has")
    if wrong := _wrong_attribute(backend):
        raise BackendUnavailableError(f"the {plugin} made a backend whose {wrong}; repair it, or choose another")
    return backend


def _wrong_attribute(backend: Backend) -> str:
    """What no backend can have; empty if there is nothing."""
    concurrency: object = backend.concurrency
    if concurrency is not None and (type(concurrency) is not int or concurrency < 1):
        return f"concurrency is {concurrency!r}, expected None or a whole number of at least 1"
    dtypes: object = backend.cache_dtypes
    if not isinstance(dtypes, tuple | list) or (concurrency is None and not dtypes):
        return f"cache_dtypes are {dtypes!r}, expected names of types"
    uncalled = (name for name in ("supports", "compile") if not callable(getattr(backend, name)))
    return f"{name} cannot be called" if (name := next(uncalled, "")) else ""
