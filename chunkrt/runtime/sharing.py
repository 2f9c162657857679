"""Choose the executor for the next tokens of runs that share chunks."""

from __future__ import annotations

from collections.abc import Sequence

from chunkrt.runtime.executor import Executor
from chunkrt.runtime.lanes import Lanes
from chunkrt.runtime.ticket import Ticket


def for_stream(lanes: Lanes, waiting: Sequence[Ticket]) -> list[Ticket]:
    """Return the tickets whose next tokens go into the open stream, where chunks overlap."""
    return _beside_decoding(lanes, _far(lanes, waiting)) if lanes.overlaps else []


def for_thread(lanes: Lanes, waiting: Sequence[Ticket], last: Executor | None) -> tuple[list[Ticket], Executor] | None:
    """Return the tickets for the next chunk outside the open stream, and the executor of this chunk.

    A single thread computes such chunks. If several executors have tickets, the executors take turns: the executor
    after `last` comes next. Return None if no ticket waits.
    """
    far = _far(lanes, waiting)
    others = _beside_decoding(lanes, far)
    decoding = [ticket for ticket in far if ticket not in others]
    by_thread = [] if lanes.overlaps else others
    groups = [(decoding, lanes.few)]
    for lane in lanes.near:
        own = [t for t in waiting if _near(lanes, t) is lane or (lane is lanes.many and t in by_thread)]
        groups.append((own, lane))
    if lanes.many not in lanes.near:
        groups.append((by_thread, lanes.many))
    start = next((index + 1 for index, (_, lane) in enumerate(groups) if lane is last), 0)
    return next((group for group in (*groups[start:], *groups[:start]) if group[0]), None)


def _near(lanes: Lanes, ticket: Ticket) -> Executor | None:
    job = ticket.job
    return lanes.near_to(job.run, job.position + job.num_taken)


def _far(lanes: Lanes, waiting: Sequence[Ticket]) -> list[Ticket]:
    """Return the tickets whose history exceeds the reach of the near executors."""
    return [ticket for ticket in waiting if _near(lanes, ticket) is None]


def _beside_decoding(lanes: Lanes, waiting: Sequence[Ticket]) -> list[Ticket]:
    """Return all tickets, without decoding ones if single tokens are computed by a separate executor."""
    if lanes.many is lanes.few:
        return list(waiting)
    is_apart = lanes.decode_apart([ticket.job.position for ticket in waiting if ticket.waiting.is_decode])
    return [ticket for ticket in waiting if not (is_apart and ticket.waiting.is_decode)]
