"""Costs of a plan: FLOPs, bytes of weights and bytes across boundaries, for a chunk length and a prompt length."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import cast

from chunkrt.engine_directory.weights import stored_weights
from chunkrt.graph.operators import find_operator, node_flops
from chunkrt.graph.plan import ATTENTION_OPS, DTYPE_BYTES, Node, Plan, Subgraph, linear_weights, resolve
from chunkrt.graph.static_attention import window_elements
from chunkrt.quant.calibration import num_hot_channels
from chunkrt.quant.scheme import Scheme

FLOAT16_BYTES = DTYPE_BYTES["float16"]


@dataclass(frozen=True, kw_only=True)
class SubgraphFigures:
    """Costs of one subgraph on one chunk.

    Attributes:
        linear_flops: FLOPs that are proportional to the rows: those of linears, of the experts that rows pick, and of
            linear attention; a multiply-add counts as two.
        weight_bytes: weights under the scheme, including scales; weights that several subgraphs read count at the first
            one.
        crossing_bytes: values exchanged with subgraphs on another device; each value counts once.
        window_bytes: additional inputs and outputs of static attention for every chunk: masks, rows of rotary tables,
            and new rows of the caches.
        history_bytes: the slots of caches and ring buffers that the subgraph reads; they stay on the device, and are
            copied in if it holds the slots of another sequence.
        converted_bytes: inputs and outputs of an NPU subgraph as float16; 0 unless it is on the NPU and the scheme is
            static.
        entering_bytes: the inputs among the converted bytes.
        driver_bytes: all inputs and outputs of an NPU subgraph, which the driver copies for each chunk, and for each
            token that is decoded on the NPU, if CPU and NPU share no memory; 0 if `converted_bytes` is 0.
        sum_bytes: the result of a sum or gather over ranks; 0 unless the subgraph is on the link.
    """

    name: str
    device: str
    is_static: bool
    num_nodes: int
    linear_flops: int
    weight_bytes: int
    crossing_bytes: int
    window_bytes: int
    history_bytes: int
    converted_bytes: int
    entering_bytes: int
    driver_bytes: int
    sum_bytes: int
    state_slots: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class AttentionFigures:
    """FLOPs of attention over a complete prompt in all layers: 4 * rows * keys * D per head for scores and weighted
    sum.

    Without chunks, every row is multiplied by every key. With chunks, the rows of a chunk are multiplied by the keys up
    to the chunk's end; the ratio tends to (1 + C / S) / 2. In a layer with a window, these rows are multiplied by all
    keys that any of them attends to.
    """

    chunked_flops: int
    unchunked_flops: int


def subgraph_figures(plan: Plan, scheme: Scheme, *, chunk_length: int) -> list[SubgraphFigures]:
    """Return the costs of all subgraphs for one chunk, and one row of logits."""
    symbols = {"T": chunk_length, "R": 1}
    stored_bytes = weight_bytes(plan, scheme)
    homes = {name: s.device for s in plan.subgraphs for name in s.outputs}
    readers: dict[str, set[str]] = {}
    for subgraph in plan.subgraphs:
        for name in subgraph.inputs:
            readers.setdefault(name, set()).add(subgraph.device)

    def crosses(subgraph: Subgraph, name: str) -> bool:
        if name in subgraph.outputs:
            return bool(readers.get(name, set()) - {subgraph.device})
        return homes.get(name, subgraph.device) != subgraph.device

    def is_converted(subgraph: Subgraph) -> bool:
        return subgraph.device == "npu" and scheme.is_static

    def driver_bytes(subgraph: Subgraph) -> int:
        if not is_converted(subgraph):
            return 0
        window = window_elements(subgraph, plan, chunk_length)
        elements = window.entering + window.leaving
        return converted_bytes(plan, _edges(subgraph), chunk_length) + FLOAT16_BYTES * elements + window.history_bytes

    return [
        SubgraphFigures(
            name=s.name,
            device=s.device,
            is_static=s.is_static,
            num_nodes=len(s.nodes),
            linear_flops=sum(_linear_flops(plan, node, symbols) for node in s.nodes),
            weight_bytes=sum(stored_bytes.pop(name, 0) for name in s.weights),
            crossing_bytes=sum(plan.tensors[n].num_bytes(**symbols) for n in _edges(s) if crosses(s, n)),
            window_bytes=FLOAT16_BYTES * (window.entering + window.leaving),
            history_bytes=window.history_bytes,
            converted_bytes=converted_bytes(plan, _edges(s), chunk_length) if is_converted(s) else 0,
            entering_bytes=converted_bytes(plan, s.inputs, chunk_length) if is_converted(s) else 0,
            driver_bytes=driver_bytes(s),
            sum_bytes=sum(plan.tensors[n].num_bytes(**symbols) for n in s.outputs) if s.device == "link" else 0,
            state_slots=s.state,
        )
        for s in plan.subgraphs
        for window in [window_elements(s, plan, chunk_length)]
    ]


def converted_bytes(plan: Plan, values: Iterable[str], chunk_length: int) -> int:
    """Return the bytes, as float16, of an NPU subgraph's inputs and outputs for one chunk.

    Values are float32 between subgraphs and float16 on an NPU, so each input and output is converted once per chunk.
    The chunks of an NPU have a fixed length, so values with "R" rows also count in full.
    """
    tensors = [plan.tensors[n] for n in values if plan.tensors[n].dtype == "float32"]
    return FLOAT16_BYTES * sum(
        prod(resolve(tensor.shape, {"T": chunk_length, "R": chunk_length})) for tensor in tensors
    )


def attention_figures(plan: Plan, *, chunk_length: int, prompt_length: int) -> AttentionFigures:
    """Return the attention FLOPs of a prompt, chunked and unchunked."""
    chunked = unchunked = 0
    for node in (node for s in plan.subgraphs for node in s.nodes if node.op in ATTENTION_OPS):
        per_pair, window = node_flops(node, plan), cast(int, node.attributes["window"])
        unchunked += per_pair * prompt_length**2
        for start in range(0, prompt_length, chunk_length):
            end = min(start + chunk_length, prompt_length)
            first = max(0, start + 1 - window) if window else 0
            chunked += per_pair * (end - start) * (end - first)
    return AttentionFigures(chunked_flops=chunked, unchunked_flops=unchunked)


def weight_bytes(plan: Plan, scheme: Scheme) -> dict[str, int]:
    """Return the bytes of every weight in memory, including arrays that are stored with a linear: scales, grids, and
    the rows of a shadow.

    A rotary table that chunkrt generates counts with its rows in the plan and with its recipe.
    """
    stored = stored_weights(plan, scheme)
    sizes = {name: sum(entry.num_bytes for entry in weight.entries) for name, weight in stored.items()}
    for tensor in (tensor for tensor in plan.tensors.values() if tensor.rotary):
        sizes[tensor.name] += tensor.num_bytes()
    for name in linear_weights(plan):
        if scheme.is_shadowed(name):
            depth, columns = resolve(plan.tensors[name].shape, {})
            sizes[name] += num_hot_channels(depth) * columns * DTYPE_BYTES["float32"]
    return sizes


def linears_by_weight_bits(plan: Plan, scheme: Scheme) -> dict[int, int]:
    """Count linears with weights of 4, 8 and 32 bits; a scheme with blocks has to be settled by a checkpoint."""
    counts = {4: 0, 8: 0, 32: 0}
    for name in linear_weights(plan):
        counts[scheme.weight_bits_of(name) or 32] += 1
    return counts


def _edges(subgraph: Subgraph) -> tuple[str, ...]:
    return (*subgraph.inputs, *subgraph.outputs)


def _linear_flops(plan: Plan, node: Node, symbols: dict[str, int]) -> int:
    row = find_operator(node.domain, node.op)
    if node.op in ATTENTION_OPS or row is None or row.flops is None:
        return 0
    return resolve(plan.tensors[node.outputs[0]].shape, symbols)[0] * node_flops(node, plan)
