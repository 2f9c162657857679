"""Chunk slots: the number of chunks that may be in flight, bounded by their memory."""

from __future__ import annotations

from collections.abc import Sequence

from chunkrt.errors import ConfigError
from chunkrt.graph.plan import Plan
from chunkrt.runtime.buffers import BufferLayout
from chunkrt.runtime.tasks import Processor

DEFAULT_SLOT_BYTES = 64 * 1024 * 1024
"""Bytes that the buffers of all slots may take. A chunk of 32 tokens takes 0.3 MB for SmolLM2-135M, 3 MB for
Llama-2-7B."""

MOST_CHUNKS_IN_FLIGHT = 32
"""Number of slots where memory would allow more: a prompt of 1024 tokens in chunks of 32. Slots help most if they hold
the complete prompt: attention takes longer as the position grows, so early chunks keep the NPU busy and late ones the
CPU."""

MOST_SLOTS = 256
"""Largest number of slots that can be requested: no prompt gains from more, and each takes memory."""

CHUNKS_A_WORKER = 2
"""Chunks in flight per worker if one processor runs everything: any task suits any worker, and fewer chunks stay in the
CPU caches. On two cores this prefills 512 tokens of SmolLM2-135M 4 % faster than 32 slots do, 1024 tokens 10 %."""


CHUNKS_WITH_LINK = 16
"""Chunks in flight if one processor and the link run everything: while some chunks wait for other ranks, others keep
the workers busy. The number does not depend on the workers, so ranks on different machines have the same number: a run
that is stopped on one rank still gets the sums that it waits for."""


def check_chunks_in_flight(number: int) -> None:
    """Raise ConfigError unless this many chunks may be in flight."""
    if not 1 <= number <= MOST_SLOTS:
        raise ConfigError(f"{number} chunks in flight, expected 1 to {MOST_SLOTS}")


def chunk_slots(
    plan: Plan, chunk_length: int, processors: Sequence[Processor], *, num_bytes: int = DEFAULT_SLOT_BYTES
) -> int:
    """Return the number of slots of an executor.

    With one slot more than workers all workers can be busy; more slots let a policy keep them busy. The memory bound
    takes precedence: the number of slots never exceeds it. Memory is committed as it is used, so a short prompt takes
    less.

    Args:
        plan: the decoder.
        chunk_length: C.
        processors: processors that run tasks, except the link's workers.
        num_bytes: bytes that the slots may take together.

    Returns:
        At least 1, even if one slot exceeds `num_bytes`.
    """
    workers = sum(processor.workers for processor in processors)
    has_link = any(subgraph.device == "link" for subgraph in plan.subgraphs)
    wanted = max(MOST_CHUNKS_IN_FLIGHT, 1 + workers)
    if len(processors) == 1:
        wanted = CHUNKS_WITH_LINK if has_link else CHUNKS_A_WORKER * workers
    return max(1, min(wanted, num_bytes // BufferLayout(plan, chunk_length).num_bytes))
