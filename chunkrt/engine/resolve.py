"""Find the engine directory of a model by name; download or compile the model if necessary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from chunkrt.checkpoints import catalogue
from chunkrt.checkpoints.checkpoint import gguf_in
from chunkrt.checkpoints.hub import cached_model, fetch_model, parse_hub_id
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.roles import asked_npu, check_npu, default_npu_scheme, linear_refusal
from chunkrt.engine_directory.adapter_targets import FILE as ADAPTERS
from chunkrt.engine_directory.manifest import cached_folder, is_engine_directory, read_manifest
from chunkrt.errors import INSTALL_COMPILE, ConfigError, ModelError, PartitionError, cause_of, needs_compile_extra
from chunkrt.files import Progress, cached_entry
from chunkrt.graph.placement import ALL_ON_CPU, Placement, read_placement
from chunkrt.graph.plan import ALONE, Plan, Ranks
from chunkrt.quant.scheme import DEFAULT_BUDGETS, DEFAULT_SCHEME, MIXED, Recipe, Scheme, Search, find_scheme

HOST_DESCRIPTION = "host/host.json"
"""The file that describes a model to a program without chunkrt; see `engine/host.py`."""

STATIC_OPTIONS = ("shadow", "budget", "outputs", "equalisation", "rotation")
COMPILED_OPTIONS = (*STATIC_OPTIONS, "rounding")
"""Options that only a static scheme uses."""


def engine_folder(
    model: str,
    options: EngineOptions,
    progress: Progress,
    ranks: Ranks = ALONE,
    *,
    check: Callable[[Plan, Scheme, EngineOptions], None] | None = None,
) -> Path:
    """Return the engine directory of a model. This is the model itself, or the result of compiling it into the cache.
    The model is downloaded if necessary.

    Args:
        check: raises an error for a plan that cannot run with the options; called before weights are written.

    Raises:
        ConfigError, ModelError: see `chunkrt.load`.
        BackendUnavailableError: the NPU was requested by name, but is not available.
        PartitionError: the NPU was requested by name, but does not support the scheme.
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
        adapter=options.adapter,
        takes_adapters=options.adapters,
        ranks=ranks,
    )

    try:
        with cached_entry(folder, "compiling a model", read_manifest) as found:
            if found is None:
                _check_compiler()
                from chunkrt.compile.compiler import prepare_checkpoint, write_engine_directory

                prepared = prepare_checkpoint(
                    checkpoint,
                    recipe,
                    placement,
                    model=model,
                    calibration=options.calibration,
                    adapter=options.adapter,
                    takes_adapters=options.adapters,
                    ranks=ranks,
                    progress=progress,
                )
                if check is not None:
                    check(prepared.planned.plan, prepared.scheme, options)
                write_engine_directory(prepared, folder, progress)
    except OSError as error:
        raise ModelError(f"cannot write {cache}: {cause_of(error)}; set CHUNKRT_HOME to move it") from error
    return folder


def find_recipe(model: str, options: EngineOptions, progress: Progress) -> tuple[Path, Recipe]:
    """Return a model's checkpoint on disk, and the recipe for compiling it.

    Raises:
        ConfigError, ModelError: the model does not exist, or the scheme does not use an option.
        PartitionError: the NPU was requested by name, but does not support the scheme.
    """
    checkpoint, default_scheme = find_checkpoint(model, progress)
    recipe = choose_recipe(options, default_scheme)
    scheme = recipe.scheme
    if options.calibration and not scheme.is_static:
        raise ConfigError(f"the scheme {scheme.name!r} uses no calibration; omit `calibration`")
    npu = asked_npu(options)
    if npu and options.npu != "auto" and (reason := linear_refusal(npu, scheme)):
        raise PartitionError(f"{options.npu} does not support linear layers under the scheme {scheme.name!r}: {reason}")
    return checkpoint, recipe


def plan_model(model: str, options: EngineOptions, progress: Progress) -> tuple[Plan, Scheme]:
    """Return the plan of a checkpoint and its scheme, before it is calibrated. The errors are those of
    `engine_folder`.
    """
    _check_compiler()
    from chunkrt.compile.compiler import plan_checkpoint

    checkpoint, recipe = find_recipe(model, options, progress)
    planned = plan_checkpoint(checkpoint, options_placement(options), recipe.scheme, adapter=options.adapter)
    return planned.plan, recipe.scheme


def _check_compiler(task: str = "compiling a model") -> None:
    """Raise ConfigError, which says that the task needs it, if a part of the compiler is not installed."""
    try:
        import chunkrt.compile.compiler  # noqa: F401
    except ImportError as error:
        if not needs_compile_extra(error):
            raise
        raise ConfigError(
            f"{task} needs {error.name}, which is not installed; run {INSTALL_COMPILE}, or give an engine directory"
        ) from error


def choose_recipe(options: EngineOptions, default: str) -> Recipe:
    """Return the recipe of a checkpoint. `default` is the checkpoint's own scheme, which is used without an NPU or if
    the NPU supports it.

    Raises:
        ConfigError: the scheme does not use an option.
    """
    npu = asked_npu(options)
    scheme = find_scheme(options.scheme or (default_npu_scheme(npu, default) if npu else default))
    if options.rounding is not None:
        if scheme.weight_bits != 4:
            raise ConfigError(f"the scheme {scheme.name!r} has no 4-bit weights and does not use `rounding`; omit it")
        scheme = replace(scheme, rounding=options.rounding)
    if not scheme.is_static:
        for name in STATIC_OPTIONS:
            if _is_given(getattr(options, name)):
                raise ConfigError(f"the scheme {scheme.name!r} is not static and does not use `{name}`; omit it")
        return Recipe(scheme=scheme)
    in_float = replace(scheme, float_outputs=("*",))
    is_w8a8_in_float = scheme.name == "w8a8" and not (npu and linear_refusal(npu, in_float))
    if options.outputs == "float" or (options.outputs is None and is_w8a8_in_float):
        scheme = in_float
    if options.equalisation is not None:
        scheme = replace(scheme, equalisation=None if options.equalisation == "off" else options.equalisation)
    if options.rotation is not None:
        scheme = replace(scheme, is_rotated=options.rotation)
    search: Search | None = None
    if scheme.name == MIXED:
        if options.shadow is not None:
            raise ConfigError("the scheme 'mixed' selects shadows itself; omit `shadow`, or use `scheme='w8a8'`")
        search = "mixed"
    elif options.shadow == "auto":
        search = "shadow"
    elif options.shadow not in (None, "none"):
        patterns = ("*",) if options.shadow == "all" else tuple(part.strip() for part in options.shadow.split(","))
        scheme = replace(scheme, shadowed=patterns)
    if scheme.activation_bits == 16 and (search or scheme.shadowed):
        raise ConfigError(
            f"linear layers of the scheme {scheme.name!r} use 16-bit inputs and need no shadow; "
            "use the scheme 'w8a8' or 'mixed'"
        )
    if search is None and options.budget is not None:
        raise ConfigError(
            "`budget` has no effect without `shadow='auto'` or `scheme='mixed'`; omit it, or set one of these"
        )
    return Recipe(
        scheme=scheme,
        has_to_rotate=options.rotation is True,
        search=search,
        budget=search and (options.budget or DEFAULT_BUDGETS[search]),
    )


def _is_given(option: object) -> bool:
    """Return True if a static option was set, including an equalisation of 0."""
    return option is not None and option is not False


def check_compiled(folder: Path, options: EngineOptions, ranks: Ranks = ALONE) -> None:
    """Reject options that cannot be changed after compilation.

    Raises:
        ConfigError: the ranks, the scheme or the placement differ from those of the compiled model, `npu` is "off", or
            another option of quantisation is set.
        ModelError: the folder is not an engine directory of this format.
    """
    manifest = read_manifest(folder)
    if manifest.ranks != ranks:
        raise ConfigError(f"{folder} was compiled for {manifest.ranks}, not for {ranks}; compile it again")
    if options.scheme not in (None, manifest.scheme.name):
        compiled = manifest.scheme.name
        raise ConfigError(f"{folder} was compiled under {compiled!r}, not {options.scheme!r}; compile it again")
    for name in COMPILED_OPTIONS:
        if _is_given(getattr(options, name)):
            raise ConfigError(
                f"{folder} is compiled and does not accept {name} any more; pass the checkpoint to compile it again"
            )
    is_placed = options.placement is None or list(options_placement(options).items()) == list(
        manifest.placement.items()
    )
    if options.npu == "off" or not is_placed:
        raise ConfigError(f"{folder} is compiled, so its placement is fixed; pass the checkpoint to place it again")
    if options.calibration is not None:
        raise ConfigError(f"{folder} is compiled, so its grids are fixed; pass the checkpoint to calibrate it again")
    if options.adapter is not None:
        raise ConfigError(f"{folder} is compiled, so its weights are fixed; pass the checkpoint to add an adapter")
    if options.adapters and not (folder / ADAPTERS).exists():
        raise ConfigError(f"{folder} was compiled without `adapters`; compile it again with this option")


def find_checkpoint(model: str, progress: Progress) -> tuple[Path, str]:
    """Return a model's checkpoint on disk and its default scheme; download it if necessary.

    The search order is: a file or folder, the catalogue, the cache of the Hugging Face hub's client, the hub.

    Raises:
        ConfigError: the model was found in none of these places.
        ModelError: the file does not exist, or cannot be downloaded.
    """
    path = Path(model)
    if (path / HOST_DESCRIPTION).exists():
        raise ConfigError(
            f"{model} holds the files for a program without chunkrt (docs/phones.md); to run the model with chunkrt, "
            "compile it without --for-host"
        )
    if path.exists():
        is_plain_folder = path.is_dir() and not (path / "config.json").exists()
        return (is_plain_folder and gguf_in(path)) or path, DEFAULT_SCHEME
    if (hub_model := parse_hub_id(model)) is not None:
        if (found := cached_model(hub_model)) is None:
            # before the download of a checkpoint that cannot be compiled
            _check_compiler(f"there is no file or folder {model}; compiling a model of the Hugging Face hub")
            progress(f"fetching {model}", 0, 0)
            found = fetch_model(hub_model)
        return found, DEFAULT_SCHEME
    if path.name != model or model.endswith((".gguf", ".onnx")):
        raise ModelError(f"there is no file or folder {model}")
    entry = catalogue.find(model)
    found = catalogue.pulled(entry)
    if found is None or catalogue.damage(entry):
        _check_compiler()
        from chunkrt.checkpoints.catalogue.fetch import pull  # an HTTP client, which a pulled model does not need

        found = pull(entry, lambda done, total: progress(f"downloading {model}", done, total))
    return found, entry.scheme


def options_placement(options: EngineOptions) -> Placement:
    """Return the placement of modules from the options. Raise ConfigError if the placement file is invalid."""
    if options.npu == "off":
        return ALL_ON_CPU
    if isinstance(options.placement, Path):
        return read_placement(options.placement)
    return options.placement or {}
