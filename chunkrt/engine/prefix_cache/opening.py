"""Creation of a prefix cache from an engine's options."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from chunkrt import __version__
from chunkrt.backends.coverage import QNN
from chunkrt.backends.fallback import NpuHealth
from chunkrt.backends.native.cpu import selected_kernels
from chunkrt.backends.registry import NATIVE
from chunkrt.checkpoints import catalogue
from chunkrt.engine import options as engine_options
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.prefix_cache.cache import PrefixCache
from chunkrt.engine.prefix_cache.disk import DiskStore
from chunkrt.engine_directory.manifest import PLAN, WEIGHTS
from chunkrt.errors import ConfigError

if TYPE_CHECKING:
    from chunkrt.engine.loaded import LoadedModel

MOST_BYTES = 2 * 2**30
SHARE_OF_FREE = 8
DISK_BYTES = 8 * 2**30


_UNIMPORTANT = ("context length", "chunk length", "executors", "tokenizer")
"""Parts of an engine's identity that do not affect the contents of a state."""


def own_folder() -> Path:
    """Return the default folder for files of the prefix cache."""
    return catalogue.home() / "prefixes"


def open_cache(engine: LoadedModel, *, has_ranks: bool, npu_health: NpuHealth | None) -> PrefixCache | None:
    """Open the prefix cache that an engine's options request. Return None if it is off.

    Raises:
        ConfigError: a cache is requested with several ranks, or `prefix_cache` is a path that is not a folder.
    """
    options = engine.options
    place = options.prefix_cache
    if has_ranks and place not in (None, "off"):
        raise ConfigError(
            f"several ranks do not support the prefix cache, but `prefix_cache` is {str(place)!r}; "
            "omit it, or choose 'off'"
        )
    place = place or ("off" if has_ranks else engine_options.DEFAULT_PREFIX_CACHE)
    if place == "off":
        return None
    store = None
    if place != "memory":
        folder = own_folder() if place == "disk" else Path(place).expanduser()
        if not next(path for path in (folder, *folder.absolute().parents) if path.exists()).is_dir():
            raise ConfigError(
                f"`prefix_cache` is {str(place)!r}, which is not a folder; choose memory, disk, off or a folder"
            )
        store = DiskStore(
            folder,
            options.prefix_cache_disk or DISK_BYTES,
            model=engine.manifest.model,
            scheme=engine.manifest.scheme.name,
            identity=_identity(engine),
        )
    limit = options.prefix_cache_memory or default_bytes()
    executors, chunk_length = engine.scheduler.executors, engine.chunk_length
    return PrefixCache(
        executors.exact_step, executors.tokens_differ, chunk_length, limit, store=store, npu_health=npu_health
    )


def _identity(engine: LoadedModel) -> dict[str, object]:
    """Return everything that can change the contents of a state."""
    options, manifest, executors = engine.options, engine.manifest, engine.scheduler.executors
    step = executors.exact_step
    backends = engine.npu_backend.name, engine.cpu_backend.name
    has_htp = backends[0] == QNN
    return {
        "chunkrt": [
            __version__,
            native_digest(),
        ],  # the running version, which may differ from that of the compiler
        **{name: value for name, value in engine.identity.items() if name not in _UNIMPORTANT},
        "files": [(name, digest) for name, (_, digest) in sorted(manifest.files.items()) if name in (PLAN, WEIGHTS)],
        "backends": backends,
        "kernels": selected_kernels() if NATIVE in backends else {},
        "NPU": [str(getattr(engine.npu_backend, "soc", "")), *_on_npu(options)] if has_htp else [],
        "chunks": [step, executors.tokens_differ, engine.chunk_length if step > 1 else 0],
        "operators": repr(options.ops),
        "outputs": options.outputs,
        "raw keys": options.context_shift,
    }


def _on_npu(options: EngineOptions) -> list[object]:
    """Return the properties of the NPU that can change its results."""
    attention = [options.attention, options.npu_windows, options.graph_layers, options.npu_sinks]
    return [repr(options.htp), options.decodes_on, *attention]


@cache
def native_digest() -> str:
    """Return the hexadecimal digest of the compiled kernels."""
    from chunkrt import _native

    return xxhash.xxh3_128_hexdigest(Path(_native.__file__).read_bytes())


def default_bytes() -> int:
    """Return an eighth of the free memory, within bounds."""
    import psutil

    return min(psutil.virtual_memory().available // SHARE_OF_FREE, MOST_BYTES)
