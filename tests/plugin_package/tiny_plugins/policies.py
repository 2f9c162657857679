"""A policy: the opposite of `in_order`."""


class LatestChunk:
    """The latest chunk that is ready comes first."""

    name = "latest_chunk"
    is_concurrent = True

    def select(self, ready, schedule):
        """The latest chunk's earliest task."""
        return min(ready, key=lambda task: (-task.chunk, task.subgraph))


LATEST_CHUNK = LatestChunk()
