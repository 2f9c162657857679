"""Calibration on a Dask cluster: each worker runs the decoder over a part of the tokens, and the parts are merged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from chunkrt.checkpoints.source import weights_digest
from chunkrt.compile.calibrate import WINDOW_LENGTH, Measure, calibrate, load_finite
from chunkrt.compile.calibration_tokens import TokenIds
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.engine.resolve import find_checkpoint
from chunkrt.errors import ConfigError
from chunkrt.files import Progress, no_progress
from chunkrt.graph.partition import Planned
from chunkrt.quant.calibration import Calibration, Method
from chunkrt.quant.folding import Folding
from chunkrt.quant.merging import merge
from chunkrt.simulate.dask_cluster import run_on_dask

SHARD_LENGTH = 2 * WINDOW_LENGTH
"""Tokens of one shard. Each shard reads all weights once."""


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Arguments that all shards share.

    Attributes:
        model: a catalogue name, or a path that exists on all machines.
        weights: digest of the weights, which must be the same on all machines.
        folding: transformations of the weights.
    """

    model: str
    adapter: Path | None
    weights: str
    method: Method
    folding: Folding


def measure_on_cluster(
    cluster: str, planned: Planned, *, model: str, adapter: Path | None, method: Method, progress: Progress
) -> Measure:
    """Return a function that calibrates on the workers of a Dask cluster.

    It raises ConfigError if the cluster cannot be used, or if a worker finds other weights; and the errors of
    `calibrate`.

    Args:
        cluster: address of the scheduler.
        planned: the checkpoint on this machine.
        progress: called with ("calibrating", shards done, all shards).
    """
    window = min(WINDOW_LENGTH, planned.plan.context_length)
    step = SHARD_LENGTH // window * window  # complete windows, so that the merged ranges equal those of one calibration

    def measure(folding: Folding, token_ids: TokenIds) -> Calibration:
        shards = [token_ids[start : start + step] for start in range(0, token_ids.size, step)]
        shared = Shared(
            model=model, adapter=adapter, weights=weights_digest(planned.source), method=method, folding=folding
        )
        found = run_on_dask(
            cluster, calibrate_shard, shared, shards, lambda done: progress("calibrating", done, len(shards))
        )
        return merge({f"shard {number}": each for number, each in enumerate(found, 1)})

    return measure


def calibrate_shard(shared: Shared, token_ids: TokenIds) -> Calibration:
    """Calibrate on a part of the tokens, on the machine of a worker. Raises as `calibrate`, and as `find_checkpoint`.

    Raises:
        ConfigError: the weights differ from those of the calling machine.
    """
    checkpoint, _ = find_checkpoint(shared.model, no_progress)
    planned = plan_checkpoint(checkpoint, {}, adapter=shared.adapter).within(WINDOW_LENGTH)
    if weights_digest(planned.source) != shared.weights:
        raise ConfigError(
            f"a worker of the cluster has other weights of {shared.model}; give all machines one checkpoint"
        )
    return calibrate(
        planned.plan,
        lambda name: shared.folding.apply(name, load_finite(planned, name)),
        token_ids,
        model=shared.model,
        weights=shared.weights,
        method=shared.method,
    )
