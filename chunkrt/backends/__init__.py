"""Backends by name. A backend is imported when it is requested, so a missing dependency affects that backend alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from chunkrt.backends.base import AttentionMath, Backend, Executable, Support
from chunkrt.errors import (
    INSTALL_COMPILE,
    BackendError,
    BackendUnavailableError,
    ChunkrtError,
    needs_compile_extra,
    unknown_name,
)
from chunkrt.plugins import Plugin, PluginGroup

__all__ = ["BACKENDS", "PLUGINS", "Backend", "Executable", "Support", "make_backend"]

BACKENDS = ("native", "onnxrt", "reference")
"""Backends on CPU threads. The NPU has `chunkrt.backends.qnn.QnnBackend`, whose constructor needs more arguments."""

PLUGINS: PluginGroup[Callable[..., Backend]] = PluginGroup(
    "chunkrt.backends", error=BackendUnavailableError, own=("auto", "qnn", *BACKENDS, "off")
)
"""Factories of plug-ins' backends. A factory takes the keyword argument `threads`, returns the backend, and may be
called repeatedly.
"""

_ATTRIBUTES = ("name", "concurrency", "cache_dtypes", "supports", "compile")


def make_backend(name: str, *, threads: int, attention_math: AttentionMath = "float32") -> Backend:
    """Make a backend.

    Args:
        name: "native", "onnxrt" or "reference", or the name of a plug-in.
        threads: the thread budget that the backend's kernels share with the executor's workers.
        attention_math: the data type in which "native" multiplies in attention; the other backends use float32 and
            ignore it.

    Raises:
        ConfigError: no backend has that name.
        BackendUnavailableError: the backend's library is not installed, or the plug-in is broken.
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
        try:
            from chunkrt.backends.onnx.onnxrt import OnnxRuntimeBackend
        except ImportError as error:
            if not needs_compile_extra(error):
                raise
            raise BackendUnavailableError(
                f"the onnxrt backend needs {error.name}, which is not installed; run {INSTALL_COMPILE}"
            ) from error
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
    except (Exception, SystemExit) as error:  # third-party code may raise any exception
        raise BackendUnavailableError(
            f"the {plugin} cannot make its backend: {type(error).__name__}: {error}; repair it or choose another "
            "backend"
        ) from error
    if missing := [name for name in _ATTRIBUTES if not hasattr(backend, name)]:
        found = f"a {type(backend).__name__} without {', '.join(missing)}"
        raise BackendUnavailableError(f"the {plugin} made {found}; expected the attributes of chunkrt.backends.Backend")
    if wrong := _wrong_attribute(backend):
        raise BackendUnavailableError(f"the {plugin} made a backend whose {wrong}; repair it or choose another backend")
    _check(backend, {"supports": Support, "compile": Executable}, str(plugin))
    return backend


_METHODS_OF_EXECUTABLES = dict.fromkeys(("run", "run_after", "run_segments"), object)


def _check(found: object, methods: Mapping[str, type], plugin: str) -> None:
    """Make the errors of an object's methods name the plug-in. The values of `methods` are the types of results."""
    for name, kind in methods.items():
        method = getattr(found, name, None)
        if method is not None and not isinstance(method, _Checked):  # a plug-in may return the same object again
            with suppress(AttributeError, TypeError):  # an object that cannot be changed, such as one with slots
                object.__setattr__(found, name, _Checked(plugin, name, method, kind))


@dataclass(frozen=True)
class _Checked:
    """A method of a plug-in's object, whose errors name the method and the plug-in."""

    plugin: str
    name: str
    method: Callable[..., Any]
    kind: type

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        try:
            found = self.method(*arguments, **keywords)
        except ChunkrtError:
            raise
        except (Exception, SystemExit) as error:  # third-party code may raise any exception
            raise BackendError(
                f"{self.name} of the {self.plugin} failed: {type(error).__name__}: {error}; repair it or choose "
                "another backend"
            ) from error
        if not isinstance(found, self.kind):
            raise BackendError(
                f"{self.name} of the {self.plugin} returned {found!r:.80}, expected an object like "
                f"chunkrt.backends.{self.kind.__name__}; repair it or choose another backend"
            )
        if self.kind is Executable:
            _check(found, _METHODS_OF_EXECUTABLES, self.plugin)
        return found


def _wrong_attribute(backend: Backend) -> str:
    """Return the description of an invalid attribute; empty if all attributes are valid."""
    concurrency: object = backend.concurrency
    if concurrency is not None and (type(concurrency) is not int or concurrency < 1):
        return f"concurrency is {concurrency!r}, expected None or a whole number of at least 1"
    dtypes: object = backend.cache_dtypes
    if not isinstance(dtypes, tuple | list) or (concurrency is None and not dtypes):
        return f"cache_dtypes is {dtypes!r}, expected names of data types"
    uncalled = (name for name in ("supports", "compile") if not callable(getattr(backend, name)))
    return f"{name} is not callable" if (name := next(uncalled, "")) else ""
