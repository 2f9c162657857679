"""Who plays the NPU: Qualcomm's, its emulator, or nobody."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path

from chunkrt import catalogue
from chunkrt.backends.qnn import QnnBackend, Soc, find_soc, has_npu, this_soc
from chunkrt.engine_directory import CONTEXTS, Manifest
from chunkrt.errors import ConfigError
from chunkrt.options import DEFAULT_CHUNK_LENGTH, EngineOptions

DEFAULT_EMULATED_SOC = "SM8650"
log = logging.getLogger(__name__)


def open_npu(manifest: Manifest, folder: Path, options: EngineOptions) -> QnnBackend | None:
    """The NPU's backend for an engine directory, or None where the CPU shall do its work.

    Raises:
        BackendUnavailableError: the NPU was asked for by name, and onnxruntime-qnn is not here.
        ConfigError: nobody knows which SoC this is.
    """
    if options.npu not in ("auto", "qnn") or (options.npu == "auto" and not has_npu()):
        if options.soc is not None:
            log.warning("--soc %s has no effect: the CPU does the NPU's work; try --npu qnn", options.soc)
        return None
    if options.npu == "auto" and not manifest.scheme.is_static:
        log.warning("the NPU does not run the scheme %s, the CPU does; try --scheme w8a16", manifest.scheme.name)
        return None
    try:
        soc = choose_soc(options.soc, manifest)
    except ConfigError as error:
        if options.npu != "auto":
            raise
        log.warning("%s; the CPU does the NPU's work", error)
        return None
    compiled = folder / CONTEXTS
    backend = QnnBackend(
        soc,
        contexts=contexts_folder(),
        compiled=compiled if compiled.is_dir() else None,
        options=options.htp,
    )
    if backend.htp.is_emulated:
        _tell_of_emulation()
    return backend


def choose_soc(name: str | None, manifest: Manifest | None = None) -> Soc:
    """The SoC to run on or to emulate: the one named, this machine's, the one compiled for, or a common one."""
    return (
        find_soc(name)
        if name
        else this_soc() or find_soc(manifest.npu[0].soc if manifest and manifest.npu else DEFAULT_EMULATED_SOC)
    )


def compiled_chunk_length(manifest: Manifest) -> int:
    """The chunk length that an engine directory is for: of several the usual one, or else the longest.

    The first that was named would not do: of "1,32,128" it would have the NPU run token by token.
    """
    lengths = {target.chunk_length for target in manifest.npu}
    return DEFAULT_CHUNK_LENGTH if DEFAULT_CHUNK_LENGTH in lengths or not lengths else max(lengths)


def contexts_folder() -> Path:
    """Where compiled contexts of all models are kept."""
    return catalogue.home() / "contexts"


@cache
def _tell_of_emulation() -> None:
    log.warning("there is no Hexagon NPU here, it is emulated: values are a device's, speed means nothing")
