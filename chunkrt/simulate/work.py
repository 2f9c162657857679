"""The work of a run: for every task, its duration alone and the number of bytes that it moves from and to shared
memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from chunkrt.engine_directory.figures import FLOAT16_BYTES, weight_bytes
from chunkrt.graph.operators import attended_pairs, node_flops
from chunkrt.graph.plan import (
    ALL_GATHER_OP,
    ATTENTION_OPS,
    DTYPE_BYTES,
    EXPERTS_OP,
    GATHER_OPS,
    SHADOW_OP,
    Device,
    Node,
    Plan,
    Subgraph,
    linear_weights,
    resolve,
)
from chunkrt.graph.static_attention import static_slots, window_elements
from chunkrt.quant.calibration import num_hot_channels
from chunkrt.quant.scheme import Scheme
from chunkrt.runtime.ranks.messages import exchange_of
from chunkrt.runtime.record import smallest_graph
from chunkrt.runtime.tasks import Task
from chunkrt.simulate.link_profile import LinkProfile
from chunkrt.simulate.measured import SubgraphCost, twins
from chunkrt.simulate.profile import DeviceProfile, ProcessorCost


class Work(NamedTuple):
    """One task that runs alone: its nanoseconds, the bytes that it moves from and to shared memory, and the bytes that
    it sends over the link.

    Attributes:
        edges_ns: for an NPU task, the parts of its time in which its inputs and its outputs are converted.
        us_by_parameter: for a modelled task, its microseconds by the parameter of the profile that causes them.
    """

    ns: int
    num_bytes: float
    sent_bytes: float = 0.0
    edges_ns: tuple[float, float] = (0.0, 0.0)
    us_by_parameter: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class ChunkWork:
    """Size of a task: number of tokens, number of rows with logits, and position of the first token.

    Attributes:
        segments: position and number of tokens of each sequence in a shared chunk; empty for the chunk of one sequence.
    """

    num_tokens: int
    num_rows: int
    position: int
    segments: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def shared(segments: Sequence[tuple[int, int]], num_rows: int) -> ChunkWork:
        """Return a chunk of the given segments."""
        num_tokens = sum(count for _, count in segments)
        return ChunkWork(num_tokens=num_tokens, num_rows=num_rows, position=segments[0][0], segments=tuple(segments))

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """Position and number of tokens of each sequence."""
        return self.segments or ((self.position, self.num_tokens),)

    def rows(self, subgraph: Subgraph) -> int:
        """Return the number of rows of one subgraph."""
        return self.num_tokens if subgraph.rows == "T" else self.num_rows

    def pairs(self, window: int) -> int:
        """Count pairs of a token and a position that it attends to, among the last `window` unless that is 0."""
        return sum(attended_pairs(position, num_tokens, window) for position, num_tokens in self.parts)


class NodeCost(NamedTuple):
    """One operator: its kind, its microseconds by field of its kind's costs, and the bytes that it reads from shared
    memory."""

    kind: str
    us: Mapping[str, float]
    shared_bytes: float


ACTIVATION_BYTES = {"linear_a8": 1, "linear_a16": 2, "linear_float": 2}
"""Bytes of one input of a linear on an NPU."""

WorkOf = Callable[[Task], Work]


def cut(prompt_length: int, chunk_length: int) -> list[ChunkWork]:
    """Return the chunks of a prompt; only the last token gets logits."""
    starts = range(0, prompt_length, chunk_length)
    tokens = [min(chunk_length, prompt_length - start) for start in starts]
    return [
        ChunkWork(num_tokens=n, num_rows=int(start + n == prompt_length), position=start)
        for start, n in zip(starts, tokens, strict=True)
    ]


def rows_on_npu(
    plan: Plan, subgraph: Subgraph, chunk: ChunkWork, graph_lengths: Sequence[int], chunk_length: int
) -> int:
    """Return the number of rows of the graph that runs a subgraph on a chunk, including padding."""
    reads_tokens = any(plan.tensors[name].shape[0] == "T" for name in subgraph.inputs)
    rows = chunk.num_tokens if reads_tokens else chunk.rows(subgraph)
    return smallest_graph(rows, graph_lengths, chunk_length)


def measured_rows(plan: Plan, subgraph: Subgraph, chunk: ChunkWork, graph_lengths: Sequence[int]) -> int:
    """Return the number of rows to which a measured cost applies: with several graphs, the rows of the NPU's graph;
    otherwise the rows of the chunk, to which a measurement with the one graph was fitted.
    """
    if subgraph.device != "npu" or not graph_lengths:
        return chunk.rows(subgraph)
    return rows_on_npu(plan, subgraph, chunk, graph_lengths, graph_lengths[-1])


class MeasuredWork:
    """Durations of a measured profile.

    Args:
        plan: the decoder.
        costs: costs of all subgraphs, by name.
        task_us: overhead between two tasks.
        chunks: chunks of the run, by number; more may be added.
        graph_lengths: see `Pipeline.graph_lengths`.
    """

    def __init__(
        self,
        plan: Plan,
        costs: Mapping[str, SubgraphCost],
        task_us: float,
        chunks: Sequence[ChunkWork],
        graph_lengths: Sequence[int] = (),
    ) -> None:
        self._plan, self._costs, self._task_us, self._chunks = plan, costs, task_us, chunks
        self._graph_lengths = graph_lengths

    def __call__(self, task: Task) -> Work:
        """Return the work of one task."""
        return self.of(task.subgraph, self._chunks[task.chunk])

    def of(self, index: int, chunk: ChunkWork) -> Work:
        """Return the work of a subgraph on any chunk, even if the chunk is not part of the run."""
        subgraph = self._plan.subgraphs[index]
        cost = self._costs[subgraph.name]
        pairs, rows = chunk.pairs(subgraph.window), measured_rows(self._plan, subgraph, chunk, self._graph_lengths)
        us = self._task_us + cost.fixed_us + cost.row_us * rows + cost.pair_us * pairs
        return Work(round(1000 * us), 0.0)


def with_sums(work_of: WorkOf, plan: Plan, chunks: Sequence[ChunkWork], link: LinkProfile, ranks: int) -> WorkOf:
    """Return the work of all tasks, given the work of computing tasks; sums and gathers take the link's time.

    Parts of logits are sent to one rank, and other parts to all other ranks.
    """

    def work(task: Task) -> Work:
        subgraph, chunk = plan.subgraphs[task.subgraph], chunks[task.chunk]
        if subgraph.device != "link":
            return work_of(task)
        (node,) = subgraph.nodes
        num_bytes = plan.tensors[node.inputs[0]].num_bytes(T=chunk.num_tokens, R=chunk.num_rows)
        if node.op == ALL_GATHER_OP:
            num_receivers = 1 if subgraph.rows == "R" else ranks - 1
            return Work(round(1000 * link.gather_us(num_bytes, ranks)), 0.0, float(num_receivers * num_bytes))
        ns = round(1000 * link.sum_us(num_bytes, ranks))
        return Work(ns, 0.0, exchange_of(num_bytes, ranks)[1])

    return work


class ModelledWork:
    """Durations by the cost model of a device: for every node, a fixed time and the longer of the times of its bytes
    and operations.

    An NPU computes all rows of a graph, also those that are padding. It has graphs for a complete chunk and for shorter
    lengths, and runs the smallest one that holds the rows.

    Args:
        plan: the decoder.
        scheme: quantisation of the linears.
        device: costs of operators.
        chunk_length: number of tokens of a chunk.
        chunks: chunks of the run, by number; more may be added.
        graph_lengths: see `Pipeline.graph_lengths`.
    """

    def __init__(
        self,
        plan: Plan,
        scheme: Scheme,
        device: DeviceProfile,
        *,
        chunk_length: int,
        chunks: Sequence[ChunkWork],
        graph_lengths: Sequence[int] = (),
    ) -> None:
        self._plan, self._scheme, self._device = plan, scheme, device
        self._chunk_length, self._chunks, self._graph_lengths = chunk_length, chunks, graph_lengths
        self._known: dict[tuple[Any, ChunkWork], Work] = {}

    def __call__(self, task: Task) -> Work:
        """Return the work of one task."""
        return self.of(task.subgraph, self._chunks[task.chunk])

    def of(self, index: int, chunk: ChunkWork) -> Work:
        """Return the work of a subgraph on any chunk, even if the chunk is not part of the run."""
        subgraph = self._plan.subgraphs[index]
        if subgraph.device == "npu":
            rows = rows_on_npu(self._plan, subgraph, chunk, self._graph_lengths, self._chunk_length)
            chunk = ChunkWork(num_tokens=rows, num_rows=rows, position=chunk.position)
        if not subgraph.all_state:
            chunk = ChunkWork(num_tokens=chunk.num_tokens, num_rows=chunk.num_rows, position=0)
        key = self._alike[subgraph.name], chunk
        if key not in self._known:
            self._known[key] = self._work(subgraph, chunk)
        return self._known[key]

    def _work(self, subgraph: Subgraph, chunk: ChunkWork) -> Work:
        device, transfer = subgraph.device, self._device.transfer
        processor = self._device.processor_cost(device)
        symbols = {"T": chunk.num_tokens, "R": max(1, chunk.num_rows)}
        us: defaultdict[str, float] = defaultdict(float, {f"{device}.task_us": processor.task_us})
        num_bytes, edges_us = 0.0, [0.0, 0.0]
        windows = window_elements(subgraph, self._plan, chunk.num_tokens)
        if device == "npu":  # within the NPU's turn, the driver copies the cache slots that a graph reads
            copied = windows.history_bytes if processor.cache_bytes is None else processor.cache_bytes * windows.history
            num_bytes += copied
            copies = "cache_gb_per_s" if transfer.cache_gb_per_s is not None else "gb_per_s"
            if transfer.head_us is not None:
                static = [node for node in subgraph.nodes if node.op in ATTENTION_OPS and static_slots(node)]
                heads = sum(2 * cast(int, node.attributes["num_kv_heads"]) for node in static)
                us["transfer.head_us"] += heads * transfer.head_us
            us[f"transfer.{copies}"] += copied / (1000 * (transfer.cache_gb_per_s or transfer.gb_per_s))
        for edge, crossing in enumerate(self._crossing(subgraph)):
            crossing_bytes = sum(self._plan.tensors[name].num_bytes(**symbols) for name in crossing)
            crossing_bytes += FLOAT16_BYTES * windows[edge]
            num_bytes += crossing_bytes
            if device == "npu":
                fixed_us = len(crossing) * transfer.fixed_us
                bytes_us = crossing_bytes / (1000 * transfer.gb_per_s)
                us["transfer.fixed_us"] += fixed_us
                us["transfer.gb_per_s"] += bytes_us
                edges_us[edge] = fixed_us + bytes_us
        for node in subgraph.nodes:
            cost = self._node(node, device, chunk, symbols)
            num_bytes += cost.shared_bytes
            for name, part_us in cost.us.items():
                us[f"{device}.operators.{cost.kind}.{name}"] += part_us
        return Work(
            round(1000 * sum(us.values())),
            num_bytes,
            edges_ns=(1000 * edges_us[0], 1000 * edges_us[1]),
            us_by_parameter={name: part_us for name, part_us in us.items() if part_us},
        )

    def _cache_bytes(self, processor: ProcessorCost) -> float:
        return FLOAT16_BYTES if processor.cache_bytes is None else processor.cache_bytes

    def _node(self, node: Node, device: Device, chunk: ChunkWork, symbols: dict[str, int]) -> NodeCost:
        """Return the cost of one operator."""
        tensors, processor = self._plan.tensors, self._device.processor_cost(device)
        rows = resolve(tensors[node.outputs[0]].shape, symbols)[0]
        window = cast(int, node.attributes["window"]) if node.op in ATTENTION_OPS else 0
        pairs = chunk.pairs(window) if node.op in ATTENTION_OPS else 0
        if node.op in ATTENTION_OPS and (past := static_slots(node)):
            pairs = rows * (past + rows)  # all slots of the window, filled or not, and the chunk's own rows
        operations: float = (pairs if node.op in ATTENTION_OPS else rows) * node_flops(node, self._plan)
        if node.op == "MatMul" and node.inputs[1] in self._linears:
            weight = node.inputs[1]
            num_bytes = shared_bytes = float(self._weight_bytes[weight])
            bits = self._scheme.activation_bits_of(weight)
            kind = "linear_float" if self._scheme.weight_bits is None else f"linear_a{bits}"
            if tile := processor.operators[kind].tile_rows:
                operations = ceil(rows / tile) * tile * node_flops(node, self._plan)
            depth, columns = resolve(tensors[weight].shape, {})
            taken, fast = rows * depth * ACTIVATION_BYTES[kind], processor.fast_mb
            if fast is not None and taken > 1e6 * fast:
                given = rows * columns * ACTIVATION_BYTES[kind]
                num_bytes = shared_bytes = ceil(taken / (1e6 * fast)) * num_bytes + taken + given
        elif node.op in ATTENTION_OPS:
            num_bytes = shared_bytes = self._cache_bytes(processor) * self._state_elements(node, chunk)
            kind = "attention"
        elif any(name and tensors[name].kind == "state" for name in node.inputs):
            width = FLOAT16_BYTES if static_slots(node) else DTYPE_BYTES["float32"]
            num_bytes = shared_bytes = float(2 * width * self._state_elements(node, chunk))
            kind = "attention"  # the state is read, and written back
        elif node.op == "FloatLinear":
            num_bytes = shared_bytes = float(tensors[node.inputs[1]].num_bytes())
            kind = "linear_float"
        elif node.op == SHADOW_OP:
            # The CPU compares every input with the grid, and multiplies the values beyond it in float. There are at
            # most as many of them as the rows of the weight that are kept for it.
            depth, columns = resolve(tensors[node.inputs[1]].shape, {})
            hot, width = num_hot_channels(depth), DTYPE_BYTES["float32"]
            num_bytes = float(width * (rows * depth + hot * columns))
            shared_bytes = float(width * hot * columns)
            operations = rows * (depth + 2 * hot * columns)
            kind = "linear_float"
        elif node.op == EXPERTS_OP:
            num_bytes = shared_bytes = self._share_of_experts(node, rows) * sum(
                self._weight_bytes[name] for name in node.inputs[2:4]
            )
            kind = "linear_float" if self._scheme.weight_bits is None else "linear_a8"
        else:
            size = sum(prod(resolve(tensors[name].shape, symbols)) for name in node.outputs)
            read = 1 if node.op in GATHER_OPS else len(node.inputs)
            num_bytes, shared_bytes = float(DTYPE_BYTES["float32"] * size * (1 + read)), 0.0
            kind = "other"
        cost = processor.operators[kind]
        bytes_us, operations_us = num_bytes / (1000 * cost.gb_per_s), operations / (1000 * cost.gops)
        us = {"fixed_us": cost.fixed_us}
        us |= {"gb_per_s": bytes_us} if bytes_us > operations_us else {"gops": operations_us}
        if pairs and cost.softmax_g_per_s is not None:
            us["softmax_g_per_s"] = pairs * cast(int, node.attributes["num_heads"]) / (1000 * cost.softmax_g_per_s)
        return NodeCost(kind, us, shared_bytes)

    def _state_elements(self, node: Node, chunk: ChunkWork) -> int:
        """Return the number of state elements of all sequences that have rows in the chunk."""
        tensors = [self._plan.tensors[name] for name in node.inputs if name]
        if past := static_slots(node):
            slots = [dict.fromkeys(("P", "W"), past + chunk.num_tokens)]
        else:
            slots = [self._plan.slots(position + count, count) for position, count in chunk.parts]
            if node.attributes.get("window"):  # a cache of all positions that other layers read too
                slots = [of_one | {"P": of_one["W"]} for of_one in slots]
        return sum(prod(resolve(t.shape, of_one)) for of_one in slots for t in tensors if t.kind == "state")

    def _share_of_experts(self, node: Node, rows: int) -> float:
        """Return the share of experts that `rows` rows read, if each row picks its experts independently and evenly: 1
        - (1 - picked / all) ** rows.
        """
        num_experts, _, _ = resolve(self._plan.tensors[node.inputs[2]].shape, {})
        return 1.0 - float(1 - cast(int, node.attributes["top_k"]) / num_experts) ** rows

    def _crossing(self, subgraph: Subgraph) -> tuple[list[str], list[str]]:
        """Return the values that a subgraph takes from the other device, and the values that the other device takes
        from it."""
        taken = [name for name in subgraph.inputs if self._homes.get(name, "cpu") != subgraph.device]
        given = [name for name in subgraph.outputs if self._readers.get(name, set()) - {subgraph.device}]
        return taken, given

    @cached_property
    def _alike(self) -> dict[str, Any]:
        """Keys of the subgraphs, by name: equal for the same operators and shapes, if values of the same shapes cross
        to and from the other device."""
        shapes = {name: tensor.shape for name, tensor in self._plan.tensors.items()}
        alike = twins(self._plan)
        return {
            s.name: (alike[s.name], *(tuple(shapes[name] for name in edge) for edge in self._crossing(s)))
            for s in self._plan.subgraphs
        }

    @cached_property
    def _homes(self) -> dict[str, str]:
        return {name: subgraph.device for subgraph in self._plan.subgraphs for name in subgraph.outputs}

    @cached_property
    def _readers(self) -> dict[str, set[str]]:
        readers: dict[str, set[str]] = {}
        for subgraph in self._plan.subgraphs:
            for name in subgraph.inputs:
                readers.setdefault(name, set()).add(subgraph.device)
        return readers

    @cached_property
    def _linears(self) -> set[str]:
        return set(linear_weights(self._plan))

    @cached_property
    def _weight_bytes(self) -> dict[str, int]:
        return weight_bytes(self._plan, self._scheme)
