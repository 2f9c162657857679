"""The link's time: the duration of sums over ranks, and the part of it that overlaps with other work.

A sum is in progress from the moment this rank has its own part until it has the total. This time includes the wait for
slower ranks, which the events of one rank cannot distinguish from the transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chunkrt.runtime.record import RunRecord
from chunkrt.runtime.trace.shared import joined
from chunkrt.runtime.trace.utilisation import covered_ns


@dataclass(frozen=True, kw_only=True)
class LinkTime:
    """Times of sums over some runs.

    Attributes:
        busy_ns: nanoseconds during which at least one sum was in progress.
        hidden_ns: the part of `busy_ns` during which at least one other task ran.
        num_sums: number of sums.
    """

    busy_ns: int
    hidden_ns: int
    num_sums: int

    @property
    def hidden(self) -> float:
        """Hidden share of the busy time, 0 to 1. It is 1 if no sum took any time."""
        return self.hidden_ns / self.busy_ns if self.busy_ns else 1.0


def link_time(records: Sequence[RunRecord]) -> LinkTime | None:
    """Return the link's time over some runs, or None if the runs contain no sums over ranks."""
    busy_ns = hidden_ns = num_sums = 0
    for record in joined(records):
        spans: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        for event in record.events:
            is_sum = record.pipeline.stages[event.task.subgraph].device == "link"
            spans[is_sum].append((event.start_ns, event.end_ns))
        sums, others = _joined(spans[True]), _joined(spans[False])
        busy_ns += covered_ns(sums, depth=1)
        hidden_ns += covered_ns(sums + others, depth=2)
        num_sums += len(spans[True])
    return LinkTime(busy_ns=busy_ns, hidden_ns=hidden_ns, num_sums=num_sums) if num_sums else None


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge spans into spans that do not overlap."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined
