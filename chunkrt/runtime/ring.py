"""The ring: how many chunks may be in flight, by the memory that they take."""

from __future__ import annotations

from collections.abc import Sequence

from chunkrt.graph.plan import Plan
from chunkrt.runtime.buffers import BufferLayout
from chunkrt.runtime.schedule import Processor

DEFAULT_RING_BYTES = 64 * 1024 * 1024
"""Of the ring's buffers together. Chunks of 32 tokens take 0.3 MB each for SmolLM2-135M, 3 MB for Llama-2-7B."""

MOST_CHUNKS_IN_FLIGHT = 32
"""Where memory allows more: a prompt of 1024 tokens in chunks of 32. Slots gain most when they take the whole prompt:
attention grows with the position, so early chunks keep the NPU busy and late ones the CPU."""

CHUNKS_A_WORKER = 2
"""In flight where one processor runs everything: any task suits any worker, and fewer chunks stay in the caches. On two
cores this prefills 512 tokens of SmolLM2-135M 4 % faster than 32 slots do, 1024 tokens 10 %."""


FACTOR_WITH_LINK = 2
"""Times as many, where chunks wait for other ranks: while one waits another keeps the worker busy."""


def ring_slots(
    plan: Plan, chunk_length: int, processors: Sequence[Processor], *, num_bytes: int = DEFAULT_RING_BYTES
) -> int:
    """Ring slots that an executor gets.

    One more than there are workers lets all of them be busy; more let a policy keep them busy. Memory comes first:
    there are never more than fit. It is committed as it is used: a short prompt takes less.

    Args:
        plan: the decoder.
        chunk_length: C.
        processors: who runs tasks, the link's workers excepted.
        num_bytes: that the slots may take together.

    Returns:
        At least 1, whatever it takes.
    """
    workers = sum(processor.workers for processor in processors)
    has_link = any(subgraph.device == "link" for subgraph in plan.subgraphs)
    a_worker = CHUNKS_A_WORKER * (FACTOR_WITH_LINK if has_link else 1)
    wanted = a_worker * workers if len(processors) == 1 else max(MOST_CHUNKS_IN_FLIGHT, 1 + workers)
    return max(1, min(wanted, num_bytes // BufferLayout(plan, chunk_length).num_bytes))
