"""Calls of an executable with realistic inputs of a decoder. Output buffers reveal stray writes.

The reference runs the complete decoder once over a stream of tokens. Every call takes its inputs from this recording,
and its state is the reference's state before the call's position.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from chunkrt.backends.base import Array, Executable, SegmentExecutable, SegmentOperands
from chunkrt.backends.reference import ReferenceBackend
from chunkrt.engine_directory.store import WeightStore
from chunkrt.graph.plan import Plan, Subgraph, Tensor, resolve
from chunkrt.quant.scheme import Scheme

GUARD_ROWS = 2
"""Number of guard rows before and after each output, which no call may write."""

UNWRITTEN = np.float32(np.nan)
"""Content of outputs and unused cache positions before a call. It is never correct, and it propagates if it is read."""

State = dict[str, Array]


@dataclass(frozen=True, kw_only=True)
class ExecutableCall:
    """The arguments of one `Executable.run`, and the buffers around its outputs."""

    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    buffers: Mapping[str, Array]
    """The outputs, each with its guard rows."""
    states: Mapping[str, Array]
    """The inputs that are state."""
    caches: frozenset[str]
    """Names of the states that have a slot for each position or each group of positions."""
    position: int
    num_tokens: int

    def input_bits(self) -> dict[str, bytes]:
        """Return the inputs that no call may write: all except state."""
        return {name: array.tobytes() for name, array in self.inputs.items() if name not in self.states}

    def guard_bits(self) -> dict[str, bytes]:
        """Return the guard rows around each output."""
        return _guard_bits(self.buffers)

    def other_position_bits(self) -> dict[str, bytes]:
        """Return the caches at positions other than the call's own."""
        return {n: np.delete(self.states[n], self._slots(n), axis=1).tobytes() for n in self.caches}

    def results(self) -> dict[str, Array]:
        """Return all results of the call: outputs, the caches at its own positions, and all other state."""
        own = {n: s[:, self._slots(n)] if n in self.caches else s for n, s in self.states.items()}
        return {**self.outputs, **own}

    def _slots(self, name: str) -> Array:
        positions = np.arange(self.position, self.position + self.num_tokens)
        slots: Array = positions % self.states[name].shape[1]
        return slots

    def result_bits(self) -> dict[str, bytes]:
        """Return the bytes of the results."""
        return {name: result.tobytes() for name, result in self.results().items()}

    def run(self, executable: Executable) -> None:
        """Run the call. Raise any exception of the executable."""
        executable.run(self.inputs, self.outputs)

    def __str__(self) -> str:
        return f"{self.num_tokens} tokens at position {self.position}"


@dataclass(frozen=True, kw_only=True)
class PackedCall:
    """Calls of several sequences as segments of one chunk: the arguments of one `SegmentExecutable.run_segments`.

    It supports the checks of `ExecutableCall`. After the run, the outputs of `calls` contain their rows.
    """

    calls: Sequence[ExecutableCall]
    inputs: Mapping[str, Array]
    """The inputs with rows, joined over all calls."""
    outputs: Mapping[str, Array]
    buffers: Mapping[str, Array]

    @property
    def segments(self) -> list[SegmentOperands]:
        """Return the inputs and state that are specific to each call."""
        return [
            SegmentOperands(call.num_tokens, {n: a for n, a in call.inputs.items() if n not in self.inputs})
            for call in self.calls
        ]

    def run(self, executable: SegmentExecutable) -> None:
        """Run the call. Raise any exception of the executable."""
        executable.run_segments(self.inputs, self.outputs, self.segments)
        ends = np.cumsum([call.num_tokens for call in self.calls])
        for name, output in self.outputs.items():
            for call, rows in zip(self.calls, np.split(output, ends[:-1]), strict=True):
                call.outputs[name][...] = rows

    def input_bits(self) -> dict[str, bytes]:
        """See `ExecutableCall`; the names of inputs of one segment contain the number of the segment."""
        own = {f"{n} of segment {i}": b for i, call in enumerate(self.calls) for n, b in call.input_bits().items()}
        return {**own, **{name: array.tobytes() for name, array in self.inputs.items()}}

    def guard_bits(self) -> dict[str, bytes]:
        """See `ExecutableCall`."""
        return _guard_bits(self.buffers)

    def other_position_bits(self) -> dict[str, bytes]:
        """See `ExecutableCall`; results are listed by name and segment."""
        return {
            f"{n} of segment {i}": b for i, call in enumerate(self.calls) for n, b in call.other_position_bits().items()
        }

    def results(self) -> dict[str, Array]:
        """Return the outputs."""
        return dict(self.outputs)

    def __str__(self) -> str:
        return "segments of " + ", of ".join(map(str, self.calls))


class Recording:
    """All values of a decoder over `num_tokens` random tokens, computed by the reference under a scheme.

    Args:
        most_rows: maximum number of rows of a call, by default all tokens. Ring buffers are as short as in a session
            with this maximum.

    Attributes:
        ring: number of slots of the caches of layers with a window.
    """

    def __init__(
        self, plan: Plan, scheme: Scheme, weights: WeightStore, num_tokens: int, most_rows: int | None = None
    ) -> None:
        self.plan, self.scheme, self.weights = plan, scheme, weights
        self._most_rows = most_rows or num_tokens
        slots = plan.slots(plan.context_length, self._most_rows)
        self.ring = slots["W"]
        self._symbols = {"T": num_tokens, "R": num_tokens, **slots}
        self._states: dict[tuple[str, int], State] = {}
        self._values: dict[str, Array] = {
            "input_ids": np.random.default_rng(0).integers(0, plan.vocab_size, num_tokens),
            "position": np.zeros(1, np.int64),
            "rope_position": np.zeros(1, np.int64),
            "logit_rows": np.arange(num_tokens),
        }
        self._filled: State = {}
        """Caches that later subgraphs read, with all tokens: a row sees no position behind its own."""
        for subgraph in plan.subgraphs:
            if subgraph.all_state:
                state = self._first_state(subgraph)
                self._values |= self._advance(subgraph, state, num_tokens)
                self._filled |= state
                continue
            outputs = {name: self._empty(plan.tensors[name], num_tokens) for name in subgraph.outputs}
            self.reference(subgraph).run({name: self._values[name] for name in subgraph.inputs}, outputs)
            self._values |= outputs

    def reference(self, subgraph: Subgraph) -> Executable:
        """Return the reference's executable, for any number of rows."""
        return ReferenceBackend().compile(subgraph, self.plan, self._symbols["T"], self.scheme, self.weights)

    def call(
        self,
        subgraph: Subgraph,
        position: int,
        num_tokens: int,
        *,
        cache_dtype: str = "float32",
        logit_rows: Sequence[int] | None = None,
    ) -> ExecutableCall:
        """Return a call on the tokens from `position` on; a subgraph of R rows takes the rows `logit_rows`, or all
        rows."""
        tokens = slice(position, position + num_tokens)
        rows = np.arange(num_tokens) if logit_rows is None else np.array(logit_rows, np.int64)
        graph_inputs: dict[str, Array] = {
            **dict.fromkeys(("position", "rope_position"), np.array([position])),
            "logit_rows": rows,
        }
        inputs = {
            name: graph_inputs[name] if name in graph_inputs else self._rows(name, tokens, rows)
            for name in subgraph.inputs
        }
        states = {name: self._state(subgraph, name, position, cache_dtype) for name in subgraph.all_state}
        buffers = self._buffers(subgraph.outputs, num_tokens, len(rows))
        return ExecutableCall(
            inputs={**inputs, **states},
            outputs=_inside(buffers),
            buffers=buffers,
            states=states,
            caches=frozenset(name for name in subgraph.all_state if self._is_cache(name)),
            position=position,
            num_tokens=num_tokens,
        )

    def pack(self, calls: Sequence[ExecutableCall]) -> PackedCall:
        """Return calls of one subgraph with rows T, as segments of one chunk."""
        first = calls[0]
        with_rows = [n for n in first.inputs if n not in first.states and "T" in self.plan.tensors[n].shape]
        buffers = self._buffers(first.outputs, sum(call.num_tokens for call in calls), 0)
        return PackedCall(
            calls=calls,
            inputs={name: np.concatenate([call.inputs[name] for call in calls]) for name in with_rows},
            outputs=_inside(buffers),
            buffers=buffers,
        )

    def _buffers(self, names: Iterable[str], num_tokens: int, num_logit_rows: int) -> dict[str, Array]:
        buffers = {}
        for name in names:
            tensor = self.plan.tensors[name]
            num_rows = num_tokens if tensor.shape[0] == "T" else num_logit_rows
            buffers[name] = self._empty(tensor, num_rows + 2 * GUARD_ROWS)
        return buffers

    def _rows(self, name: str, tokens: slice, logit_rows: Array) -> Array:
        of_chunk = self._values[name][tokens]
        return of_chunk[logit_rows] if self.plan.tensors[name].shape[0] == "R" else of_chunk.copy()

    def _is_cache(self, name: str) -> bool:
        return bool({"P", "W"} & set(self.plan.tensors[name].shape))

    def _state(self, subgraph: Subgraph, name: str, position: int, cache_dtype: str) -> Array:
        """Return a copy of one state before `position`."""
        key = subgraph.name, position
        if key not in self._states:
            self._states[key] = state = self._first_state(subgraph)
            self._advance(subgraph, state, position)
        return self._states[key][name].astype(cache_dtype if self._is_cache(name) else "float32")

    def _first_state(self, subgraph: Subgraph) -> State:
        shapes = {name: resolve(self.plan.tensors[name].shape, self._symbols) for name in subgraph.state}
        filled = {name: self._filled[name].copy() for name in subgraph.shared_state}
        first = {n: np.full(shape, UNWRITTEN if self._is_cache(n) else np.float32(0)) for n, shape in shapes.items()}
        return first | filled

    def _advance(self, subgraph: Subgraph, state: State, num_tokens: int) -> dict[str, Array]:
        """Run the first tokens on the reference, call after call; return the outputs."""
        reference = self.reference(subgraph)
        outputs = {name: self._empty(self.plan.tensors[name], num_tokens) for name in subgraph.outputs}
        for position in range(0, num_tokens, self._most_rows):
            tokens = slice(position, min(position + self._most_rows, num_tokens))
            at = dict.fromkeys(("position", "rope_position"), np.array([position]))
            inputs = {name: at[name] if name in at else self._values[name][tokens] for name in subgraph.inputs}
            reference.run({**inputs, **state}, {name: output[tokens] for name, output in outputs.items()})
        return outputs

    def _empty(self, tensor: Tensor, num_rows: int) -> Array:
        shape = resolve((num_rows, *tensor.shape[1:]), self._symbols)
        return np.full(shape, UNWRITTEN).astype(tensor.dtype, copy=False)


def _inside(buffers: Mapping[str, Array]) -> dict[str, Array]:
    """Return buffers without their guard rows."""
    return {name: buffer[GUARD_ROWS : len(buffer) - GUARD_ROWS] for name, buffer in buffers.items()}


def _guard_bits(buffers: Mapping[str, Array]) -> dict[str, bytes]:
    return {n: b[:GUARD_ROWS].tobytes() + b[len(b) - GUARD_ROWS :].tobytes() for n, b in buffers.items()}
