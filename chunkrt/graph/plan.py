"""The plan: the ordered subgraphs of one decoder, as plain data.

Everything after graph building works from it: backends compile its subgraphs, the executor streams chunks through
them, the simulator predicts them. It is JSON on disk, read by msgspec into the classes below and held against what each
operator takes (`graph/operators.py`); a device which only runs an engine never imports ONNX.

A shape holds integers and symbols. `"T"`: the tokens of one chunk. `"R"`: the rows of logits asked for (one for a
prompt, unless all are wanted). `"P"`: the cache's capacity in positions. `"W"`: that of a layer which sees a window
alone, whose cache is a ring: position p is at slot p modulo W.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Literal

import msgspec

from chunkrt.errors import ModelError, UnsupportedModelError
from chunkrt.files import check_keys, parse_json
from chunkrt.graph.flow import Flow

Device = Literal["npu", "cpu", "link"]
"""The link is what joins ranks: its subgraphs are sums over them."""
Place = Literal["npu", "cpu"]
"""Devices that modules can be placed on."""
Kind = Literal["value", "weight", "state"]
Rows = Literal["T", "R"]
Dimension = int | str
Attribute = int | float | str | Sequence[int | float]
Rotary = Literal["", "cos", "sin"]
Dtype = Literal["float32", "float16", "int64", "int32", "int8", "bool"]

DOMAIN = "chunkrt"
"""Of the operators that are our own."""

SHADOW_OP = "ShadowLinear"
"""Of our domain: what a linear's inputs exceed its grid by, times its weight; see `graph/partition.py`."""

ATTENTION_OPS = ("CachedAttention", "RawKeyAttention")
"""Of our domain: attention over a cache of keys that are rotated already, or of keys that are rotated when used."""

KEY_FORMS = ("after RoPE", "before RoPE", "before RoPE and without their biases")
"""Forms in which keys are cached, the last in int8 alone; see `graph/key_biases.py`."""

EXPERTS_OP = "RoutedExperts"
"""Of our domain: feed-forwards of which every row takes a few; inputs hidden, router_logits, gate_up [E, H, 2 I] and
down [E, I, H]."""

ALL_REDUCE_OP = "AllReduce"
"""Of our domain: the sum over ranks of a partial result [T, H]; inputs partial and position, which names the sum. Alone
in its subgraph, on the device "link"."""

RING_STEP = 64
"""Slots: a ring has a multiple of them, or the capacity."""

MAIN_SUFFIX = ".main"
"""Added to the name of a linear's output where a shadow is added to it under the name itself."""

INPUTS: Mapping[str, tuple[Dimension, ...]] = {
    "input_ids": ("T",),
    "position": (1,),
    "rope_position": (1,),
    "logit_rows": ("R",),
}
"""What a decoder is given: int64, by name."""

DTYPE_BYTES = {"float32": 4, "float16": 2, "int64": 8, "int32": 4, "int8": 1, "bool": 1}


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A named value. `kind` says where it lives: a "value" is computed, a "weight" is constant, a "state" persists.

    Weights are float32 in the plan whatever the scheme: how a linear's weight is stored is the scheme's choice.
    `rotary`: the function that a rotary table is made with, if chunkrt makes it (see `graph/rotary_tables.py`). The
    weights on disk hold what such a table is made of; tables that a checkpoint holds are weights like others.
    """

    name: str
    dtype: Dtype
    shape: tuple[Dimension, ...]
    kind: Kind = "value"
    rotary: Rotary = ""

    def num_bytes(self, **symbols: int) -> int:
        """Size in bytes once the symbols (T, R, P) have values."""
        return prod(resolve(self.shape, symbols)) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Node:
    """One operator: ONNX's own op_type, domain ("" is standard ONNX, "chunkrt" ours), tensor names, attributes.

    An absent optional input is the empty string, as in ONNX.
    """

    name: str
    op: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Attribute]


@dataclass(frozen=True, kw_only=True)
class Subgraph:
    """A connected part of the decoder that one device runs.

    `inputs` and `outputs` are the values that cross its boundary (graph inputs such as "input_ids" and "position"
    included); `weights` are constants it reads; `state` are cache tensors that it updates in place. `rows` is the
    symbol that counts its rows: "T" for a subgraph that runs once a chunk, "R" for one that runs on the rows whose
    logits are wanted.
    """

    name: str
    device: Device
    is_static: bool
    rows: Rows
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[str, ...]
    state: tuple[str, ...]

    @property
    def window(self) -> int:
        """Positions that a row attends to at most; 0 if some of its attention sees all before, or there is none."""
        windows = [node.attributes["window"] for node in self.nodes if node.op in ATTENTION_OPS]
        return max((w for w in windows if isinstance(w, int)), default=0) if all(windows) else 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The subgraphs of one decoder, each after those whose outputs it reads, with every tensor they name.

    `context_length`: positions that it can tell apart. `long_context_from`: with more tokens than these, its rotary
    tables are the second ones, which follow the `context_length` rows of the first; None if there is one of each.
    `has_head`: False if the checkpoint has no head, so that only the hidden states mean anything.
    """

    family: str
    subgraphs: tuple[Subgraph, ...]
    tensors: Mapping[str, Tensor]
    inputs: tuple[str, ...]
    output: str
    vocab_size: int
    context_length: int
    long_context_from: int | None = None
    has_head: bool = True

    @property
    def static_subgraphs(self) -> tuple[Subgraph, ...]:
        """Those that depend on the chunk length alone."""
        return tuple(s for s in self.subgraphs if s.is_static)

    @cached_property
    def state_tensors(self) -> tuple[Tensor, ...]:
        """Every cache tensor, in the order of the subgraphs that own them."""
        return tuple(self.tensors[name] for s in self.subgraphs for name in s.state)

    @cached_property
    def window(self) -> int | None:
        """Keys that a row of a layer with a window sees, itself among them; None without such layers."""
        attention = (node for s in self.subgraphs for node in s.nodes if node.op in ATTENTION_OPS)
        windows = (node.attributes["window"] for node in attention)
        return next((window for window in windows if isinstance(window, int) and window), None)

    @cached_property
    def hidden(self) -> str | None:
        """What the head reads rows of: the hidden states [T, H] after the last norm. None if no row is picked."""
        nodes = (node for s in self.subgraphs for node in s.nodes if node.op == "Gather")
        return next((node.inputs[0] for node in nodes if node.inputs[1] == "logit_rows"), None)

    @cached_property
    def value_caches(self) -> frozenset[str]:
        """The state tensors that hold attention's values."""
        nodes = (node for s in self.subgraphs for node in s.nodes if node.op in ATTENTION_OPS)
        return frozenset(node.inputs[6] for node in nodes)

    @property
    def has_raw_keys(self) -> bool:
        """Whether keys are cached before RoPE, so that they can move to another position."""
        return self.key_form > 0

    @cached_property
    def key_form(self) -> int:
        """Form in which keys are cached, as a place in `KEY_FORMS`."""
        raw = [node for s in self.subgraphs for node in s.nodes if node.op == "RawKeyAttention"]
        return 2 if any(len(node.inputs) > 7 for node in raw) else int(bool(raw))

    def _repr_html_(self) -> str:
        from chunkrt.graph.plan_table import plan_html

        return plan_html(self)

    def with_raw_keys(self) -> Plan:
        """The same decoder, with keys cached before RoPE and rotated whenever they are used."""

        def switched(node: Node) -> Node:
            return replace(node, op="RawKeyAttention") if node.op == "CachedAttention" else node

        return replace(self, subgraphs=tuple(replace(s, nodes=tuple(map(switched, s.nodes))) for s in self.subgraphs))

    def on_cpu(self) -> Plan:
        """The same subgraphs, with the CPU playing the NPU's role."""
        return replace(
            self, subgraphs=tuple(replace(s, device="cpu") if s.device == "npu" else s for s in self.subgraphs)
        )

    def slots(self, capacity: int, chunk_length: int) -> dict[str, int]:
        """What "P" and "W" stand for in the state of a session.

        A ring has room for all that the rows of one chunk see, with the chunk itself: none of it is overwritten before
        it has been used.

        Args:
            capacity: positions that the session can hold.
            chunk_length: tokens of a chunk at most.
        """
        needed = (self.window or capacity) + chunk_length - 1
        return {"P": capacity, "W": min(capacity, -(-needed // RING_STEP) * RING_STEP)}

    def rope_offset(self, num_tokens: int) -> int:
        """What is added to a position for its row in the rotary tables, in a context of so many tokens."""
        is_long = self.long_context_from is not None and num_tokens > self.long_context_from
        return self.context_length if is_long else 0

    def within(self, num_tokens: int) -> Plan:
        """The same decoder for contexts of at most so many tokens: its rotary tables lose the rows that these skip.

        If so many tokens take the second tables, all rows stay: `rope_offset` is a row of the whole tables, and
        sessions on disk hold it. Tables that a checkpoint holds stay whole too.
        """
        if self.rope_offset(num_tokens):
            return self

        def cut(tensor: Tensor) -> Tensor:
            rows, *columns = tensor.shape
            return replace(tensor, shape=(min(int(rows), num_tokens), *columns)) if tensor.rotary else tensor

        return replace(self, tensors={name: cut(tensor) for name, tensor in self.tensors.items()})

    @cached_property
    def flow(self) -> Flow:
        """What waits for what: a subgraph for those that write its inputs."""
        writers: dict[str, int] = {}
        reads = []
        for index, subgraph in enumerate(self.subgraphs):
            reads.append({writers[name] for name in subgraph.inputs if name in writers})
            writers.update(dict.fromkeys(subgraph.outputs, index))
        sums = [index for index, subgraph in enumerate(self.subgraphs) if subgraph.device == "link"]
        hidden = None if self.hidden is None else writers.get(self.hidden)
        return Flow(reads, [bool(subgraph.state) for subgraph in self.subgraphs], sums, hidden)

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read what `to_json` wrote.

        Raises:
            ModelError: the text is not a plan.
        """
        from chunkrt.graph.plan_check import check_plan

        try:
            data = parse_json(text)
            plan = msgspec.convert(data, Plan)
            for kind, tables in _tables(data).items():
                for table in tables:
                    check_keys(table, kind)
            check_plan(plan)
            return plan
        except KeyError as error:
            raise ModelError(f"the plan is damaged (it has no tensor {error}); compile the model again") from error
        except (ValueError, RecursionError, UnsupportedModelError) as error:
            raise ModelError(f"the plan is damaged ({error}); compile the model again") from error


def resolve(shape: tuple[Dimension, ...], symbols: Mapping[str, int]) -> tuple[int, ...]:
    """Replace the symbols in a shape by their values."""
    return tuple(symbols[d] if isinstance(d, str) else d for d in shape)


def linear_nodes(plan: Plan) -> dict[str, Node]:
    """Every MatMul with a weight, by that weight's name: what a scheme quantises."""
    return {
        node.inputs[1]: node
        for subgraph in plan.subgraphs
        for node in subgraph.nodes
        if node.op == "MatMul" and plan.tensors[node.inputs[1]].kind == "weight"
    }


def linear_weights(plan: Plan) -> set[str]:
    """The names of the weights of all linears."""
    return set(linear_nodes(plan))


def expert_weights(plan: Plan) -> set[str]:
    """The names of the weights of all routed experts. Where linears are quantised they are int8 for each output channel
    of each expert, and their activations dynamic, whatever the scheme."""
    return {name for s in plan.subgraphs for node in s.nodes if node.op == EXPERTS_OP for name in node.inputs[2:]}


def embedding_tables(plan: Plan) -> set[str]:
    """Weights that a Gather picks rows from; stored in float16 where linears are int8."""
    return {
        node.inputs[0]
        for subgraph in plan.subgraphs
        for node in subgraph.nodes
        if node.op == "Gather" and plan.tensors[node.inputs[0]].kind == "weight"
    }


def _tables(data: dict[str, Any]) -> dict[type, list[dict[str, Any]]]:
    """The tables of what has been found to be a plan, by what each is read as."""
    nodes = [node for subgraph in data["subgraphs"] for node in subgraph["nodes"]]
    return {Plan: [data], Subgraph: data["subgraphs"], Node: nodes, Tensor: list(data["tensors"].values())}
