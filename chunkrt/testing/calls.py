"""Calls of an executable with inputs as they occur in a decoder, into buffers that show what was written.

The reference runs the whole decoder once over a stream of tokens; every call takes its inputs, and the part of the
caches that lies before it, from that recording.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from chunkrt.backends.base import Array, Executable
from chunkrt.backends.reference import ReferenceBackend
from chunkrt.graph.plan import Plan, Subgraph, Tensor, resolve
from chunkrt.quant.scheme import Scheme
from chunkrt.weights.store import WeightStore

GUARD_ROWS = 2
"""Rows before and after each output that no call may write."""

UNWRITTEN = np.float32(np.nan)
"""What outputs and unused cache positions hold before a call: never right, and contagious where it is read."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of one `Executable.run`, and the buffers around its outputs."""

    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    buffers: Mapping[str, Array]
    """Each output with its guard rows."""
    caches: Mapping[str, Array]
    """Those of the inputs that are caches."""
    position: int
    num_tokens: int

    def input_bits(self) -> dict[str, bytes]:
        """The inputs that no call may write: all but the caches."""
        return {name: array.tobytes() for name, array in self.inputs.items() if name not in self.caches}

    def guard_bits(self) -> dict[str, bytes]:
        """What lies around each output."""
        return {n: b[:GUARD_ROWS].tobytes() + b[len(b) - GUARD_ROWS :].tobytes() for n, b in self.buffers.items()}

    def other_position_bits(self) -> dict[str, bytes]:
        """The caches at positions that are not the call's own."""
        end = self.position + self.num_tokens
        return {n: c[:, : self.position].tobytes() + c[:, end:].tobytes() for n, c in self.caches.items()}

    def results(self) -> dict[str, Array]:
        """All that the call computes: outputs, and the caches at its own positions."""
        end = self.position + self.num_tokens
        return {**self.outputs, **{name: cache[:, self.position : end] for name, cache in self.caches.items()}}

    def result_bits(self) -> dict[str, bytes]:
        """The results, bit for bit."""
        return {name: result.tobytes() for name, result in self.results().items()}


class Recording:
    """Every value of a decoder over `num_tokens` random tokens, as the reference computes it under a scheme."""

    def __init__(self, plan: Plan, scheme: Scheme, weights: WeightStore, num_tokens: int) -> None:
        self.plan, self.scheme, self.weights = plan, scheme, weights
        self._symbols = {"T": num_tokens, "R": num_tokens, "P": plan.context_length, "W": plan.context_length}
        self._values: dict[str, Array] = {
            "input_ids": np.random.default_rng(0).integers(0, plan.vocab_size, num_tokens),
            "position": np.zeros(1, np.int64),
            "rope_position": np.zeros(1, np.int64),
            "logit_rows": np.arange(num_tokens),
        }
        for tensor in plan.state_tensors:
            self._values[tensor.name] = np.full(resolve(tensor.shape, self._symbols), UNWRITTEN)
        for subgraph in plan.subgraphs:
            outputs = {name: self._empty(plan.tensors[name], num_tokens) for name in subgraph.outputs}
            inputs = {name: self._values[name] for name in (*subgraph.inputs, *subgraph.state)}
            self.reference(subgraph).run(inputs, outputs)
            self._values |= outputs

    def reference(self, subgraph: Subgraph) -> Executable:
        """The reference's executable, for any number of rows."""
        return ReferenceBackend().compile(subgraph, self.plan, self._symbols["T"], self.scheme, self.weights)

    def call(
        self,
        subgraph: Subgraph,
        position: int,
        num_tokens: int,
        *,
        cache_dtype: str = "float32",
        logit_rows: Sequence[int] | None = None,
    ) -> Call:
        """A call on the tokens from `position` on; a subgraph of R rows takes `logit_rows` of them, or all."""
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
        caches = {name: self._cache(name, position, cache_dtype) for name in subgraph.state}
        buffers = {}
        for name in subgraph.outputs:
            tensor = self.plan.tensors[name]
            num_rows = num_tokens if tensor.shape[0] == "T" else len(rows)
            buffers[name] = self._empty(tensor, num_rows + 2 * GUARD_ROWS)
        outputs = {name: buffer[GUARD_ROWS : len(buffer) - GUARD_ROWS] for name, buffer in buffers.items()}
        return Call(
            inputs={**inputs, **caches},
            outputs=outputs,
            buffers=buffers,
            caches=caches,
            position=position,
            num_tokens=num_tokens,
        )

    def _rows(self, name: str, tokens: slice, logit_rows: Array) -> Array:
        of_chunk = self._values[name][tokens]
        return of_chunk[logit_rows] if self.plan.tensors[name].shape[0] == "R" else of_chunk.copy()

    def _cache(self, name: str, position: int, dtype: str) -> Array:
        cache = self._values[name].astype(dtype)
        cache[:, position:] = UNWRITTEN
        return cache

    def _empty(self, tensor: Tensor, num_rows: int) -> Array:
        shape = resolve((num_rows, *tensor.shape[1:]), self._symbols)
        return np.full(shape, UNWRITTEN).astype(tensor.dtype, copy=False)
