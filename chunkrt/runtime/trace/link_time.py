"""The link's time: how long sums over ranks were under way, and how much of that the other processors hid.

A sum is under way from the moment when this rank has its part to the moment when it has the whole. That holds the time
in which it waits for ranks that are behind; one rank's events cannot tell the two apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chunkrt.runtime.record import RunRecord
from chunkrt.runtime.trace.shared import joined
from chunkrt.runtime.trace.utilisation import covered_ns


@dataclass(frozen=True, kw_only=True)
class LinkTime:
    """Nanoseconds of some runs. `busy_ns`: at least one sum was under way. `hidden_ns`: of these, while at least one
    other task ran, so that the sum cost nothing. `num_sums`: how many there were."""

    busy_ns: int
    hidden_ns: int
    num_sums: int

    @property
    def hidden(self) -> float:
        """The share that was hidden, 0 to 1; of no time, all was."""
        return self.hidden_ns / self.busy_ns if self.busy_ns else 1.0


def link_time(records: Sequence[RunRecord]) -> LinkTime | None:
    """The link's time over some runs; None if they have no sums over ranks."""
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
    """The same time, in spans that do not overlap."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined
