"""Chunk slots: how many chunks may be in flight, by the memory that they take."""

from __future__ import annotations

from collections.abc import Sequence

from chunkrt.errors import ConfigError
from chunkrt.graph.plan import Plan
from chunkrt.runtime.buffers import BufferLayout
from chunkrt.runtime.tasks import Processor

DEFAULT_SLOT_BYTES = 64 * 1024 * 1024
"""Of the buffers of all together. Chunks of 32 tokens take 0.3 MB each for SmolLM2-135M, 3 MB for Llama-2-7B."""

MOST_CHUNKS_IN_FLIGHT = 32
"""Where memory allows more: a prompt of 1024 tokens in chunks of 32. Slots gain most when they take the whole prompt:
attention grows with the position, so early chunks keep the NPU busy and late ones the CPU."""

MOST_SLOTS = 256
"""That anybody can ask for: no prompt gains by more, and each takes memory."""

CHUNKS_A_WORKER = 2
"""In flight where one processor runs everything: any task suits any worker, and fewer chunks stay in the caches. On two
cores this prefills 512 tokens of SmolLM2-135M 4 % faster than 32 slots do, 1024 tokens 10 %."""


CHUNKS_WITH_LINK = 16
"""In flight where one processor and the link run everything: while some chunks wait for other ranks, others keep the
workers busy. It does not depend on the workers, so that ranks on different machines have equally many: a run that is
stopped on one of them still gets the sums that it waits for."""


def check_chunks_in_flight(number: int) -> None:
    """Raise ConfigError unless so many chunks may be in flight."""
    if not 1 <= number <= MOST_SLOTS:
        raise ConfigError(f"{number} chunks in flight, expected 1 to {MOST_SLOTS}")


def chunk_slots(
    plan: Plan, chunk_length: int, processors: Sequence[Processor], *, num_bytes: int = DEFAULT_SLOT_BYTES
) -> int:
    """Slots that an executor gets.

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
    wanted = max(MOST_CHUNKS_IN_FLIGHT, 1 + workers)
    if len(processors) == 1:
        wanted = CHUNKS_WITH_LINK if has_link else CHUNKS_A_WORKER * workers
    return max(1, min(wanted, num_bytes // BufferLayout(plan, chunk_length).num_bytes))
