"""The ring: how many chunks may be in flight, by the memory that they take."""

from __future__ import annotations

from chunkrt.graph.plan import Plan
from chunkrt.runtime.buffers import BufferLayout

DEFAULT_RING_BYTES = 64 * 1024 * 1024
"""Of the ring's buffers together. Chunks of 32 tokens take 0.3 MB each for SmolLM2-135M, 3 MB for Llama-2-7B."""

MOST_CHUNKS_IN_FLIGHT = 32
"""Where memory allows more: a prompt of 1024 tokens in chunks of 32. Slots gain most when they take the whole prompt:
attention grows with the position, so early chunks keep the NPU busy and late ones the CPU."""


def ring_slots(plan: Plan, chunk_length: int, num_workers: int, *, num_bytes: int = DEFAULT_RING_BYTES) -> int:
    """Ring slots that an executor gets.

    One more than there are workers lets all of them be busy; more, up to `MOST_CHUNKS_IN_FLIGHT`, let a policy keep
    them busy. Memory comes first: there are never more than fit. It is committed as it is used: a short prompt takes
    less.

    Args:
        plan: the decoder.
        chunk_length: C.
        num_workers: of all processors.
        num_bytes: that the slots may take together.

    Returns:
        At least 1, whatever it takes.
    """
    most = max(MOST_CHUNKS_IN_FLIGHT, 1 + num_workers)
    return max(1, min(most, num_bytes // BufferLayout(plan, chunk_length).num_bytes))
