"""The compile half: from a checkpoint to an engine directory.

weights -> graph -> plan -> quantisation -> engine directory. Imported only when something has to be compiled: a
device that runs engine directories never needs it, nor ONNX.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from chunkrt.calibrate import cached_calibration
from chunkrt.choose import cached_choice
from chunkrt.engine_directory import PLAN, WEIGHTS, write_manifest
from chunkrt.errors import ConfigError, ModelError
from chunkrt.graph.decoders import build_decoder
from chunkrt.graph.modules import Float32, Module, Parameter
from chunkrt.graph.partition import partition
from chunkrt.graph.placement import Placement, place
from chunkrt.graph.plan import Plan, resolve
from chunkrt.graph.shadow import cut_shadowed
from chunkrt.graph.tracing import trace
from chunkrt.onnx_import import import_decoder, is_onnx, verify
from chunkrt.quant.calibration import Calibration
from chunkrt.quant.figures import linears_by_weight_bits
from chunkrt.quant.folding import Folding
from chunkrt.quant.scheme import Recipe, Scheme, check_scheme_of_ranks
from chunkrt.quant.weights import check_calibration, check_shadowed, linear_weights, write_weights
from chunkrt.ranks import ALONE, Ranks
from chunkrt.shared_folder import written_aside
from chunkrt.tokenizer import Tokenizer
from chunkrt.weights.checkpoint import open_checkpoint
from chunkrt.weights.source import BLOCK_DEPTH, BLOCK_TYPES, FLOAT_TYPES, BlockTensor, TensorSource

Progress = Callable[[str, int, int], None]
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A checkpoint with its decoder and plan: all that is known before a weight is read."""

    source: TensorSource
    decoder: Module
    plan: Plan

    def load(self, name: str) -> Float32:
        """A weight's values, by its plan name. Raises ModelError as `Parameter.load` does."""
        return self._parameters[name].load(self.source)

    def load_blocks(self, name: str) -> BlockTensor | None:
        """A linear's weight in the checkpoint's own blocks of 4 bits, by its plan name; None if it has none.

        Raises:
            ModelError, QuantizationError: see `Parameter.load_blocks`.
        """
        return self._parameters[name].load_blocks(self.source)

    def settle(self, scheme: Scheme) -> Scheme:
        """A scheme as the checkpoint lets it be: `weights_of_8_bits` names every linear that is not in blocks.

        In blocks are linears all of whose tensors the checkpoint has so, unless a rank's share would cut a block; and
        those whose tensors are floats, if the scheme does not keep them in 8 bits and blocks divide their depth. A
        scheme without blocks comes back as it is.

        Raises:
            ModelError: the checkpoint lacks a tensor.
        """
        if scheme.weight_bits != 4 or scheme.is_static:
            return scheme

        def is_in_blocks(name: str) -> bool:
            parameter = self._parameters[name]
            types = parameter.stored_as(self.source)
            depth, _ = resolve(self.plan.tensors[name].shape, {})
            is_made_here = types <= FLOAT_TYPES and scheme.has_blocks(name) and depth % BLOCK_DEPTH == 0
            return (types <= BLOCK_TYPES and parameter.keeps_blocks) or is_made_here

        others = sorted(name for name in linear_weights(self.plan) if not is_in_blocks(name))
        return replace(scheme, weights_of_8_bits=tuple(others))

    @cached_property
    def _parameters(self) -> dict[str, Parameter]:
        return {parameter.name: parameter for parameter in self.decoder.parameters()}


def open_decoder(checkpoint: Path, ranks: Ranks = ALONE) -> tuple[TensorSource, Module]:
    """A checkpoint and its module tree: built by its family, or imported from ONNX.

    Raises:
        ModelError: the checkpoint is damaged, incomplete or unsupported.
        ConfigError: so many ranks cannot share the decoder.
    """
    if is_onnx(checkpoint):
        if not ranks.are_alone:
            raise ConfigError(f"{checkpoint} is an ONNX decoder, which runs on one rank, not on {ranks.size}")
        return import_decoder(checkpoint)
    source = open_checkpoint(checkpoint)
    return source, build_decoder(source, ranks)


def plan_checkpoint(
    checkpoint: Path, placement: Placement, scheme: Scheme | None = None, *, ranks: Ranks = ALONE
) -> Planned:
    """Open a checkpoint, build its decoder, place it and cut it into subgraphs.

    Args:
        scheme: linears that it shadows are cut out.
        ranks: which of how many processes the plan is for.

    Raises:
        ModelError: the checkpoint is damaged, incomplete or unsupported.
        ConfigError: the placement names no module; so many ranks cannot share the decoder, or not under the scheme.
    """
    if scheme is not None:
        check_scheme_of_ranks(scheme, ranks.size)
    return _plan(*open_decoder(checkpoint, ranks), placement, scheme)


def _plan(source: TensorSource, decoder: Module, placement: Placement, scheme: Scheme | None) -> Planned:
    """Place a decoder and cut it into subgraphs."""
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
    ranks: Ranks = ALONE,
    progress: Progress = lambda what, done, total: None,
) -> Plan:
    """Write the engine directory of a checkpoint, aside and then renamed.

    Args:
        folder: where it shall be; nothing may be there yet, and nobody else may be writing it.
        recipe: a scheme; or what is searched for, on the calibration's text.
        calibration: for a static scheme; by default one is made from the text that comes with chunkrt. One that was
            made for another equalisation or rotation gives its text, and is made anew.
        ranks: which of how many processes the engine directory is for.
        progress: told (what is being done, how much is done, how much there is).

    Raises:
        ModelError, QuantizationError, ConfigError: see `plan_checkpoint`; a full disk is a ModelError. Nothing is
            left behind.
    """
    scheme, ranges = recipe.scheme, None
    check_scheme_of_ranks(scheme, ranks.size)
    source, decoder = open_decoder(checkpoint, ranks)
    if is_onnx(checkpoint):
        imported = _plan(source, decoder, {}, None)
        verify(checkpoint, imported.plan, imported.load)
    if scheme.is_static:
        scheme, ranges = prepare(checkpoint, recipe, calibration, model=model, progress=progress)
    planned = _plan(source, decoder, placement, scheme)
    scheme = planned.settle(scheme)
    folding = ranges.folding if ranges else Folding.none()
    try:
        with written_aside(folder) as aside:
            aside.mkdir()
            (aside / PLAN).write_text(planned.plan.to_json(), encoding="utf-8")
            write_weights(
                planned.plan,
                scheme,
                lambda name: folding.apply(name, planned.load(name)),
                aside / WEIGHTS,
                load_blocks=planned.load_blocks,
                calibration=ranges,
                progress=lambda done, total: progress("compiling", done, total),
            )
            if tokenizer := Tokenizer.from_source(planned.source):
                tokenizer.save(aside)
            write_manifest(aside, model=model, scheme=scheme, placement=placement, ranks=ranks)
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else str(error)
        raise ModelError(f"cannot write the engine directory {folder}: {reason}") from error
    log.info("compiled %s into %s", checkpoint, folder)
    if scheme.weight_bits == 4:
        counts = linears_by_weight_bits(planned.plan, scheme)
        log.info("weights of %d linears have 4 bits, of %d 8 bits", counts[4], counts[8])
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
