"""A subgraph's executable bound to the buffers of chunks: which rows it sees, and where padding stays.

An executable of any length gets views of the rows that hold tokens. One of fixed length gets whole buffers,
whose padding rows are zeroed at its inputs, every time: an earlier subgraph may have left anything there. Several may
read one value at once: those of any length do not see its padding, and the others all write the same zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

from chunkrt.backends.base import Array, Executable
from chunkrt.errors import ConfigError
from chunkrt.graph.plan import Subgraph
from chunkrt.runtime.buffers import ChunkBuffers
from chunkrt.runtime.state import State


class BoundSubgraph:
    """One subgraph, ready to run on any chunk slot.

    Args:
        subgraph: the subgraph.
        executable: compiled for chunks of `chunk_length` rows.
        slots: the buffers of each.
        chunk_length: C.
        output: the plan's output, which goes to a run's logits and has no buffer.

    Raises:
        ConfigError: the executable's fixed length does not go with the chunk length, or padding would reach
            state.
    """

    def __init__(
        self,
        subgraph: Subgraph,
        executable: Executable,
        *,
        slots: Sequence[ChunkBuffers],
        chunk_length: int,
        output: str,
    ) -> None:
        self.subgraph = subgraph
        self.rows = subgraph.rows
        self._compute = executable.run
        self._fixed_length = executable.fixed_length
        self._slots = slots
        self._chunk_length = chunk_length
        self._logits = output if output in subgraph.outputs else None
        self._outputs = tuple(name for name in subgraph.outputs if name != output)
        self._check_length()
        whole = slice(chunk_length)
        self._whole = [
            (buffers.views(subgraph.inputs, whole), buffers.views(self._outputs, whole)) for buffers in slots
        ]

    def _check_length(self) -> None:
        fixed, chunk = self._fixed_length, self._chunk_length
        if fixed is None:
            return
        if self.subgraph.rows == "R" and (fixed < 1 or chunk % fixed):
            raise ConfigError(
                f"{self.subgraph.name} was compiled for {fixed} rows of logits at a time, "
                f"which does not divide the chunk length {chunk}"
            )
        if self.subgraph.rows == "T" and fixed != chunk:
            raise ConfigError(
                f"{self.subgraph.name} was compiled for {fixed} rows and cannot take chunks of {chunk}; "
                f"compile it for {chunk}, or use chunk length {fixed}"
            )
        if self.subgraph.state and chunk > 1:
            raise ConfigError(
                f"{self.subgraph.name} keeps state and always takes {fixed} rows, "
                "so padding would reach the state; run it on a backend that takes any number of rows"
            )

    @property
    def logit_group(self) -> int:
        """Rows of logits that one call writes, where that number is fixed; 1 where it is not."""
        return self._fixed_length or 1

    def run(self, slot: int, num_tokens: int, state: State) -> None:
        """Compute one chunk.

        Args:
            slot: chunk slot that holds the chunk.
            num_tokens: rows of the chunk that hold tokens, 1 to C.
            state: its caches are updated in place.
        """
        inputs, outputs = self._whole[slot]
        if num_tokens < self._chunk_length:
            buffers = self._slots[slot]
            if self._fixed_length is None:
                valid = slice(num_tokens)
                inputs, outputs = (
                    buffers.views(self.subgraph.inputs, valid),
                    buffers.views(self._outputs, valid),
                )
            else:
                buffers.clear_padding(self.subgraph.inputs, num_tokens)
        if self.subgraph.state:
            inputs = inputs | {name: state.tensors[name] for name in self.subgraph.state}
        self._compute(inputs, outputs)

    def run_logit_rows(self, slot: int, num_tokens: int, num_rows: int, logits: Array) -> None:
        """Compute the rows of one chunk whose logits are wanted, as many at a time as the executable takes.

        Args:
            slot: chunk slot that holds the chunk.
            num_tokens: rows of the chunk that hold tokens, 1 to C.
            num_rows: rows wanted, 1 to C.
            logits: float32 [num_rows or more, V], written in full: `num_rows` rounded up to `logit_group`.
        """
        buffers = self._slots[slot]
        step, tokens = num_rows, slice(num_tokens)
        if self._fixed_length is not None:
            step, tokens = self._fixed_length, slice(None)
            buffers.clear_padding(self.subgraph.inputs, num_tokens, num_rows)
        for start in range(0, num_rows, step):
            group = slice(start, start + step)
            inputs = buffers.views(self.subgraph.inputs, tokens, group)
            outputs = buffers.views(self._outputs, tokens, group)
            if self._logits is not None:
                outputs[self._logits] = logits[group]
            self._compute(inputs, outputs)
