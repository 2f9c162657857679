"""The link's time: the duration of sums over ranks, and the part of it that overlaps with other work.

A sum is in progress from the moment when this rank has its part to the moment when it has the total. That includes the
time in which it waits for slower ranks; one rank's events cannot distinguish the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chunkrt.runtime.record import RunRecord
from chunkrt.runtime.trace.shared import joined
from chunkrt.runtime.trace.utilisation import covered_ns


@dataclass(frozen=True, kw_only=True)
class LinkTime:
    """Times of some runs in nanoseconds. `busy_ns`: at least one sum was in progress. `hidden_ns`: the part of it
    during which at least one other task ran, so that the sum cost nothing. `num_sums`: number of sums."""

    busy_ns: int
    hidden_ns: int
    num_sums: int

    @property
    def hidden(self) -> float:
        """Hidden share of the time, 0 to 1; 1 if there was none."""
        return self.hidden_ns / self.busy_ns if self.busy_ns else 1.0


def link_time(records: Sequence[RunRecord]) -> LinkTime | None:
    """Return the link's time over some runs; None if they have no sums over ranks."""
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
