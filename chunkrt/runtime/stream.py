"""Chunks in flight through the decoder: the segments of jobs in each chunk, and the computation of tasks."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

import numpy as np

from chunkrt.backends.base import Passage
from chunkrt.graph.flow import Flow, Route
from chunkrt.runtime.binding import BoundSubgraph
from chunkrt.runtime.buffers import ChunkBuffers
from chunkrt.runtime.job import Segment
from chunkrt.runtime.task_clock import TaskClock
from chunkrt.runtime.tasks import Task


class Chunk:
    """A chunk: consecutive segments, one for each job with rows in the chunk.

    `number` identifies the chunk if other ranks compute it too; see `Key.number`.
    """

    def __init__(self, segments: Sequence[Segment], flow: Flow, number: int = 0) -> None:
        self.number = number
        self.segments = tuple(segments)
        self.num_tokens = sum(segment.num_tokens for segment in self.segments)
        self.num_rows = sum(segment.num_rows for segment in self.segments)
        """Number of rows whose logits are requested."""
        self.wants_hidden = any(segment.job.run.logits == "hidden" for segment in self.segments)
        self.route: Route = self._route(flow)
        """Subgraphs that the chunk passes through."""
        self.loading = Lock()
        self.is_loaded = False

    def _route(self, flow: Flow) -> Route:
        if not self.num_rows and not self.wants_hidden:
            return flow.without_logits
        if self.segments[0].job.run.is_for_others:
            return flow.with_sums
        return flow.with_logits if self.num_rows else flow.with_hidden

    def load(self, buffers: ChunkBuffers) -> None:
        """Fill the graph inputs. Every first task calls this method, but only the first call has an effect."""
        with self.loading:
            if not self.is_loaded:
                buffers.load(self.segments)
                self.is_loaded = True


class Stream:
    """The chunks in flight.

    Args:
        chunks: the chunks by number.
        flow: data flow of the decoder.
        subgraphs: the plan's subgraphs, bound to `slots`.
        slots: the buffers of each chunk slot.
        clock: records the tasks in progress.
    """

    def __init__(
        self,
        chunks: dict[int, Chunk],
        flow: Flow,
        subgraphs: Sequence[BoundSubgraph],
        slots: Sequence[ChunkBuffers],
        clock: TaskClock,
    ) -> None:
        self.chunks, self._clock = chunks, clock
        self._waits_for, self._hidden, self._subgraphs, self._slots = flow.waits_for, flow.hidden, subgraphs, slots

    def compute(self, task: Task, slot: int) -> Passage | None:
        """Compute one task, whose chunk is in the given chunk slot. The thread of any worker may call this method."""
        index, number = task
        chunk, subgraph = self.chunks[number], self._subgraphs[index]
        if not self._waits_for[index]:
            chunk.load(self._slots[slot])
        with self._clock.running():
            passage = self._run(subgraph, slot, chunk)
        if chunk.wants_hidden and index == self._hidden:  # before a later task reuses the memory
            self._slots[slot].give_hidden(chunk.segments)
        if index == chunk.route.subgraphs[-1]:
            for segment in chunk.segments:
                if (on_tokens := segment.job.run.on_tokens) is not None:
                    on_tokens(segment.num_tokens)
        return passage

    def _run(self, subgraph: BoundSubgraph, slot: int, chunk: Chunk) -> Passage | None:
        if subgraph.rows == "T":
            return subgraph.run(slot, chunk.segments, chunk.num_tokens, chunk.number)
        if len(chunk.segments) == 1:
            subgraph.run_logit_rows(slot, chunk.num_tokens, chunk.num_rows, chunk.segments[0].logits)
        else:
            self._run_logit_rows(subgraph, slot, chunk)
        return None

    def _run_logit_rows(self, subgraph: BoundSubgraph, slot: int, chunk: Chunk) -> None:
        """Compute the logits of the requested rows, which are consecutive in the chunk, and copy them to the jobs."""
        group = subgraph.logit_group
        together = self._slots[slot].logits(-(-chunk.num_rows // group) * group)
        subgraph.run_logit_rows(slot, chunk.num_tokens, chunk.num_rows, together)
        if subgraph.has_logits:
            row = 0
            for segment in chunk.segments:
                np.copyto(segment.logits[: segment.num_rows], together[row : row + segment.num_rows])
                row += segment.num_rows
