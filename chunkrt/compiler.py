"""The compile half: from a checkpoint to an engine directory.

weights -> graph -> plan -> quantisation -> engine directory. Imported only when something has to be compiled: a
device that runs engine directories never needs it, nor ONNX.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chunkrt.calibrate import cached_calibration
from chunkrt.choose import cached_choice
from chunkrt.engine_directory import PLAN, WEIGHTS, write_manifest
from chunkrt.errors import ModelError
from chunkrt.graph.decoders import build_decoder
from chunkrt.graph.modules import Module
from chunkrt.graph.partition import partition
from chunkrt.graph.placement import Placement, place
from chunkrt.graph.plan import Plan
from chunkrt.graph.shadow import cut_shadowed
from chunkrt.graph.tracing import trace
from chunkrt.quant.calibration import Calibration
from chunkrt.quant.folding import Folding
from chunkrt.quant.scheme import Recipe, Scheme
from chunkrt.quant.weights import check_calibration, check_shadowed, write_weights
from chunkrt.shared_folder import written_aside
from chunkrt.tokenizer import Tokenizer
from chunkrt.weights.checkpoint import open_checkpoint
from chunkrt.weights.source import TensorSource

Progress = Callable[[str, int, int], None]
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A checkpoint with its decoder and plan: all that is known before a weight is read."""

    source: TensorSource
    decoder: Module
    plan: Plan


def plan_checkpoint(checkpoint: Path, placement: Placement, scheme: Scheme | None = None) -> Planned:
    """Open a checkpoint, build its decoder, place it and cut it into subgraphs.

    Args:
        scheme: linears that it shadows are cut out.

    Raises:
        ModelError: the checkpoint is damaged, incomplete or unsupported.
        ConfigError: the placement names no module.
    """
    source = open_checkpoint(checkpoint)
    decoder = build_decoder(source)
    place(decoder, placement)
    graph = trace(decoder)
    if scheme is not None:
        cut_shadowed(graph, scheme.is_shadowed)
    plan = partition(graph, family=source.architecture)
    return Planned(source=source, decoder=decoder, plan=plan)


def compile_checkpoint(
    checkpoint: Path,
    recipe: Recipe,
    placement: Placement,
    folder: Path,
    *,
    model: str,
    calibration: Path | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Plan:
    """Write the engine directory of a checkpoint, aside and then renamed.

    Args:
        folder: where it shall be; nothing may be there yet, and nobody else may be writing it.
        recipe: a scheme; or what is searched for, on the calibration's text.
        calibration: for a static scheme; by default one is made from the text that comes with chunkrt. One that was
            made for another equalisation or rotation gives its text, and is made anew.
        progress: told (what is being done, how much is done, how much there is).

    Raises:
        ModelError, QuantizationError, ConfigError: see `plan_checkpoint`; a full disk is a ModelError. Nothing is
            left behind.
    """
    scheme, ranges = recipe.scheme, None
    if scheme.is_static:
        scheme, ranges = prepare(checkpoint, recipe, calibration, model=model, progress=progress)
    planned = plan_checkpoint(checkpoint, placement, scheme)
    parameters = {parameter.name: parameter for parameter in planned.decoder.parameters()}
    folding = ranges.folding if ranges else Folding.none()
    try:
        with written_aside(folder) as aside:
            aside.mkdir()
            (aside / PLAN).write_text(planned.plan.to_json(), encoding="utf-8")
            write_weights(
                planned.plan,
                scheme,
                lambda name: folding.apply(name, parameters[name].load(planned.source)),
                aside / WEIGHTS,
                calibration=ranges,
                progress=lambda done, total: progress("compiling", done, total),
            )
            if tokenizer := Tokenizer.from_source(planned.source):
                tokenizer.save(aside)
            write_manifest(aside, model=model, scheme=scheme, placement=placement)
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else str(error)
        raise ModelError(f"cannot write the engine directory {folder}: {reason}") from error
    log.info("compiled %s into %s", checkpoint, folder)
    return planned.plan


def prepare(
    checkpoint: Path,
    recipe: Recipe,
    calibration: Path | None,
    *,
    model: str,
    progress: Progress = lambda what, done, total: None,
) -> tuple[Scheme, Calibration]:
    """The scheme that a static recipe comes to for a checkpoint, and its calibration; from the cache if they can be.

    Raises:
        ConfigError, ModelError, QuantizationError: see `compile_checkpoint`; a shadow is asked for a linear that is not
            there; nothing is within the budget.
    """
    planned = plan_checkpoint(checkpoint, {})
    scheme = recipe.scheme
    check_shadowed(planned.plan, scheme)
    ranges = Calibration.load(calibration) if calibration else None
    if ranges is not None:
        check_calibration(planned.plan, ranges)
    if ranges is None or (ranges.equalisation, ranges.is_rotated) != (scheme.equalisation, scheme.is_rotated):
        ranges, _ = cached_calibration(
            planned,
            checkpoint,
            model=model,
            token_ids=ranges.token_ids if ranges else None,
            method=ranges.method if ranges else "mse",
            equalisation=scheme.equalisation,
            is_rotated=scheme.is_rotated,
            progress=lambda done, total: progress("calibrating", done, total),
        )
    if recipe.search:
        choice, _ = cached_choice(
            planned,
            checkpoint,
            recipe,
            ranges,
            progress=lambda done, total: progress("choosing schemes", done, total),
        )
        scheme = choice.scheme
    return scheme, ranges
