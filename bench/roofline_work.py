"""Work of a prefill, and its shortest possible time on a machine with given peaks.

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
from chunkrt.simulate.work import ChunkWork

NOT_COUNTED = (EXPERTS_OP, LINEAR_ATTENTION_OP, "FloatLinear")
"""Expensive operators that are not counted here."""


class Spread(NamedTuple):
    """Median, minimum and maximum of some samples."""

    median: float
    least: float
    most: float

    @staticmethod
    def of(samples: Sequence[float]) -> Spread:
        """Return the spread of at least one sample."""
        return Spread(statistics.median(samples), min(samples), max(samples))


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work of some tasks.

    linear_macs: multiply-adds of the linears as the model defines them. digit_macs: those on the integer units, twice
    as many for activations on a grid of 16 bits, which are two int8 digits. The few outliers, in float, are not
    counted.
    attention_macs: of scores and weighted sums, over the positions that each token sees. weight_bytes: of linears, read
    once for every task.
    """

    linear_macs: int
    digit_macs: int
    attention_macs: int
    weight_bytes: int


def tasks_of(plan: Plan, chunks: Sequence[ChunkWork]) -> list[Task]:
    """Return the tasks of a run, with a task for each subgraph of the plan that a chunk needs."""
    routes = plan.flow.routes(len(chunks), [number for number, chunk in enumerate(chunks) if chunk.num_rows])
    return [Task(index, number) for number, route in enumerate(routes) for index in route.subgraphs]


def work_of(
    plan: Plan,
    scheme: Scheme,
    chunks: Sequence[ChunkWork],
    tasks: Iterable[Task],
    storages: Collection[Storage] = ("int8", "int4", "blocks"),
) -> Work:
    """Return the work of a run.

    Args:
        plan: the decoder.
        scheme: with integer weights.
        chunks: of the run.
        tasks: tasks of the run: chunks without logits skip the last subgraphs.
        storages: storage of the linears that count.

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
                raise ConfigError(f"the roofline does not count {node.op}, as in {node.name}; choose another model")
    return Work(linear_macs=linear_macs, digit_macs=digit_macs, attention_macs=attention_macs, weight_bytes=num_bytes)


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Peaks of the cores in use, a second: multiply-adds of int8, of float32, bytes read from memory."""

    integer_macs: float
    float_macs: float
    memory_bytes: float


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Smallest possible seconds of some work: the linears on the integer units, attention on the float units, and, at
    the same time, the weights from memory.
    """

    integer_s: float
    attention_s: float
    memory_s: float

    @staticmethod
    def of(work: Work, peaks: Peaks) -> Bounds:
        """Return the bound on a machine with these peaks."""
        return Bounds(
            integer_s=work.digit_macs / peaks.integer_macs,
            attention_s=work.attention_macs / peaks.float_macs,
            memory_s=work.weight_bytes / peaks.memory_bytes,
        )

    @property
    def arithmetic_s(self) -> float:
        """Integer and float work uses the same units, so their times add."""
        return self.integer_s + self.attention_s

    @property
    def nearer(self) -> str:
        """The larger bound, to which a measured time is nearer."""
        return "arithmetic" if self.arithmetic_s >= self.memory_s else "memory"


def step_bounds(
    plan: Plan, scheme: Scheme, chunks: Sequence[ChunkWork], tasks: Sequence[Task], peaks: Peaks
) -> dict[str, float]:
    """Return the smallest possible seconds by names of native steps. Arguments and errors are those of `work_of`."""

    def bounds(*storages: Storage) -> Bounds:
        return Bounds.of(work_of(plan, scheme, chunks, tasks, storages), peaks)

    blocks, others = bounds("blocks"), bounds("int8", "int4")
    return {
        "linear": max(others.integer_s, others.memory_s),
        "block_linear": max(blocks.integer_s, blocks.memory_s),
        "attention": others.attention_s,
    }


def attainable(peak: float, bandwidth: float, work: float, num_bytes: float) -> float:
    """Return the roofline: the rate that both the peak and the bandwidth allow.

    Args:
        peak: work a second.
        bandwidth: bytes a second.
        work: of one call.
        num_bytes: bytes that a call reads.
    """
    return min(peak, bandwidth * work / num_bytes)
