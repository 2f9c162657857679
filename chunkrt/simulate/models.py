"""Models for planning and simulation: checkpoints, engine directories, configs without weights, and shapes."""

from __future__ import annotations

import os
from pathlib import Path

from chunkrt.checkpoints.config_only import ConfigSource, find_config
from chunkrt.engine.model_options import choose_chunk_length, choose_context_length
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.resolve import check_compiled, choose_recipe, find_recipe, options_placement
from chunkrt.engine.roles import npu_under
from chunkrt.engine_directory.manifest import Manifest, is_engine_directory, read_manifest, read_plan
from chunkrt.engine_directory.weights import check_shadowed, settle
from chunkrt.errors import ConfigError
from chunkrt.files import Progress
from chunkrt.graph.placement import Placement
from chunkrt.graph.plan import ALONE, Plan, Ranks
from chunkrt.quant.scheme import DEFAULT_SCHEME, Scheme
from chunkrt.simulate.shape import Shape, find_shape, read_shape, shapes


def find_model_shape(model: str | os.PathLike[str] | Shape) -> Shape | None:
    """Return the shape that a name or a TOML file stands for; None if it stands for a model.

    Raises:
        ConfigError: the file is not a shape.
    """
    if isinstance(model, Shape):
        return model
    name = os.fspath(model)
    if name in shapes():
        return find_shape(name)
    return read_shape(Path(name)) if name.endswith(".toml") and Path(name).is_file() else None


def plan_model(
    model: str | os.PathLike[str] | Shape, options: EngineOptions, ranks: Ranks, progress: Progress
) -> tuple[Plan, Scheme, int]:
    """Return a model's plan, and the scheme and chunk length that an engine would use.

    No weights are read, unless a scheme has to be searched.

    Args:
        model: a name, file or folder as `chunkrt.load` takes it; a config.json or its folder, without weights; a shape,
            its name, or its TOML file.

    Raises:
        ConfigError, ModelError: under the conditions of `chunkrt.load`; or a scheme has to be searched, and there are
            no weights.
    """
    manifest: Manifest | None = None
    if not isinstance(model, Shape) and is_engine_directory(folder := Path(model)):
        check_compiled(folder, options, ranks)
        manifest = read_manifest(folder)
        plan, scheme = read_plan(folder), manifest.scheme
    elif is_weightless(model):
        recipe = choose_recipe(options, DEFAULT_SCHEME)
        if recipe.search:
            raise ConfigError(
                f"{model} has no weights, which the search for {recipe.search} layers needs; name the layers "
                "(--shadow LIST), or give a checkpoint"
            )
        plan, scheme = plan_weightless(model, options_placement(options), recipe.scheme, ranks)
    else:
        plan, scheme = _plan_checkpoint(os.fspath(model), options, ranks, progress)  # type: ignore[arg-type]
    has_npu = npu_under(options, scheme) is not None
    context_length = choose_context_length(plan, options)
    return plan, scheme, choose_chunk_length(options, context_length, has_npu=has_npu, manifest=manifest)


def is_weightless(model: str | os.PathLike[str] | Shape) -> bool:
    """Return True if a model is a shape, or a config without weights."""
    return find_model_shape(model) is not None or find_config(Path(model)) is not None  # type: ignore[arg-type]


def plan_weightless(
    model: str | os.PathLike[str] | Shape, placement: Placement, scheme: Scheme, ranks: Ranks = ALONE
) -> tuple[Plan, Scheme]:
    """Return the plan of a shape or of a config without weights, and the scheme, adapted to the model.

    Raises:
        ConfigError: the placement or a shadow names nothing; the ranks cannot share the decoder; the file is no shape.
        ModelError: the config is damaged or unsupported.
    """
    ranks = ranks.for_scheme(is_static=scheme.is_static)
    if (shape := find_model_shape(model)) is not None:
        plan = shape.plan(placement, ranks, is_shadowed=scheme.is_shadowed)
    else:
        from chunkrt.graph.decoders import make_decoder
        from chunkrt.graph.partition import plan_decoder

        config = find_config(Path(model))  # type: ignore[arg-type]
        assert config is not None
        source = ConfigSource(config)
        decoder, _ = make_decoder(source, ranks)
        source.shapes = {name: shape for p in decoder.parameters() for name, shape in p.checkpoint_tensors.items()}
        planned = plan_decoder(source, decoder, placement, scheme.is_shadowed)
        plan, scheme = planned.plan, settle(planned, scheme)
    check_shadowed(plan, scheme)
    return plan, scheme


def _plan_checkpoint(model: str, options: EngineOptions, ranks: Ranks, progress: Progress) -> tuple[Plan, Scheme]:
    from chunkrt.compile.compiler import calibrate_scheme, open_decoder
    from chunkrt.graph.partition import plan_decoder

    checkpoint, recipe = find_recipe(model, options, progress)
    scheme = recipe.scheme
    if recipe.search:
        plain = plan_decoder(*open_decoder(checkpoint, adapter=options.adapter), {})
        scheme, _ = calibrate_scheme(plain, checkpoint, recipe, options.calibration, model=model, progress=progress)
    opened = open_decoder(checkpoint, ranks.for_scheme(is_static=scheme.is_static), adapter=options.adapter)
    planned = plan_decoder(*opened, options_placement(options), scheme.is_shadowed)
    scheme = settle(planned, scheme)
    check_shadowed(planned.plan, scheme)
    return planned.plan, scheme
