"""Bind the executable of a subgraph to the buffers of chunks, and handle padding.

An executable without a fixed length receives views of the rows that contain tokens. An executable with a fixed length
receives complete buffers. The padding rows of its inputs are zeroed before every call, because an earlier subgraph may
have written to them. Several subgraphs may read one value concurrently: executables without a fixed length do not read
the padding, and all others write the same zeros to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from chunkrt.backends.base import Array, Executable, HistoryExecutable, Passage, SegmentExecutable, SegmentOperands
from chunkrt.backends.link import SumExecutable
from chunkrt.errors import ConfigError
from chunkrt.graph.plan import Subgraph
from chunkrt.runtime.buffers import EMPTY, ChunkBuffers
from chunkrt.runtime.job import Segment


class BoundSubgraph:
    """A subgraph that is ready to run on any chunk slot.

    Args:
        subgraph: the subgraph.
        executable: the executable of the subgraph, compiled for chunks of `chunk_length` rows.
        slots: the buffers of each chunk slot.
        chunk_length: C, the maximum number of rows of a chunk.
        output: name of the plan's output, which is written directly to a run's logits and has no buffer.

    Raises:
        ConfigError: the executable's fixed length does not fit the chunk length, or padding would reach state.
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
        self._compute_segments = executable.run_segments if isinstance(executable, SegmentExecutable) else None
        self._sum = executable.run_sum if isinstance(executable, SumExecutable) else None
        self._after = executable.run_after if isinstance(executable, HistoryExecutable) else None
        self._fixed_length = executable.fixed_length
        self._slots = slots
        self._chunk_length = chunk_length
        self._logits = output if output in subgraph.outputs else None
        self._outputs = tuple(name for name in subgraph.outputs if name != output)
        has_rows = slots[0].has_rows
        self._shared = tuple(name for name in subgraph.inputs if has_rows(name))
        self._own = tuple(name for name in subgraph.inputs if not has_rows(name))
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
        """Number of rows of logits that one call writes if this number is fixed; otherwise 1."""
        return self._fixed_length or 1

    @property
    def has_logits(self) -> bool:
        """True if the subgraph computes the plan's output."""
        return self._logits is not None

    def run(self, slot: int, segments: Sequence[Segment], num_tokens: int, number: int = 0) -> Passage | None:
        """Compute one chunk.

        Args:
            slot: chunk slot that holds the chunk.
            segments: the segments of the chunk; the states of their jobs are updated in place.
            num_tokens: number of rows that contain tokens, 1 to C.
            number: number of the chunk if other ranks compute it too; see `Key.number`.

        Returns:
            The result of `Executable.run`.
        """
        if len(segments) > 1 and self.subgraph.state:
            self._run_segments(slot, segments, num_tokens)
            return None
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
            inputs = inputs | self._state_of(segments[0])
            if self._after is not None:
                return self._after(inputs, outputs, segments[0].job.run.state.history)
        if self._sum is not None:
            self._sum(inputs, outputs, number)
            return None
        return self._compute(inputs, outputs)

    def _run_segments(self, slot: int, segments: Sequence[Segment], num_tokens: int) -> None:
        """Compute the segments, in one call if the executable supports it, otherwise in one call per segment."""
        buffers, row = self._slots[slot], 0
        if self._compute_segments is not None:
            tokens = slice(num_tokens)
            operands = [
                SegmentOperands(s.num_tokens, buffers.views(self._own, EMPTY, segment=i) | self._state_of(s))
                for i, s in enumerate(segments)
            ]
            self._compute_segments(buffers.views(self._shared, tokens), buffers.views(self._outputs, tokens), operands)
            return
        for index, segment in enumerate(segments):
            rows = slice(row, row + segment.num_tokens)
            inputs = buffers.views(self.subgraph.inputs, rows, segment=index)
            self._compute(inputs | self._state_of(segment), buffers.views(self._outputs, rows))
            row = rows.stop

    def _state_of(self, segment: Segment) -> dict[str, Array]:
        tensors = segment.job.run.state.tensors
        return {name: tensors[name] for name in self.subgraph.state}

    def run_logit_rows(self, slot: int, num_tokens: int, num_rows: int, logits: Array) -> None:
        """Compute the logits of the requested rows of one chunk, in groups if the executable has a fixed length.

        Args:
            slot: chunk slot that holds the chunk.
            num_tokens: number of rows that contain tokens, 1 to C.
            num_rows: number of requested rows, 1 to C.
            logits: float32 [N, V], written completely; N is `num_rows` rounded up to a multiple of `logit_group`.
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
