"""What a prefill computes and reads, and how fast a machine with given peaks could do that at best.

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", 2009.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from chunkrt.engine_directory.figures import weight_bytes
from chunkrt.errors import ConfigError
from chunkrt.graph.linear_attention import LINEAR_ATTENTION_OP
from chunkrt.graph.plan import ATTENTION_OPS, EXPERTS_OP, Plan, linear_nodes, resolve
from chunkrt.quant.scheme import Scheme, Storage
from chunkrt.runtime.tasks import Task
from chunkrt.simulate.work import Chunk

NOT_COUNTED = (EXPERTS_OP, LINEAR_ATTENTION_OP, "FloatLinear")
"""Operators that compute much and are not counted here."""


class Spread(NamedTuple):
    """Median, least and most of some samples."""

    median: float
    least: float
    most: float

    @staticmethod
    def of(samples: Sequence[float]) -> Spread:
        """Of at least one sample."""
        return Spread(statistics.median(samples), min(samples), max(samples))


@dataclass(frozen=True, kw_only=True)
class Work:
    """What some tasks do.

    linear_macs: multiply-adds of the linears as the model defines them. digit_macs: those that the integer units do,
    twice as many where activations lie on a grid of 16 bits, which is two int8 digits. The few of outliers, in float,
    are not counted. attention_macs: of scores and weighted sums, over the positions that each token sees.
    weight_bytes: of linears, read once for every task.
    """

    linear_macs: int
    digit_macs: int
    attention_macs: int
    weight_bytes: int


def work_of(
    plan: Plan,
    scheme: Scheme,
    chunks: Sequence[Chunk],
    tasks: Iterable[Task],
    storages: Collection[Storage] = ("int8", "int4", "blocks"),
) -> Work:
    """The work of a run.

    Args:
        plan: the decoder.
        scheme: with integer weights.
        chunks: of the run.
        tasks: those that ran: chunks whose logits nobody wants skip the last subgraphs.
        storages: of the linears that count.

    Raises:
        ConfigError: an operator of the plan is not counted here.
    """
    stored, linears = weight_bytes(plan, scheme), linear_nodes(plan)
    linear_macs = digit_macs = attention_macs = num_bytes = 0
    for task in tasks:
        subgraph, chunk = plan.subgraphs[task.subgraph], chunks[task.chunk]
        for node in subgraph.nodes:
            if node.op == "MatMul" and (weight := node.inputs[1]) in linears:
                if scheme.storage_of(weight) not in storages:
                    continue
                depth, columns = resolve(plan.tensors[weight].shape, {})
                macs = chunk.rows(subgraph) * depth * columns
                linear_macs += macs
                digit_macs += macs * scheme.num_digits(weight)
                num_bytes += stored[weight]
            elif node.op in ATTENTION_OPS:
                width = cast(int, node.attributes["num_heads"]) * cast(int, node.attributes["head_dim"])
                attention_macs += 2 * chunk.pairs(cast(int, node.attributes["window"])) * width
            elif node.op in NOT_COUNTED:
                raise ConfigError(f"the roofline does not count {node.op}, as in {node.name}; take another model")
    return Work(linear_macs=linear_macs, digit_macs=digit_macs, attention_macs=attention_macs, weight_bytes=num_bytes)


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """What the cores that are used do at best, a second: multiply-adds of int8, of float32, bytes read from memory."""

    integer_macs: float
    float_macs: float
    memory_bytes: float


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Least seconds for some work: the linears on the integer units, attention on the float units, and, at the same
    time, the weights from memory."""

    integer_s: float
    attention_s: float
    memory_s: float

    @staticmethod
    def of(work: Work, peaks: Peaks) -> Bounds:
        """On a machine with these peaks."""
        return Bounds(
            integer_s=work.digit_macs / peaks.integer_macs,
            attention_s=work.attention_macs / peaks.float_macs,
            memory_s=work.weight_bytes / peaks.memory_bytes,
        )

    @property
    def arithmetic_s(self) -> float:
        """Integer and float units are the same ones, so their times add."""
        return self.integer_s + self.attention_s

    @property
    def nearer(self) -> str:
        """The bound that a measured time is nearer to: the larger."""
        return "arithmetic" if self.arithmetic_s >= self.memory_s else "memory"


def step_bounds(
    plan: Plan, scheme: Scheme, chunks: Sequence[Chunk], tasks: Sequence[Task], peaks: Peaks
) -> dict[str, float]:
    """Least seconds of what has a peak, by the native steps' names. Arguments and errors are those of `work_of`."""

    def bounds(*storages: Storage) -> Bounds:
        return Bounds.of(work_of(plan, scheme, chunks, tasks, storages), peaks)

    blocks, others = bounds("blocks"), bounds("int8", "int4")
    return {
        "linear": max(others.integer_s, others.memory_s),
        "block_linear": max(blocks.integer_s, blocks.memory_s),
        "attention": others.attention_s,
    }


def attainable(peak: float, bandwidth: float, work: float, num_bytes: float) -> float:
    """The roofline: the rate that either the peak or the bandwidth allows.

    Args:
        peak: work a second.
        bandwidth: bytes a second.
        work: of one call.
        num_bytes: that a call reads.
    """
    return min(peak, bandwidth * work / num_bytes)
