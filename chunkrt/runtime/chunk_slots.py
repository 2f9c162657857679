"""Chunk slots: the number of chunks that may be in flight, bounded by their memory."""

from __future__ import annotations

from collections.abc import Sequence

from chunkrt.errors import ConfigError
from chunkrt.graph.plan import Plan
from chunkrt.runtime.buffers import BufferLayout
from chunkrt.runtime.tasks import Processor

DEFAULT_SLOT_BYTES = 64 * 1024 * 1024
"""Maximum number of bytes of the buffers of all slots. A chunk of 32 tokens takes 0.3 MB for SmolLM2-135M, 3 MB for
Llama-2-7B.
"""

MOST_CHUNKS_IN_FLIGHT = 32
"""Maximum number of slots even if memory allows more: enough for a prompt of 1024 tokens in chunks of 32. Slots help
most if they can contain the complete prompt: attention takes longer as the position grows, so early chunks keep the NPU
busy and late chunks the CPU.
"""

MOST_SLOTS = 256
"""Largest number of slots that can be requested. No prompt gains from more slots, and every slot takes memory."""

CHUNKS_A_WORKER = 2
"""Chunks in flight per worker if one processor runs all tasks. Any worker can then execute any task, and the data of
few chunks stay in the CPU caches. On two cores this prefills 512 tokens of SmolLM2-135M 4 % faster than 32 slots, and
1024 tokens 10 % faster.
"""


CHUNKS_WITH_LINK = 16
"""Chunks in flight if one processor and the link run all tasks: while some chunks wait for other ranks, others keep the
workers busy. The number does not depend on the number of workers, so it is the same for ranks on different machines.
This ensures that a run that is stopped on one rank still receives the sums that it waits for.
"""


def check_chunks_in_flight(number: int) -> None:
    """Raise ConfigError unless the number of chunks in flight is allowed."""
    if not 1 <= number <= MOST_SLOTS:
        raise ConfigError(f"{number} chunks in flight, expected 1 to {MOST_SLOTS}")


def chunk_slots(
    plan: Plan, chunk_length: int, processors: Sequence[Processor], *, num_bytes: int = DEFAULT_SLOT_BYTES
) -> int:
    """Return the number of slots of an executor.

    All workers can be busy if there is one more slot than workers; with more slots a policy can keep them busy. The
    memory limit takes precedence. Memory is committed when it is used, so a short prompt takes less.

    Args:
        plan: the decoder.
        chunk_length: C.
        processors: the processors that run tasks, without the link.
        num_bytes: maximum number of bytes of all slots.

    Returns:
        The number of slots. It is at least 1, even if one slot exceeds `num_bytes`.
    """
    workers = sum(processor.workers for processor in processors)
    has_link = any(subgraph.device == "link" for subgraph in plan.subgraphs)
    wanted = max(MOST_CHUNKS_IN_FLIGHT, 1 + workers)
    if len(processors) == 1:
        wanted = CHUNKS_WITH_LINK if has_link else CHUNKS_A_WORKER * workers
    return max(1, min(wanted, num_bytes // BufferLayout(plan, chunk_length).num_bytes))
