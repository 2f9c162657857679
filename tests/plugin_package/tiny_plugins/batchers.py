"""A batcher: the opposite of `sequential`."""


class LastFirst:
    """One sequence a chunk, and the last that came."""

    name = "last_first"

    def next_chunk(self, waiting, chunk_length):
        """All that fits of the last."""
        last = len(waiting) - 1
        return [(last, min(waiting[last].num_tokens, chunk_length))]


LAST_FIRST = LastFirst()
