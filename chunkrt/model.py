"""From what a person calls a model to its engine directory: found, pulled, or compiled into the cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from chunkrt import catalogue
from chunkrt.backends import qnn
from chunkrt.engine_directory import cached_folder, is_engine_directory, read_manifest
from chunkrt.errors import ConfigError, ModelError, PartitionError
from chunkrt.graph.placement import ALL_ON_CPU, Placement, read_placement
from chunkrt.options import EngineOptions
from chunkrt.quant.scheme import STATIC_SCHEMES, Scheme, find_scheme
from chunkrt.shared_folder import only_writer, remove

DEFAULT_SCHEME = "w8a8-dynamic"
DEFAULT_NPU_SCHEME = "w8a16"

Progress = Callable[[str, int, int], None]
"""Told (what is being done, how much is done, how much there is)."""

log = logging.getLogger(__name__)


def engine_folder(model: str, options: EngineOptions, progress: Progress) -> Path:
    """The engine directory of a model: itself, or compiled into the cache, pulled before that if need be.

    Raises:
        ConfigError, ModelError: as `chunkrt.load`.
        BackendUnavailableError: the NPU was asked for by name, and onnxruntime-qnn is not here.
        PartitionError: it was, with a scheme that it does not run.
    """
    if options.npu == "qnn":
        qnn.open_htp()  # before anything is downloaded or compiled for it
    path = Path(model)
    if is_engine_directory(path):
        check_compiled(path, options)
        return path
    checkpoint, default_scheme = find_checkpoint(model, progress)
    scheme = choose_scheme(options, default_scheme)
    if options.calibration and not scheme.is_static:
        raise ConfigError(f"the scheme {scheme.name!r} uses no calibration; leave --calibration away")
    if options.npu == "qnn" and not scheme.is_static:
        static = ", ".join(STATIC_SCHEMES)
        raise PartitionError(f"the NPU has no linears under the scheme {scheme.name!r}; use a static one: {static}")
    placement = options_placement(options)
    cache = catalogue.home() / "engines"
    folder = cached_folder(
        cache,
        checkpoint,
        scheme=scheme.name,
        placement=placement,
        calibration=options.calibration,
    )
    if _is_whole(folder):
        return folder
    try:
        from chunkrt.compiler import compile_checkpoint
    except ImportError as error:
        raise ConfigError(
            f"compiling a model needs {error.name}, which is not installed; pip install it, or give an engine directory"
        ) from error
    try:
        with only_writer(cache, "compiling a model"):
            if not _is_whole(folder):
                if folder.exists():
                    log.warning("%s is damaged; compiling %s again", folder, model)
                    remove(folder)
                compile_checkpoint(
                    checkpoint,
                    scheme,
                    placement,
                    folder,
                    model=model,
                    calibration=options.calibration,
                    progress=progress,
                )
    except OSError as error:
        raise ModelError(f"cannot write {cache}: {error.strerror or error}; set CHUNKRT_HOME to move it") from error
    return folder


def _is_whole(folder: Path) -> bool:
    """Whether an engine directory of the cache is there and undamaged."""
    try:
        read_manifest(folder)
    except ModelError:
        return False
    return True


def choose_scheme(options: EngineOptions, default: str) -> Scheme:
    """The scheme that a checkpoint is compiled under; `default` is its own, where no NPU is used."""
    return find_scheme(options.scheme or (DEFAULT_NPU_SCHEME if wants_npu(options) else default))


def wants_npu(options: EngineOptions) -> bool:
    """Whether Qualcomm's NPU, or its emulator, shall run the static subgraphs."""
    return options.npu == "qnn" or (options.npu == "auto" and qnn.has_npu())


def check_compiled(folder: Path, options: EngineOptions) -> None:
    """Refuse options that a compiled model cannot follow any more.

    Raises:
        ConfigError: another scheme, a placement, a calibration, or npu "off".
        ModelError: the folder is not an engine directory of this format.
    """
    manifest = read_manifest(folder)
    if options.scheme not in (None, manifest.scheme):
        raise ConfigError(f"{folder} was compiled under {manifest.scheme!r}, not {options.scheme!r}; compile it again")
    if options.placement is not None or options.npu == "off":
        raise ConfigError(f"{folder} is compiled, its placement is fixed; give the checkpoint to place it anew")
    if options.calibration is not None:
        raise ConfigError(f"{folder} is compiled, its grids are fixed; give the checkpoint to calibrate it anew")


def find_checkpoint(model: str, progress: Progress) -> tuple[Path, str]:
    """A model's checkpoint on disk and its default scheme; a catalogue entry is pulled if it is not there.

    Raises:
        ConfigError: neither a file nor a name of the catalogue.
    """
    if Path(model).exists():
        return Path(model), DEFAULT_SCHEME
    if Path(model).name != model or model.endswith(".gguf"):
        raise ModelError(f"there is no file or folder {model}")
    entry = catalogue.find(model)
    path = catalogue.pull(entry, lambda done, total: progress(f"downloading {model}", done, total))
    return path, entry.scheme


def options_placement(options: EngineOptions) -> Placement:
    """Where the options place modules. Raises ConfigError if the placement file is wrong."""
    if options.npu == "off":
        return ALL_ON_CPU
    return read_placement(options.placement) if options.placement else {}
