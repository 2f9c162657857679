"""Progress of one chunk in a schedule: its remaining tasks and their dependencies."""

from __future__ import annotations

from collections.abc import Sequence

from chunkrt.graph.flow import Flow, Route


class ChunkProgress:
    """Progress of one chunk.

    Args:
        number: number of the chunk.
        route: subgraphs that the chunk passes through.
        durations: estimated durations of its tasks, by subgraph.
        after: numbers of the chunks that precede this one at subgraphs with state.
        flow: data flow of the decoder.
    """

    def __init__(
        self, number: int, route: Route, durations: Sequence[int], after: Sequence[ChunkProgress], flow: Flow
    ) -> None:
        self.number, self.route, self.durations = number, route, durations
        self.left = len(route.subgraphs)
        """Number of tasks that have not ended."""
        self.num_running = 0
        self.num_sums = len(flow.sums.intersection(route.subgraphs))
        """Number of sums over ranks that no worker has claimed yet."""
        self.is_failed = False
        self.next: list[ChunkProgress] = []
        """Chunks that follow this one at subgraphs with state."""
        self.passed: set[int] = set()
        """Subgraphs with state that the chunk has passed."""
        self.waits = [len(waits_for) or 1 for waits_for in flow.waits_for]
        """Number of unmet dependencies of each task. A task depends on tasks of its chunk, or, if it reads no other
        task, on the chunk's entry. A task with state also depends on the preceding chunks.
        """
        for earlier in after:
            earlier.next.append(self)
            for subgraph, owns in enumerate(flow.has_state):
                self.waits[subgraph] += owns and subgraph not in earlier.passed
