"""A run on its way through the decoder: its chunks, its logits, and how a task of it is computed."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chunkrt.graph.plan import Plan
from chunkrt.runtime.binding import BoundSubgraph
from chunkrt.runtime.buffers import ChunkBuffers, aligned_zeros
from chunkrt.runtime.run import Run
from chunkrt.runtime.tasks import Task


class Chunk(NamedTuple):
    """Consecutive tokens, int64 [T], and the position of the first.

    rows: those whose logits are wanted, should the chunk come as far as that. has_logits: whether it does.
    """

    token_ids: NDArray[np.int64]
    position: int
    rows: range
    has_logits: bool


class Stream:
    """One run.

    Args:
        run: what is asked for.
        plan: the decoder.
        subgraphs: the plan's, bound to `slots`.
        slots: the buffers of each.
        chunk_length: C.
    """

    def __init__(
        self,
        run: Run,
        plan: Plan,
        *,
        subgraphs: Sequence[BoundSubgraph],
        slots: Sequence[ChunkBuffers],
        chunk_length: int,
    ) -> None:
        self._run, self._slots, self._subgraphs = run, slots, subgraphs
        self._chunk_length = chunk_length
        self._waits_for = plan.flow.waits_for
        self._loading = Lock()
        self._loaded: set[int] = set()
        """The chunks whose graph inputs are in their slots."""
        num_tokens = run.token_ids.size
        self.chunks = [self._chunk(start) for start in range(0, num_tokens, chunk_length)]
        wanted = plan.flow.with_sums if run.is_for_others else plan.flow.with_logits
        self.routes = [wanted if chunk.has_logits else plan.flow.without_logits for chunk in self.chunks]
        """What every chunk passes through."""
        self._num_rows = 0 if run.is_for_others else {"last": 1, "all": num_tokens, "none": 0}[run.logits]
        group = subgraphs[-1].logit_group
        self._logits = aligned_zeros((-(-self._num_rows // group) * group, plan.vocab_size), np.float32)

    @property
    def logits(self) -> NDArray[np.float32] | None:
        """float32 [rows asked for, V]."""
        return self._logits[: self._num_rows] if self._num_rows else None

    def compute(self, task: Task, slot: int) -> None:
        """Compute one task, whose chunk has a chunk slot; called from any worker's thread."""
        index, number = task
        chunk, subgraph = self.chunks[number], self._subgraphs[index]
        num_tokens = chunk.token_ids.size
        if not self._waits_for[index]:
            self._load(number, slot)
        if subgraph.rows == "T":
            subgraph.run(slot, num_tokens, self._run.state)
        else:
            first = number * self._chunk_length if self._run.logits == "all" else 0
            subgraph.run_logit_rows(slot, num_tokens, len(chunk.rows), self._logits[first:])

    def _load(self, number: int, slot: int) -> None:
        """Fill the graph inputs, once: whichever of a chunk's first tasks comes first does."""
        with self._loading:
            if number not in self._loaded:
                token_ids, position, rows, _ = self.chunks[number]
                self._slots[slot].load(token_ids, position, rows, self._run.state.rope_offset)
                self._loaded.add(number)

    def _chunk(self, start: int) -> Chunk:
        run = self._run
        token_ids = run.token_ids[start : start + self._chunk_length]
        size, is_last = token_ids.size, start + self._chunk_length >= run.token_ids.size
        return Chunk(
            token_ids=token_ids,
            position=run.state.position + start,
            rows=range(size) if run.logits == "all" else range(size - 1, size),
            has_logits=run.logits == "all" or (run.logits == "last" and is_last),
        )
