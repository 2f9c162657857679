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
from chunkrt.engine_directory import PLAN, WEIGHTS, write_manifest
from chunkrt.errors import ModelError
from chunkrt.graph.decoders import build_decoder
from chunkrt.graph.modules import Module
from chunkrt.graph.partition import partition
from chunkrt.graph.placement import Placement, place
from chunkrt.graph.plan import Plan
from chunkrt.graph.tracing import trace
from chunkrt.quant.calibration import Calibration
from chunkrt.quant.scheme import Scheme
from chunkrt.quant.weights import write_weights
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


def plan_checkpoint(checkpoint: Path, placement: Placement) -> Planned:
    """Open a checkpoint, build its decoder, place it and cut it into subgraphs.

    Raises:
        ModelError: the checkpoint is damaged, incomplete or unsupported.
        ConfigError: the placement names no module.
    """
    source = open_checkpoint(checkpoint)
    decoder = build_decoder(source)
    place(decoder, placement)
    plan = partition(trace(decoder), family=source.architecture)
    return Planned(source=source, decoder=decoder, plan=plan)


def compile_checkpoint(
    checkpoint: Path,
    scheme: Scheme,
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
        calibration: for a static scheme; by default one is made from the text that comes with chunkrt.
        progress: told (what is being done, how much is done, how much there is).

    Raises:
        ModelError, QuantizationError, ConfigError: see `plan_checkpoint`; a full disk is a ModelError. Nothing is
            left behind.
    """
    planned = plan_checkpoint(checkpoint, placement)
    parameters = {parameter.name: parameter for parameter in planned.decoder.parameters()}
    ranges = _calibration(planned, checkpoint, scheme, calibration, model, progress)
    try:
        with written_aside(folder) as aside:
            aside.mkdir()
            (aside / PLAN).write_text(planned.plan.to_json(), encoding="utf-8")
            write_weights(
                planned.plan,
                scheme,
                lambda name: parameters[name].load(planned.source),
                aside / WEIGHTS,
                calibration=ranges,
                progress=lambda done, total: progress("compiling", done, total),
            )
            if tokenizer := Tokenizer.from_source(planned.source):
                tokenizer.save(aside)
            write_manifest(aside, model=model, scheme=scheme.name)
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else str(error)
        raise ModelError(f"cannot write the engine directory {folder}: {reason}") from error
    log.info("compiled %s into %s", checkpoint, folder)
    return planned.plan


def _calibration(
    planned: Planned, checkpoint: Path, scheme: Scheme, path: Path | None, model: str, progress: Progress
) -> Calibration | None:
    if not scheme.is_static:
        return None
    if path is not None:
        return Calibration.load(path)
    made, _ = cached_calibration(
        planned, checkpoint, model=model, progress=lambda done, total: progress("calibrating", done, total)
    )
    return made
