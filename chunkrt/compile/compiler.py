"""Compilation of a checkpoint to an engine directory, in phases.

    open -> calibrate (static schemes) -> plan -> settle (the storage of each weight) -> round (4 bits) -> write

This package is imported only to compile. A device that only runs engine directories needs neither this package nor
ONNX.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from chunkrt.checkpoints.adapters import adapter_files
from chunkrt.checkpoints.checkpoint import is_onnx, open_checkpoint, sampled_digest
from chunkrt.checkpoints.source import BLOCK_TYPES, TensorSource, weights_digest
from chunkrt.compile.adapting import adapted, targets_of
from chunkrt.compile.calibrate import cached_calibration
from chunkrt.compile.calibration_tokens import TokenIds, calibration_tokens, shipped_text
from chunkrt.compile.rank_share import RankShare
from chunkrt.compile.rounding import Rounded, round_linears
from chunkrt.compile.scheme_search import cached_choice
from chunkrt.engine_directory.adapter_targets import AdapterTargets, save_folding
from chunkrt.engine_directory.figures import linears_by_weight_bits
from chunkrt.engine_directory.manifest import PLAN, WEIGHTS, write_manifest
from chunkrt.engine_directory.weights import check_calibration, check_shadowed, settle, write_weights
from chunkrt.errors import ConfigError, ModelError, QuantizationError
from chunkrt.files import Progress, no_progress, written_aside
from chunkrt.graph.decoders import build_decoder
from chunkrt.graph.modules import Float32, Module
from chunkrt.graph.partition import Planned, plan_decoder
from chunkrt.graph.placement import Placement
from chunkrt.graph.plan import ALONE, Plan, Ranks, linear_weights
from chunkrt.onnx.importing import OnnxSource, import_decoder, verify
from chunkrt.quant.calibration import Calibration, Method
from chunkrt.quant.residual_scaling import ResidualScaling, residual_scaling
from chunkrt.quant.rotation import can_rotate
from chunkrt.quant.scheme import Recipe, Scheme
from chunkrt.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def open_decoder(checkpoint: Path, ranks: Ranks = ALONE, *, adapter: Path | None = None) -> tuple[TensorSource, Module]:
    """Open a checkpoint and build its module tree, by the decoder family or by an import from ONNX.

    Args:
        adapter: a LoRA adapter to add to the weights.

    Raises:
        ModelError: the checkpoint is damaged, incomplete or unsupported.
        ConfigError: the ranks cannot share the decoder, or an ONNX decoder has an adapter.
    """
    if is_onnx(checkpoint):
        if not ranks.are_alone:
            raise ConfigError(f"{checkpoint} is an ONNX decoder, which runs on one rank, not on {ranks.size}")
        if adapter is not None:
            raise ConfigError(f"{checkpoint} is an ONNX decoder, which takes no adapter; give its checkpoint")
        return import_decoder(checkpoint)
    source = open_checkpoint(checkpoint)
    if adapter is not None:
        source = adapted(source, adapter)
    return source, build_decoder(source, ranks)


def plan_checkpoint(
    checkpoint: Path,
    placement: Placement,
    scheme: Scheme | None = None,
    *,
    adapter: Path | None = None,
    ranks: Ranks = ALONE,
) -> Planned:
    """Open a checkpoint, build its decoder, place it and cut it into subgraphs.

    Args:
        scheme: the scheme, whose shadows become separate subgraphs.
        adapter: a LoRA adapter to add to the weights.
        ranks: the rank that the plan is for.

    Raises:
        ModelError: the checkpoint is damaged, incomplete or unsupported.
        ConfigError: a pattern of the placement matches no module; or the ranks cannot share the decoder.
    """
    ranks = ranks.for_scheme(is_static=scheme is not None and scheme.is_static)
    opened = open_decoder(checkpoint, ranks, adapter=adapter)
    return plan_decoder(*opened, placement, scheme.is_shadowed if scheme else None)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A checkpoint that was opened, calibrated and planned, so that its engine directory can be written.

    Attributes:
        scheme: the scheme, after a search and `settle`.
        ranges: calibration of a static scheme; None under other schemes.
        rounded: linears of 4 bits that are rounded already, by plan name.
        adapter: the LoRA adapter that the weights contain, if any.
        targets: the linears that adapters may change at run time, if they are to be recorded.
        scaling: the scale of the residual stream under a static scheme.
        share: the rank's part of the complete decoder under a static scheme; None for one rank, and under other
            schemes.
    """

    checkpoint: Path
    model: str
    planned: Planned
    placement: Placement
    ranks: Ranks
    scheme: Scheme
    ranges: Calibration | None
    rounded: Mapping[str, Rounded]
    adapter: Path | None = None
    targets: AdapterTargets | None = None
    scaling: ResidualScaling | None = None
    share: RankShare | None = None

    def load(self, name: str) -> Float32:
        """Return a weight's values before their quantisation, by its plan name; with a `share` those of a linear are
        complete. Raises ModelError as `Planned.load`.
        """
        source = self.planned if self.share is None else self.share.source_of(name)
        values = source.load(name)
        values = self.ranges.folding.apply(name, values) if self.ranges else values
        return values if self.share is None else self.share.cut(name, values)


def compile_checkpoint(
    checkpoint: Path,
    recipe: Recipe,
    placement: Placement,
    folder: Path,
    *,
    model: str,
    calibration: Path | None = None,
    adapter: Path | None = None,
    ranks: Ranks = ALONE,
    progress: Progress = no_progress,
) -> Plan:
    """Prepare a checkpoint and write its engine directory. Arguments and errors are those of `prepare_checkpoint` and
    `write_engine_directory`.
    """
    prepared = prepare_checkpoint(
        checkpoint,
        recipe,
        placement,
        model=model,
        calibration=calibration,
        adapter=adapter,
        ranks=ranks,
        progress=progress,
    )
    write_engine_directory(prepared, folder, progress)
    return prepared.planned.plan


def prepare_checkpoint(
    checkpoint: Path,
    recipe: Recipe,
    placement: Placement,
    *,
    model: str,
    calibration: Path | None = None,
    adapter: Path | None = None,
    takes_adapters: bool = False,
    ranks: Ranks = ALONE,
    progress: Progress = no_progress,
) -> Prepared:
    """Open a checkpoint, calibrate it, plan it, settle its scheme, and round its weights of 4 bits.

    Args:
        recipe: a scheme; or a search for one, on the calibration's text.
        calibration: for a static scheme; by default a calibration is made from the text that is part of chunkrt. If the
            calibration was made for another equalisation or rotation, or is merged and the scheme has shadows, its text
            is used to recalibrate.
        adapter: a LoRA adapter to add to the weights.
        takes_adapters: record the linears for adapters that are loaded at run time.
        ranks: the rank that the engine directory is for.
        progress: called with (step, done, total).

    Raises:
        ModelError, QuantizationError, ConfigError: see `plan_checkpoint` and `calibrate_scheme`.
    """
    scheme, ranges, scaling = recipe.scheme, None, None
    if scheme.is_static and not ranks.are_alone:
        if takes_adapters:
            raise ConfigError(
                f"under the static scheme {scheme.name!r} several ranks take no adapters at run time; choose a dynamic "
                "scheme or 'float', or add one adapter when compiling (`adapter`)"
            )
        opened = open_decoder(checkpoint, ranks.for_scheme(is_static=True), adapter=adapter)  # refusals come first
        complete = prepare_checkpoint(
            checkpoint, recipe, placement, model=model, calibration=calibration, adapter=adapter, progress=progress
        )
        return _shared(complete, opened, ranks)
    source, decoder = open_decoder(checkpoint, ranks, adapter=adapter)
    rounds = scheme.weight_bits == 4 and scheme.rounding != "nearest"
    if isinstance(source, OnnxSource) or scheme.is_static or rounds:
        plain = plan_decoder(source, decoder, {})
        if isinstance(source, OnnxSource):
            verify(source, plain.plan, plain.load)
        if scheme.is_static:
            scheme, ranges = calibrate_scheme(plain, checkpoint, recipe, calibration, model=model, progress=progress)
            scaling = residual_scaling(plain.plan, ranges)
    planned = plan_decoder(source, decoder, placement, scheme.is_shadowed)
    if ranges is not None and scaling is not None:
        log.log(logging.WARNING if scaling.obstacle else logging.INFO, "%s", scaling)
        planned, ranges = replace(planned, plan=scaling.plan(planned.plan)), scaling.calibration(planned.plan, ranges)
    prepared = Prepared(
        checkpoint=checkpoint,
        model=model,
        planned=planned,
        placement=placement,
        ranks=ranks,
        scheme=settle(planned, scheme),
        ranges=ranges,
        rounded={},
        adapter=adapter,
        targets=targets_of(planned) if takes_adapters else None,
        scaling=scaling,
    )
    if not rounds:
        return prepared
    plan = scaling.plan(plain.plan) if scaling else plain.plan
    return replace(prepared, rounded=_rounded(prepared, plan, progress))


def _shared(complete: Prepared, opened: tuple[TensorSource, Module], ranks: Ranks) -> Prepared:
    """Return a rank's part of a complete decoder under a static scheme. The part has the integers and grids of the
    complete decoder.

    Args:
        opened: the rank's decoder, from `open_decoder`.
    """
    planned = plan_decoder(*opened, complete.placement, complete.scheme.is_shadowed)
    if complete.scaling is not None:
        planned = replace(planned, plan=complete.scaling.plan(planned.plan))
    return replace(complete, planned=planned, ranks=ranks, share=RankShare(complete.planned, planned))


def _rounded(prepared: Prepared, plan: Plan, progress: Progress) -> dict[str, Rounded]:
    """Round the linears of 4 bits on the calibration's text. If this is not possible, log the reason, and return
    nothing, so they are rounded to the nearest values.

    Args:
        plan: the plan without placement and shadows.
    """
    planned, scheme, ranges = prepared.planned, prepared.scheme, prepared.ranges
    names = {name for name in linear_weights(plan) if scheme.weight_bits_of(name) == 4}
    if not scheme.is_static:
        names = {name for name in names if not planned.parameters[name].stored_as(planned.source) <= BLOCK_TYPES}
    if not names:
        return {}
    if not prepared.ranks.are_alone:
        log.warning("weights of 4 bits are rounded to the nearest values, because several ranks share them")
        return {}
    if ranges is None and Tokenizer.from_source(planned.source) is None:
        log.warning(
            "weights of 4 bits are rounded to the nearest values, because %s has no tokenizer for the text that "
            "--rounding gptq needs",
            planned.source.path.name,
        )
        return {}
    return round_linears(
        plan,
        scheme,
        names,
        prepared.load,
        ranges.token_ids if ranges else calibration_tokens(planned, shipped_text(), None),
        progress=lambda done, total: progress("rounding weights", done, total),
    )


def calibrate_scheme(
    planned: Planned,
    checkpoint: Path,
    recipe: Recipe,
    calibration: Path | None,
    *,
    model: str,
    progress: Progress = no_progress,
) -> tuple[Scheme, Calibration]:
    """Return the scheme of a static recipe for a checkpoint, and the calibration, from the cache if possible.

    Args:
        planned: the checkpoint without placement and shadows.

    Raises:
        ConfigError, ModelError, QuantizationError: see `cached_calibration` and `cached_choice`; a shadow names a
            linear that does not exist.
    """
    scheme = recipe.scheme
    if scheme.is_rotated and not recipe.has_to_rotate and not can_rotate(planned.plan):
        scheme = replace(scheme, is_rotated=False)
    check_shadowed(planned.plan, scheme)
    ranges = Calibration.load(calibration) if calibration else None
    if ranges is not None:
        check_calibration(planned.plan, ranges)
        if ranges.weights != weights_digest(planned.source):
            raise QuantizationError(
                f"{calibration} was made for {ranges.model} with other weights than those of {checkpoint}; run "
                "`chunkrt calibrate` on these"
            )
    token_ids: TokenIds | None = ranges.token_ids if ranges else None
    method: Method = ranges.method if ranges else "mse"

    def measure() -> Calibration:
        return cached_calibration(
            planned,
            checkpoint,
            model=model,
            token_ids=token_ids,
            method=method,
            equalisation=scheme.equalisation,
            is_rotated=scheme.is_rotated,
            progress=lambda done, total: progress("calibrating", done, total),
        )[0]

    if ranges is None or (ranges.equalisation, ranges.is_rotated) != (scheme.equalisation, scheme.is_rotated):
        ranges = measure()
    if recipe.search:
        choice, _ = cached_choice(
            planned,
            checkpoint,
            recipe,
            ranges,
            progress=lambda done, total: progress("choosing schemes", done, total),
        )
        scheme = choice.scheme
    if not ranges.has_shadows and any(map(scheme.is_shadowed, linear_weights(planned.plan))):
        ranges = measure()
    return scheme, ranges


def write_engine_directory(prepared: Prepared, folder: Path, progress: Progress = no_progress) -> None:
    """Write the engine directory of a checkpoint to a temporary name, then rename it.

    Args:
        folder: the path to write; it must not exist, and no other process may be writing it.
        progress: called with ("compiling", weights done, all weights).

    Raises:
        ModelError: a tensor or the tokenizer is damaged, or the disk is full. No partial output remains.
        QuantizationError: a weight cannot be quantised.
    """
    planned, scheme, ranges = prepared.planned, prepared.scheme, prepared.ranges
    adapter = adapter_files(prepared.adapter) if prepared.adapter else []
    try:
        with written_aside(folder) as aside:
            aside.mkdir()
            (aside / PLAN).write_text(planned.plan.to_json(), encoding="utf-8", newline="\n")
            write_weights(
                planned.plan,
                scheme,
                prepared.load,
                aside / WEIGHTS,
                load_rotary=planned.load_rotary,
                load_blocks=planned.load_blocks,
                rounded=prepared.rounded,
                calibration=ranges,
                share=prepared.share,
                progress=partial(progress, "compiling"),
            )
            if prepared.targets is not None:
                prepared.targets.save(aside)
                if ranges is not None:
                    save_folding(aside, ranges.folding.only(prepared.targets.linears))
            if tokenizer := Tokenizer.from_source(planned.source):
                tokenizer.save(aside)
            write_manifest(
                aside,
                model=prepared.model,
                scheme=scheme,
                placement=prepared.placement,
                ranks=prepared.ranks,
                checkpoint=sampled_digest(prepared.checkpoint, *adapter),
                num_parameters=planned.num_parameters,
            )
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else str(error)
        raise ModelError(f"cannot write the engine directory {folder}: {reason}") from error
    log.info("compiled %s into %s", prepared.checkpoint, folder)
    if scheme.weight_bits == 4:
        counts = linears_by_weight_bits(planned.plan, scheme)
        log.info("weights of %d linear layers have 4 bits, and weights of %d have 8 bits", counts[4], counts[8])
