"""Progress of one chunk in a schedule: its remaining tasks and their dependencies."""

from __future__ import annotations

from collections.abc import Sequence

from chunkrt.graph.flow import Flow, Route


class ChunkProgress:
    """Progress of one chunk.

    Args:
        number: number of the chunk.
        route: subgraphs that it passes through.
        durations: estimated durations of its tasks, by subgraph.
        after: chunks that come before it at subgraphs with state.
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
        """Number of sums over ranks that have not been handed out."""
        self.is_failed = False
        self.next: list[ChunkProgress] = []
        """Chunks that come after it at subgraphs with state."""
        self.passed: set[int] = set()
        """Subgraphs with state that the chunk has passed."""
        self.waits = [len(waits_for) or 1 for waits_for in flow.waits_for]
        """Number of dependencies of each task that are not yet met: tasks of its chunk, or the chunk's entry if there
        are none; with state also the preceding chunks."""
        for earlier in after:
            earlier.next.append(self)
            for subgraph, owns in enumerate(flow.has_state):
                self.waits[subgraph] += owns and subgraph not in earlier.passed
