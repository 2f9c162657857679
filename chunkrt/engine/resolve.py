"""From what a person calls a model to its engine directory: found, pulled, or compiled into the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from chunkrt.checkpoints import catalogue
from chunkrt.checkpoints.gguf_parts import gguf_in
from chunkrt.checkpoints.hub import cached_model, fetch_model, parse_hub_id
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.roles import asked_npu, check_npu, default_npu_scheme, linear_refusal
from chunkrt.engine_directory.manifest import cached_folder, is_engine_directory, read_manifest
from chunkrt.errors import ConfigError, ModelError, PartitionError
from chunkrt.files import Progress, made_once
from chunkrt.graph.placement import ALL_ON_CPU, Placement, read_placement
from chunkrt.graph.plan import Plan
from chunkrt.graph.ranks import ALONE, Ranks
from chunkrt.quant.scheme import DEFAULT_BUDGETS, DEFAULT_SCHEME, MIXED, Recipe, Scheme, Search, find_scheme

STATIC_OPTIONS = ("shadow", "budget", "outputs", "equalisation", "rotation")
"""Those of the options that a static scheme alone has a use for."""


def engine_folder(
    model: str,
    options: EngineOptions,
    progress: Progress,
    ranks: Ranks = ALONE,
    *,
    check: Callable[[Plan, Scheme, EngineOptions], None] | None = None,
) -> Path:
    """The engine directory of a model: itself, or compiled into the cache, pulled before that if need be.

    Args:
        check: raises for a plan that the options cannot run; asked before weights are written for it.

    Raises:
        ConfigError, ModelError: as `chunkrt.load`.
        BackendUnavailableError: the NPU was asked for by name, and is not here.
        PartitionError: it was, with a scheme that it does not run.
    """
    check_npu(options)
    path = Path(model)
    if is_engine_directory(path):
        check_compiled(path, options, ranks)
        return path
    checkpoint, recipe = find_recipe(model, options, progress)
    placement = options_placement(options)
    cache = catalogue.home() / "engines"
    folder = cached_folder(
        cache,
        checkpoint,
        recipe=recipe,
        placement=placement,
        calibration=options.calibration,
        ranks=ranks,
    )

    def whole() -> Path:
        read_manifest(folder)
        return folder

    def compiled() -> Path:
        try:
            from chunkrt.compile.compiler import compile_checkpoint
        except ImportError as error:
            raise ConfigError(
                f"compiling a model needs {error.name}, which is not installed; pip install it, or give an engine "
                "directory"
            ) from error
        compile_checkpoint(
            checkpoint,
            recipe,
            placement,
            folder,
            model=model,
            calibration=options.calibration,
            ranks=ranks,
            check=None if check is None else lambda plan, scheme: check(plan, scheme, options),
            progress=progress,
        )
        return folder

    try:
        return made_once(folder, "compiling a model", whole, compiled)
    except OSError as error:
        raise ModelError(f"cannot write {cache}: {error.strerror or error}; set CHUNKRT_HOME to move it") from error


def find_recipe(model: str, options: EngineOptions, progress: Progress) -> tuple[Path, Recipe]:
    """A model's checkpoint on disk, and what it is compiled under.

    Raises:
        ConfigError, ModelError: there is no such model; an option that the scheme has no use for.
        PartitionError: the NPU that was asked for by name does not run the scheme.
    """
    checkpoint, default_scheme = find_checkpoint(model, progress)
    recipe = choose_recipe(options, default_scheme)
    scheme = recipe.scheme
    if options.calibration and not scheme.is_static:
        raise ConfigError(f"the scheme {scheme.name!r} uses no calibration; leave --calibration away")
    npu = asked_npu(options)
    if npu and options.npu != "auto" and (reason := linear_refusal(npu, scheme)):
        raise PartitionError(f"{options.npu} has no linears under the scheme {scheme.name!r}: {reason}")
    return checkpoint, recipe


def choose_recipe(options: EngineOptions, default: str) -> Recipe:
    """What a checkpoint is compiled under; `default` is its own scheme, where no NPU is used or the NPU has it.

    Raises:
        ConfigError: an option that the scheme has no use for.
    """
    npu = asked_npu(options)
    scheme = find_scheme(options.scheme or (default_npu_scheme(npu, default) if npu else default))
    if not scheme.is_static:
        for name in STATIC_OPTIONS:
            if _is_given(getattr(options, name)):
                raise ConfigError(f"the scheme {scheme.name!r} is not static and has no {name}; leave it away")
        return Recipe(scheme=scheme)
    in_float = replace(scheme, float_outputs=("*",))
    is_w8a8_in_float = scheme.name == "w8a8" and not (npu and linear_refusal(npu, in_float))
    if options.outputs == "float" or (options.outputs is None and is_w8a8_in_float):
        scheme = in_float
    if options.equalisation is not None:
        scheme = replace(scheme, equalisation=None if options.equalisation == "off" else options.equalisation)
    scheme = replace(scheme, is_rotated=options.rotation)
    search: Search | None = None
    if scheme.name == MIXED:
        if options.shadow is not None:
            raise ConfigError("the scheme 'mixed' chooses shadows by itself; leave --shadow away, or use 'w8a8'")
        search = "mixed"
    elif options.shadow == "auto":
        search = "shadow"
    elif options.shadow not in (None, "none"):
        patterns = ("*",) if options.shadow == "all" else tuple(part.strip() for part in options.shadow.split(","))
        scheme = replace(scheme, shadowed=patterns)
    if scheme.activation_bits == 16 and (search or scheme.shadowed):
        raise ConfigError(
            f"linears of the scheme {scheme.name!r} take 16 bits and need no shadow; use 'w8a8' or 'mixed'"
        )
    if search is None and options.budget is not None:
        raise ConfigError("a budget is for --shadow auto and for --scheme mixed; leave it away")
    return Recipe(scheme=scheme, search=search, budget=search and (options.budget or DEFAULT_BUDGETS[search]))


def _is_given(option: object) -> bool:
    """Whether a static option was set; an equalisation of 0 was."""
    return option is not None and option is not False


def check_compiled(folder: Path, options: EngineOptions, ranks: Ranks = ALONE) -> None:
    """Refuse options that a compiled model cannot follow any more.

    Raises:
        ConfigError: other ranks, another scheme or placement, npu "off", or any other option that says how to quantise.
        ModelError: the folder is not an engine directory of this format.
    """
    manifest = read_manifest(folder)
    if manifest.ranks != ranks:
        raise ConfigError(f"{folder} was compiled for {manifest.ranks}, not for {ranks}; compile it again")
    if options.scheme not in (None, manifest.scheme.name):
        compiled = manifest.scheme.name
        raise ConfigError(f"{folder} was compiled under {compiled!r}, not {options.scheme!r}; compile it again")
    for name in STATIC_OPTIONS:
        if _is_given(getattr(options, name)):
            raise ConfigError(
                f"{folder} is compiled and takes no {name} any more; give the checkpoint to compile it anew"
            )
    is_placed = options.placement is None or list(options_placement(options).items()) == list(
        manifest.placement.items()
    )
    if options.npu == "off" or not is_placed:
        raise ConfigError(f"{folder} is compiled, its placement is fixed; give the checkpoint to place it anew")
    if options.calibration is not None:
        raise ConfigError(f"{folder} is compiled, its grids are fixed; give the checkpoint to calibrate it anew")


def find_checkpoint(model: str, progress: Progress) -> tuple[Path, str]:
    """A model's checkpoint on disk and its default scheme; fetched if it is not there.

    It is looked for as a file or folder, in the catalogue, in the cache of the Hugging Face hub's client, on the hub.

    Raises:
        ConfigError: none of these.
        ModelError: there is no such file, or it cannot be fetched.
    """
    path = Path(model)
    if path.exists():
        is_plain_folder = path.is_dir() and not (path / "config.json").exists()
        return (is_plain_folder and gguf_in(path)) or path, DEFAULT_SCHEME
    if (hub_model := parse_hub_id(model)) is not None:
        if (found := cached_model(hub_model)) is None:
            progress(f"fetching {model}", 0, 0)
            found = fetch_model(hub_model)
        return found, DEFAULT_SCHEME
    if path.name != model or model.endswith((".gguf", ".onnx")):
        raise ModelError(f"there is no file or folder {model}")
    entry = catalogue.find(model)
    path = catalogue.pull(entry, lambda done, total: progress(f"downloading {model}", done, total))
    return path, entry.scheme


def options_placement(options: EngineOptions) -> Placement:
    """Where the options place modules. Raises ConfigError if the placement file is wrong."""
    if options.npu == "off":
        return ALL_ON_CPU
    if isinstance(options.placement, Path):
        return read_placement(options.placement)
    return options.placement or {}
