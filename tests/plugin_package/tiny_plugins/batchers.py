"""A batcher: the opposite of `sequential`."""


class LastFirst:
    """Puts one sequence into a chunk, the one that arrived last."""

    name = "last_first"

    def next_chunk(self, waiting, chunk_length):
        """Return as many rows of the last sequence as fit."""
        last = len(waiting) - 1
        return [(last, min(waiting[last].num_tokens, chunk_length))]


LAST_FIRST = LastFirst()
