"""A policy: the opposite of `in_order`."""


class LatestChunk:
    """Prefers the latest chunk that is ready."""

    name = "latest_chunk"
    is_concurrent = True

    def select(self, ready, schedule):
        """Return the latest chunk's earliest task."""
        return min(ready, key=lambda task: (-task.chunk, task.subgraph))


LATEST_CHUNK = LatestChunk()
