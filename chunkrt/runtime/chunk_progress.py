"""What a schedule knows of one chunk: which of its tasks wait for how much."""

from __future__ import annotations

from collections.abc import Sequence

from chunkrt.graph.flow import Flow, Route


class ChunkProgress:
    """One chunk.

    Args:
        number: of the chunk.
        route: what it passes through.
        durations: of its tasks as estimated, by subgraph.
        after: the chunks that are before it where state is.
        flow: of the decoder.
    """

    def __init__(
        self, number: int, route: Route, durations: Sequence[int], after: Sequence[ChunkProgress], flow: Flow
    ) -> None:
        self.number, self.route, self.durations = number, route, durations
        self.left = len(route.subgraphs)
        """Tasks that have not ended."""
        self.num_running = 0
        self.num_sums = len(flow.sums.intersection(route.subgraphs))
        """Sums over ranks that have not been handed out."""
        self.is_failed = False
        self.next: list[ChunkProgress] = []
        """Those that come after it where state is."""
        self.passed: set[int] = set()
        """The subgraphs with state that it has passed."""
        self.waits = [len(waits_for) or 1 for waits_for in flow.waits_for]
        """How many things every task still waits for: tasks of its chunk, or where there are none that the chunk
        enters; and with state the chunks before it."""
        for earlier in after:
            earlier.next.append(self)
            for subgraph, owns in enumerate(flow.has_state):
                self.waits[subgraph] += owns and subgraph not in earlier.passed
