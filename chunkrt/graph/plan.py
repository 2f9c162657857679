"""The plan: the ordered subgraphs of one decoder, as plain data.

All later steps use the plan: backends compile its subgraphs, the executor streams chunks through them, and the
simulator predicts their times. A plan is stored as JSON. msgspec reads it into the classes below, and its nodes are
checked against the table of operators (`graph/operators.py`). A device that only runs an engine never imports ONNX.

A shape consists of integers and these symbols:

- `"T"` is the number of tokens in one chunk.
- `"R"` is the number of requested rows of logits (one for a prompt, unless all are needed).
- `"P"` is the cache's capacity in positions.
- `"W"` is the capacity of the cache of a layer with a sliding window. This cache is a ring, with position p at slot p
  modulo W.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, ClassVar, Literal

import msgspec

from chunkrt.errors import ConfigError, ModelError, UnsupportedModelError
from chunkrt.files import check_keys, parse_json
from chunkrt.graph.flow import Flow
from chunkrt.pictures import html_table

Device = Literal["npu", "cpu", "link"]
"""Devices of subgraphs. The subgraphs of the link are sums over ranks."""
Place = Literal["npu", "cpu"]
"""Devices that modules can be placed on."""
Kind = Literal["value", "weight", "state"]
Rows = Literal["T", "R"]
Dimension = int | str
Attribute = int | float | str | Sequence[int | float]
Rotary = Literal["", "cos", "sin"]
Dtype = Literal["float32", "float16", "int64", "int32", "int8", "bool"]

DOMAIN = "chunkrt"
"""Domain of chunkrt's own operators."""

SHADOW_OP = "ShadowLinear"
"""Operator of chunkrt's domain: the product of the weight and the part of a linear's input that exceeds its grid; see
`graph/partition.py`.
"""

ATTENTION_OPS = ("CachedAttention", "RawKeyAttention")
"""Operators of chunkrt's domain: attention over a cache of rotated keys, or of keys that are rotated at every use."""

DUAL_CHUNK_ATTRIBUTES = ("rope_period", "rope_limit", "long_context_from")
"""Attributes of attention operators with dual chunk attention; see `ops.DualChunks`."""

CACHES = slice(5, 7)
"""Places of the caches of keys and values among the inputs of attention."""

INT8_GROUP = 32
"""Number of consecutive values of one position and head that share a float32 scale in an int8 cache. The bytes of the
scales follow the head_dim values.
"""

KEY_FORMS = ("after RoPE", "before RoPE", "before RoPE and without their biases")
"""Forms in which keys are cached; the last form is for int8 caches only. See `graph/rewrites.py`."""

EXPERTS_OP = "RoutedExperts"
POSITIONS_OP = "AddPositions"
"""Operator of chunkrt's domain: feed-forwards of which every row uses a few; inputs hidden, router_logits, gate_up [E,
H, 2 I] and down [E, I, H].
"""

ALL_REDUCE_OP = "AllReduce"
"""Operator of chunkrt's domain: the sum over ranks of a partial result [T, H]; inputs partial and position, which
identifies the sum. It is the only node of its subgraph, on the device "link".
"""

ALL_GATHER_OP = "AllGather"
"""Operator of chunkrt's domain: columns of the ranks' parts [T, N], which are concatenated in the order of ranks;
inputs part and position, as of a sum. The attribute `columns` selects columns of the concatenation ("0:5,8:11").
"""

LINK_OPS = (ALL_REDUCE_OP, ALL_GATHER_OP)
"""Operators between ranks, on the device "link"."""

SHARED_GATHER_OP = "GatherShare"
"""Operator of chunkrt's domain: Gather from a rank's consecutive rows of a table; inputs table [N, H] and indices of
the complete table's rows. Rows that the rank does not have are zeros. Attributes `first`, the index of the rank's first
row, and `all_rows`, the number of rows of the complete table.
"""

GATHER_OPS = ("Gather", SHARED_GATHER_OP)
"""Operators that pick rows by index."""

RING_STEP = 64
"""Divisor of a ring's number of slots, unless the ring has the cache's capacity."""

MAIN_SUFFIX = ".main"
"""Suffix of a linear's own output if a shadow is added to it; the sum has the name without the suffix."""

INPUTS: Mapping[str, tuple[Dimension, ...]] = {
    "input_ids": ("T",),
    "position": (1,),
    "rope_position": (1,),
    "logit_rows": ("R",),
    "adapters": ("T",),
}
"""Inputs of a decoder by name, all int64."""

DTYPE_BYTES = {"float32": 4, "float16": 2, "int64": 8, "int32": 4, "int8": 1, "bool": 1}


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A named value. Its kind is "value" (computed), "weight" (constant) or "state" (persistent).

    Weights are float32 in the plan under every scheme: the scheme decides how a linear's weight is stored. `rotary` is
    "cos" or "sin" for a rotary table that chunkrt makes (see `graph/rotary_tables.py`). The weights on disk hold the
    recipe of such a table; tables from a checkpoint are ordinary weights.
    """

    name: str
    dtype: Dtype
    shape: tuple[Dimension, ...]
    kind: Kind = "value"
    rotary: Rotary = ""

    def num_bytes(self, **symbols: int) -> int:
        """Return the size in bytes, given the values of the symbols."""
        return prod(resolve(self.shape, symbols)) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Node:
    """One operator: ONNX's op_type, domain ("" for standard ONNX, "chunkrt" for chunkrt's), names of tensors, and
    attributes.

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

    Attributes:
        inputs, outputs: the values that cross the boundary, including graph inputs such as "input_ids" and "position".
        weights: the constants that the subgraph reads.
        state: the state tensors that it updates in place.
        shared_state: caches that an earlier subgraph updates and this one only reads.
        rows: the symbol of its number of rows: "T" for a subgraph that runs once per chunk, "R" for one that runs on
            the
            rows that need logits.
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
    shared_state: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return the name and the device, with the numbers of nodes, weights and state tensors."""
        kind = "static" if self.is_static else "dynamic"
        return (
            f"Subgraph({self.name!r}, {kind}, on {self.device}, rows {self.rows}, {len(self.nodes)} nodes, "
            f"{len(self.weights)} weights, {len(self.state)} state tensors)"
        )

    @property
    def all_state(self) -> tuple[str, ...]:
        """State tensors that it takes, including those that it only reads."""
        return (*self.state, *self.shared_state)

    @property
    def window(self) -> int:
        """Largest number of positions that a row attends to; 0 if a node attends to all earlier positions, or if there
        is no attention.
        """
        windows = [node.attributes["window"] for node in self.nodes if node.op in ATTENTION_OPS]
        return max((w for w in windows if isinstance(w, int)), default=0) if all(windows) else 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The subgraphs of one decoder, in execution order, with all tensors that they name.

    Attributes:
        context_length: number of positions that the decoder can distinguish.
        long_context_from: contexts with more tokens than this use the second rotary tables, which follow the
            `context_length` rows of the first, or with dual chunk attention multiply queries and keys by a factor. None
            if the decoder does neither.
        has_head: False if the checkpoint has no LM head, so that only the hidden states are valid.
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
        """Subgraphs whose shapes depend on the chunk length alone."""
        return tuple(s for s in self.subgraphs if s.is_static)

    @cached_property
    def state_tensors(self) -> tuple[Tensor, ...]:
        """Every cache tensor, in the order of the subgraphs that own them."""
        return tuple(self.tensors[name] for s in self.subgraphs for name in s.state)

    @cached_property
    def window(self) -> int | None:
        """Number of keys that a row of a layer with a window sees, its own included; None without such layers."""
        attention = (node for s in self.subgraphs for node in s.nodes if node.op in ATTENTION_OPS)
        windows = (node.attributes["window"] for node in attention)
        return next((window for window in windows if isinstance(window, int) and window), None)

    @cached_property
    def hidden(self) -> str | None:
        """Hidden states [T, H] after the last norm, from which the LM head's rows are picked. None if no row is
        picked."""
        nodes = (node for s in self.subgraphs for node in s.nodes if node.op == "Gather")
        return next((node.inputs[0] for node in nodes if node.inputs[1] == "logit_rows"), None)

    @cached_property
    def value_caches(self) -> frozenset[str]:
        """State tensors that hold attention's values."""
        nodes = (node for s in self.subgraphs for node in s.nodes if node.op in ATTENTION_OPS)
        return frozenset(node.inputs[6] for node in nodes)

    @cached_property
    def rope_period(self) -> int:
        """Number of positions after which the rotation of keys begins again, with dual chunk attention; otherwise 0."""
        attention = (node for s in self.subgraphs for node in s.nodes if node.op in ATTENTION_OPS)
        periods = (node.attributes.get("rope_period") for node in attention)
        return next((period for period in periods if isinstance(period, int)), 0)

    @property
    def num_rotary_tables(self) -> int:
        """Number of rotary tables behind each other, of which the length of the context selects one."""
        return 1 if self.long_context_from is None or self.rope_period else 2

    @property
    def has_raw_keys(self) -> bool:
        """True if keys are cached before RoPE, so that they can move to another position."""
        return self.key_form > 0

    @cached_property
    def key_form(self) -> int:
        """Form in which keys are cached, as an index of `KEY_FORMS`."""
        raw = [node for s in self.subgraphs for node in s.nodes if node.op == "RawKeyAttention"]
        return 2 if any(len(node.inputs) > 8 for node in raw) else int(bool(raw))

    def __repr__(self) -> str:
        """Return the family, with the numbers of subgraphs and tensors."""
        devices = Counter(subgraph.device for subgraph in self.subgraphs)
        on = ", ".join(f"{number} on {device}" for device, number in devices.items())
        return (
            f"Plan({self.family!r}, {len(self.subgraphs)} subgraphs ({on}), {len(self.tensors)} tensors, vocabulary of "
            f"{self.vocab_size}, context of {self.context_length})"
        )

    def _repr_html_(self) -> str:
        rows = []
        for subgraph in self.subgraphs:
            operators = Counter(node.op for node in subgraph.nodes)
            listed = ", ".join(f"{count} {name}" if count > 1 else name for name, count in operators.items())
            kind = "static" if subgraph.is_static else "dynamic"
            sizes = str(len(subgraph.weights)), str(len(subgraph.state))
            rows.append((subgraph.name, subgraph.device, kind, *sizes, listed))
        caption = f"{self.family}, vocabulary of {self.vocab_size}, context of {self.context_length}"
        return html_table(caption, ("subgraph", "on", "kind", "weights", "state", "operators"), rows)

    @property
    def has_learned_positions(self) -> bool:
        """True if rows of a table are added to the embeddings by position."""
        return any(node.op == POSITIONS_OP for subgraph in self.subgraphs for node in subgraph.nodes)

    def with_raw_keys(self) -> Plan:
        """Return a plan of the same decoder with keys cached before RoPE and rotated at every use."""

        def switched(node: Node) -> Node:
            return replace(node, op="RawKeyAttention") if node.op == "CachedAttention" else node

        return replace(self, subgraphs=tuple(replace(s, nodes=tuple(map(switched, s.nodes))) for s in self.subgraphs))

    def on_cpu(self) -> Plan:
        """Return a plan with the same subgraphs, in which the CPU serves as the NPU."""
        return replace(
            self, subgraphs=tuple(replace(s, device="cpu") if s.device == "npu" else s for s in self.subgraphs)
        )

    def slots(self, capacity: int, chunk_length: int) -> dict[str, int]:
        """Return the values of "P" and "W" in the state of a session.

        A ring has room for all positions that the rows of one chunk see, and for the chunk itself, so no position is
        overwritten before it has been used.

        Args:
            capacity: number of positions that the session can hold.
            chunk_length: largest number of tokens in a chunk.
        """
        needed = (self.window or capacity) + chunk_length - 1
        return {"P": capacity, "W": min(capacity, -(-needed // RING_STEP) * RING_STEP)}

    def rope_offset(self, num_tokens: int) -> int:
        """Return the difference between the inputs "rope_position" and "position" in a context of `num_tokens` tokens.

        It is the offset of a position's row in the rotary tables. With dual chunk attention it is the number of tokens
        itself, from which attention computes the factor of queries and keys, or 0 if the factor is 1.
        """
        if self.long_context_from is None or num_tokens <= self.long_context_from:
            return 0
        return num_tokens if self.rope_period else self.context_length

    def is_rope_offset(self, offset: int) -> bool:
        """Return whether a number is the `rope_offset` of some context."""
        longest = self.rope_offset(self.context_length)
        return offset in (0, longest) or (self.rope_period > 0 and self.rope_offset(offset) == offset <= longest)

    @property
    def plain_context(self) -> int:
        """Largest number of tokens up to which dual chunk attention changes neither results nor caches; without it, the
        context length."""
        limits = (self.rope_period, self.long_context_from) if self.rope_period else ()
        return min((self.context_length, *(limit for limit in limits if limit is not None)))

    def within(self, num_tokens: int) -> Plan:
        """Return a plan of the same decoder for contexts of at most `num_positions` tokens, without the unused rows of
        its rotary tables, and without dual chunk attention if it changes nothing.

        If that many tokens use the second tables, all rows remain: `rope_offset` is a row of the complete tables, and
        sessions on disk contain it. Tables from a checkpoint also remain complete.
        """
        if self.num_rotary_tables > 1 and self.rope_offset(num_tokens):
            return self

        def cut(tensor: Tensor) -> Tensor:
            if not tensor.rotary:
                return tensor
            rows, *columns = tensor.shape
            return replace(tensor, shape=(min(int(rows), num_tokens), *columns))

        plan = replace(self, tensors={name: cut(tensor) for name, tensor in self.tensors.items()})
        return plan.in_plain_context(num_tokens)

    def in_plain_context(self, num_tokens: int) -> Plan:
        """Return a plan of the same decoder without dual chunk attention if it changes nothing in contexts of at most
        `num_tokens` tokens; otherwise this plan.
        """
        if not self.rope_period or num_tokens > self.plain_context:
            return self

        def plain(node: Node) -> Node:
            attributes = {name: value for name, value in node.attributes.items() if name not in DUAL_CHUNK_ATTRIBUTES}
            return replace(node, attributes=attributes) if node.op in ATTENTION_OPS else node

        subgraphs = tuple(replace(s, nodes=tuple(map(plain, s.nodes))) for s in self.subgraphs)
        return replace(self, subgraphs=subgraphs, long_context_from=None)

    @cached_property
    def flow(self) -> Flow:
        """Dependencies between subgraphs: a subgraph depends on those that write its inputs, and on those that append
        the rows of the same chunk to the caches that it reads.
        """
        writers: dict[str, int] = {}
        reads = []
        for index, subgraph in enumerate(self.subgraphs):
            taken = (*subgraph.inputs, *subgraph.shared_state)
            reads.append({writers[name] for name in taken if name in writers})
            writers.update(dict.fromkeys((*subgraph.outputs, *subgraph.state), index))
        sums = [index for index, subgraph in enumerate(self.subgraphs) if subgraph.device == "link"]
        hidden = None if self.hidden is None else writers.get(self.hidden)
        of_logits = [index for index in sums if self.subgraphs[index].rows == "R"]
        return Flow(reads, [bool(subgraph.state) for subgraph in self.subgraphs], sums, of_logits, hidden)

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read the output of `to_json`.

        Raises:
            ModelError: the text is not a valid plan.
        """
        from chunkrt.graph.operators import check_plan

        try:
            data = parse_json(text)
            plan = msgspec.convert(data, Plan)
            for kind, tables in _tables(data).items():
                for table in tables:
                    check_keys(table, kind)
            check_plan(plan)
            return plan
        except KeyError as error:
            raise ModelError(f"the plan is damaged (it has no tensor {error}); recompile the model") from error
        except (ValueError, RecursionError, UnsupportedModelError) as error:
            raise ModelError(f"the plan is damaged ({error}); recompile the model") from error


def reads_shared_cache(node: Node) -> bool:
    """Return whether a node is attention over caches that another node fills."""
    return node.attributes.get("appends", 1) == 0


def read_only_caches(nodes: Iterable[Node]) -> set[str]:
    """Return the caches that nodes only read."""
    taken: dict[bool, set[str]] = {True: set(), False: set()}
    for node in nodes:
        taken[reads_shared_cache(node)].update(node.inputs[CACHES] if node.op in ATTENTION_OPS else node.inputs)
    return taken[True] - taken[False]


def resolve(shape: tuple[Dimension, ...], symbols: Mapping[str, int]) -> tuple[int, ...]:
    """Replace the symbols in a shape by their values."""
    return tuple(symbols[d] if isinstance(d, str) else d for d in shape)


def linear_nodes(plan: Plan) -> dict[str, Node]:
    """Return every MatMul with a weight, by the weight's name; schemes quantise these nodes."""
    return {
        node.inputs[1]: node
        for subgraph in plan.subgraphs
        for node in subgraph.nodes
        if node.op == "MatMul" and plan.tensors[node.inputs[1]].kind == "weight"
    }


def linear_weights(plan: Plan) -> set[str]:
    """Return the names of the weights of all linears."""
    return set(linear_nodes(plan))


def expert_weights(plan: Plan) -> set[str]:
    """Return the names of the weights of all routed experts. If linears are quantised, the experts have int8 weights,
    with a scale for each output channel of each expert, and dynamic activations under every scheme.
    """
    return {name for s in plan.subgraphs for node in s.nodes if node.op == EXPERTS_OP for name in node.inputs[2:4]}


def embedding_tables(plan: Plan) -> set[str]:
    """Return the weights that a Gather picks rows from; they are stored in float16 if linears are int8."""
    return {
        node.inputs[0]
        for subgraph in plan.subgraphs
        for node in subgraph.nodes
        if node.op in GATHER_OPS and plan.tensors[node.inputs[0]].kind == "weight"
    }


def _tables(data: dict[str, Any]) -> dict[type, list[dict[str, Any]]]:
    """Return the rotary tables of a checked plan, by the input that reads each."""
    nodes = [node for subgraph in data["subgraphs"] for node in subgraph["nodes"]]
    return {Plan: [data], Subgraph: data["subgraphs"], Node: nodes, Tensor: list(data["tensors"].values())}


MOST_RANKS = 1024


@dataclass(frozen=True)
class Ranks:
    """This process's rank among `size` processes: `rank` counts from 0 to `size` - 1; rank 0 prints.

    Raises:
        ConfigError: `rank` or `size` is out of range.
    """

    rank: int
    size: int
    sums: ClassVar[bool] = True
    """True if a linear with a split input sums the ranks' products; see `RowParallelLinear`."""

    def __post_init__(self) -> None:
        if any(type(number) is not int for number in (self.rank, self.size)):
            raise ConfigError(f"rank {self.rank!r} of {self.size!r}: expected whole numbers")
        if not 1 <= self.size <= MOST_RANKS:
            raise ConfigError(f"{self.size} ranks, expected 1 to {MOST_RANKS}")
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank {self.rank} of {self.size}: expected 0 to {self.size - 1}")

    @property
    def are_alone(self) -> bool:
        """True if the only rank runs the complete decoder."""
        return self.size == 1

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"

    def for_scheme(self, *, is_static: bool) -> Ranks:
        """Return these ranks as a decoder under a scheme needs them. Under a static scheme they gather, because partial
        sums have no grid.
        """
        return GatheringRanks(self.rank, self.size) if is_static and not self.are_alone else self


class GatheringRanks(Ranks):
    """Ranks that gather values and compute no sums of linears, so that every column of a linear is computed as on one
    rank.
    """

    sums = False


ALONE = Ranks(0, 1)
"""One process that has the complete decoder."""
