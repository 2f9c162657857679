"""Check whether a model fits in the memory of a device.

The check needs only the plan: nothing is compiled, and no weight is read.

NPU memory holds the compiled contexts with their weights, the spilled part of each context, and the buffers at its
edges. A session has a fixed address window; a larger model is divided among several sessions. RAM holds the NPU's
memory and the CPU's data: caches, the chunks in flight, and the CPU's copy of the weights for decode.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from math import prod
from typing import Any

from chunkrt.backends.qnn.executable import NUM_PLACES
from chunkrt.backends.qnn.htp_support import graph_rows, npu_support
from chunkrt.backends.qnn.socs import Soc
from chunkrt.engine.npu_attention import npu_plans
from chunkrt.engine.options import DEFAULT_CHUNK_LENGTH, EngineOptions
from chunkrt.engine_directory.figures import FLOAT16_BYTES, converted_bytes, weight_bytes
from chunkrt.errors import PartitionError
from chunkrt.graph.plan import ATTENTION_OPS, Plan, Subgraph, linear_weights, resolve
from chunkrt.graph.static_attention import static_slots, window_elements
from chunkrt.quant.scheme import BLOCK_LENGTH, Scheme, find_scheme
from chunkrt.runtime.buffers import BufferLayout
from chunkrt.runtime.chunk_slots import chunk_slots
from chunkrt.runtime.state_tensors import state_bytes
from chunkrt.runtime.tasks import processors_for
from chunkrt.simulate.simulator import chunk_text, graphs_of

MOST_SESSIONS = 4
"""Number of NPU sessions of a process, as published by others; an emulator has no such limit."""

SMALLEST_SCHEME, SHORTEST_CONTEXT = "w4a16", 1024
"""Smallest scheme and shortest context that a remedy suggests."""

USABLE_RAM = 0.6
"""Share of a device's RAM that one program may use. This is a guess; the system and other programs use the rest."""

CONTEXT_OVERHEAD_BYTES, CONTEXT_COLUMN_BYTES = 64 * 1024, 24
"""Size of a context in addition to its weights: a constant, and a term for every output column of a linear. If each
column has its own quantisation range, the limits of the columns add a float16 for every row of a chunk.

The numbers were fitted to 162 contexts compiled for SM8650, with hidden sizes of 192 to 2048 and chunks of 1, 32 and
128. No context is larger than estimated. From 1 MB upwards, contexts are at most 2 % smaller with 16-bit activations,
and at most 13 % smaller with 8-bit activations. Chunks of 8 with 8-bit activations take up to 4 % more than estimated.
"""

LEAST_ROWS = 32
"""Fewest rows for which column limits are stored."""

WIDEST_VALUES_HELD = {16: 1.5, 8: 10.0}
"""Working memory of a context by the bits of activations, in units of its widest value as float16. The part that
exceeds VTCM is spilled. The numbers were fitted to the same contexts and to chunks of up to 1024. Estimates are at most
3 MB too small; for 8 bits and chunks of 512 and more, they are often far too large.
"""


@dataclass(frozen=True, kw_only=True)
class ContextFit:
    """One graph of an NPU subgraph, in bytes.

    Attributes:
        rows: number of rows of the graph.
        weight_bytes: weights of its linears on the NPU; a 4-bit linear takes half a byte per weight and a byte per
            block.
        context_bytes: estimate of the compiled context, including these weights.
        spill_bytes: estimate of working memory that exceeds VTCM.
        edge_bytes: float16 buffers for inputs and outputs of two calls, or of one call with attention.
    """

    name: str
    rows: int
    weight_bytes: int
    context_bytes: int
    spill_bytes: int
    edge_bytes: int

    @property
    def num_bytes(self) -> int:
        """Number of bytes of an NPU session's window that this subgraph takes."""
        return self.context_bytes + self.spill_bytes + self.edge_bytes


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Memory that a model takes on a device, and the device's memory, in bytes.

    Attributes:
        graph_lengths: chunk lengths of the NPU's graphs, if there are several; every graph is a context with its own
            weights and buffers. Empty if there is one graph, for the chunk length.
        sessions: for each NPU session, the names of its contexts.
        cache_bytes: keys and values of one conversation, in float16, and its recurrent state, in float32.
        chunk_bytes: values of the chunks in flight, in prompts and in decode.
        cpu_weight_bytes: the mapped file of weights.
    """

    soc: Soc = field(repr=False)
    scheme: str
    chunk_length: int
    graph_lengths: tuple[int, ...]
    context_length: int
    contexts: tuple[ContextFit, ...] = field(repr=False)
    sessions: tuple[tuple[str, ...], ...] = field(repr=False)
    cache_bytes: int
    chunk_bytes: int
    cpu_weight_bytes: int
    ram_bytes: int

    @property
    def npu_bytes(self) -> int:
        """Number of bytes on the NPU, in all sessions."""
        return sum(context.num_bytes for context in self.contexts)

    @property
    def total_bytes(self) -> int:
        """Number of bytes in RAM, which both processors share."""
        return self.npu_bytes + self.cache_bytes + self.chunk_bytes + self.cpu_weight_bytes

    @property
    def usable_ram_bytes(self) -> int:
        """Number of bytes of RAM that the model may take."""
        return int(self.ram_bytes * USABLE_RAM)

    @property
    def problems(self) -> list[str]:
        """Reasons why the model does not fit; empty if it does."""
        window = self.soc.npu_window_bytes
        found = [
            f"{context.name} takes {_size(context.num_bytes)} of an NPU session's {_size(window)}"
            for context in self.contexts
            if context.num_bytes > window
        ][:1]
        if len(self.sessions) > MOST_SESSIONS:
            found.append(
                f"the model takes {len(self.sessions)} NPU sessions of {_size(window)}, "
                f"but only {MOST_SESSIONS} are available"
            )
        if self.total_bytes > self.usable_ram_bytes:
            found.append(f"the model takes {_size(self.total_bytes)} of {_size(self.usable_ram_bytes)} usable RAM")
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain data, including sums and the problems."""
        return asdict(self) | {
            "contexts": [asdict(c) | {"num_bytes": c.num_bytes} for c in self.contexts],
            "npu_bytes": self.npu_bytes,
            "total_bytes": self.total_bytes,
            "usable_ram_bytes": self.usable_ram_bytes,
            "problems": self.problems,
            "fits": not self.problems,
        }


def fit_plan(
    plan: Plan,
    scheme: Scheme,
    soc: Soc,
    *,
    chunk_length: int,
    context_length: int,
    ram_bytes: int,
    graph_lengths: Collection[int] = (),
    options: EngineOptions | None = None,
) -> Fit:
    """Add up the memory of a plan on a device under a static scheme.

    Args:
        graph_lengths: chunk lengths for which the NPU has graphs, in addition to `chunk_length`. Lengths whose graphs
            have the same number of rows share a context.
        chunk_length, context_length: at least 1, at most the plan's context.
        ram_bytes: RAM of the device.
        options: attention on the NPU, its windows, and the storage of weights.

    Raises:
        PartitionError: the NPU cannot run one of its subgraphs.
    """
    options, plan = options or EngineOptions(npu="qnn"), plan.within(context_length)
    plans = npu_plans(plan, {}, options, context_length)
    graphs = graphs_of(graph_lengths, chunk_length, scheme)
    contexts = [
        _context(
            subgraph,
            f" of {reach}" * (of is not plan) + f", {graph_rows(length, scheme)} rows" * bool(graphs),
            of,
            scheme,
            soc,
            graph_rows(length, scheme),
        )
        for reach, of in plans.items()
        for subgraph in of.subgraphs
        if subgraph.device == "npu"
        for length in graphs or (chunk_length,)
    ]
    on_npu = {name for s in plan.subgraphs if s.device == "npu" for name in s.weights}
    kept = {n: b for n, b in weight_bytes(plan, scheme).items() if options.weights == "both" or n not in on_npu}
    processors = processors_for(NUM_PLACES, soc.num_cores)
    lengths = ((chunk_length, chunk_slots(plan, chunk_length, processors)), (1, 1))  # prompts with the NPU; decode
    slots = plan.slots(context_length, chunk_length)
    return Fit(
        soc=soc,
        scheme=scheme.name,
        chunk_length=chunk_length,
        graph_lengths=graphs,
        context_length=context_length,
        contexts=tuple(contexts),
        sessions=tuple(_share_sessions(contexts, soc.npu_window_bytes)),
        cache_bytes=sum(state_bytes(tensor, slots) for tensor in plan.state_tensors),
        chunk_bytes=sum(BufferLayout(plan, length).num_bytes * num_slots for length, num_slots in lengths),
        cpu_weight_bytes=sum(kept.values()),
        ram_bytes=ram_bytes,
    )


def find_remedy(
    plan: Plan, scheme: Scheme, fit: Fit, *, is_compiled: bool = False, options: EngineOptions | None = None
) -> str:
    """Return command line options under which a model that does not fit would fit; empty if none are found.

    Options are tried in this order: one graph in place of several, shorter chunks, a shorter context, 4-bit weights.

    Args:
        scheme: the scheme given to `fit`.
        is_compiled: the scheme is that of an engine directory, so another one requires compiling the checkpoint again.
        options: those given to `fit`.
    """
    shorter = min(fit.chunk_length, DEFAULT_CHUNK_LENGTH)
    lengths = list(dict.fromkeys([fit.graph_lengths or (fit.chunk_length,), (fit.chunk_length,), (shorter,)]))
    context_lengths = [fit.context_length]
    while context_lengths[-1] // 2 >= max(SHORTEST_CONTEXT, fit.chunk_length):
        context_lengths.append(context_lengths[-1] // 2)
    schemes = (scheme, find_scheme(SMALLEST_SCHEME))
    for tried, context_length, graphs in product(schemes, context_lengths, lengths):
        try:
            found = fit_plan(
                plan,
                tried,
                fit.soc,
                chunk_length=graphs[-1],
                graph_lengths=graphs,
                context_length=context_length,
                ram_bytes=fit.ram_bytes,
                options=options,
            )
        except PartitionError:  # depths that are not divisible into blocks of 4-bit weights
            continue
        if not found.problems:
            changes = [
                f"--scheme {tried.name}" if tried != scheme else "",
                f"--chunk {chunk_text(graphs[-1], graphs)}" if graphs != lengths[0] else "",
                f"--context {context_length}" if context_length != fit.context_length else "",
            ]
            remedy = " ".join(filter(None, changes))
            return f"compiling the checkpoint again with {remedy}" if is_compiled and tried != scheme else remedy
    return ""


def _context(subgraph: Subgraph, suffix: str, plan: Plan, scheme: Scheme, soc: Soc, rows: int) -> ContextFit:
    if not (support := npu_support(subgraph, plan, scheme)):
        raise PartitionError(f"the NPU cannot run {subgraph.name}: node {support.node!r}: {support.reason}")
    linears = sorted(linear_weights(plan) & set(subgraph.weights))
    shapes = [resolve(plan.tensors[name].shape, {}) for name in linears]
    bits = [scheme.weight_bits_of(name) for name in linears]
    num_bytes = sum(_npu_weight_bytes(shape[0], shape[1], b) for shape, b in zip(shapes, bits, strict=True))
    num_columns = sum(shape[1] for shape in shapes)
    num_limits = sum(s[1] for name, s in zip(linears, shapes, strict=True) if scheme.has_column_grids(name))
    limit_bytes = FLOAT16_BYTES * max(rows, LEAST_ROWS) * num_limits
    made = (plan.tensors[name] for node in subgraph.nodes for name in node.outputs)
    scores = (
        int(str(n.attributes["num_heads"])) * (static_slots(n) + rows)
        for n in subgraph.nodes
        if static_slots(n) and n.op in ATTENTION_OPS
    )
    widest = max(prod(resolve(tensor.shape, {"T": rows, "R": rows})) for tensor in made)
    widest_bytes = FLOAT16_BYTES * max(widest, rows * max(scores, default=0))
    activation_bits = min((scheme.activation_bits_of(name) for name in linears), default=16)
    window = window_elements(subgraph, plan, rows)
    return ContextFit(
        name=subgraph.name + suffix,
        rows=rows,
        weight_bytes=num_bytes,
        context_bytes=num_bytes + CONTEXT_OVERHEAD_BYTES + CONTEXT_COLUMN_BYTES * num_columns + limit_bytes,
        spill_bytes=max(0, int(WIDEST_VALUES_HELD[activation_bits] * widest_bytes) - soc.vtcm_bytes),
        edge_bytes=(1 if subgraph.state else NUM_PLACES)
        * converted_bytes(plan, (*subgraph.inputs, *subgraph.outputs), rows)
        + FLOAT16_BYTES * (window.entering + window.leaving)
        + window.history_bytes,
    )


def _npu_weight_bytes(depth: int, columns: int, bits: int | None) -> int:
    if bits == 4:
        return -(-depth // 2) * columns + -(-depth // BLOCK_LENGTH) * columns
    return depth * columns


def _share_sessions(contexts: Sequence[ContextFit], window_bytes: int) -> list[tuple[str, ...]]:
    """Group contexts into sessions in order. A context joins the session of its predecessor if that session has
    room."""
    sessions: list[tuple[str, ...]] = []
    room = 0
    for context in contexts:
        if sessions and context.num_bytes <= room:
            sessions[-1] += (context.name,)
        else:
            sessions.append((context.name,))
            room = window_bytes
        room -= context.num_bytes
    return sessions


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
