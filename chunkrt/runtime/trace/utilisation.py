"""Utilisation of the processors in a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chunkrt.runtime.record import Stage
from chunkrt.runtime.tasks import TaskEvent


@dataclass(frozen=True, kw_only=True)
class Utilisation:
    """Shares of the time between the start of a run's first task and the end of its last task, from 0 to 1.

    Attributes:
        npu_busy, cpu_busy: share of the time in which at least one task of the role ran.
        overlap: share of the time in which at least two tasks of the two roles ran.
    """

    npu_busy: float
    cpu_busy: float
    overlap: float


def utilisation(events: Sequence[TaskEvent], stages: Sequence[Stage]) -> Utilisation:
    """Return the utilisation of the roles during runs of one pipeline. All shares are 0 if no task ran or no time
    passed.
    """
    spans = [(event.start_ns, event.end_ns) for event in events]
    wall_ns = max((end for _, end in spans), default=0) - min((start for start, _ in spans), default=0)

    def share(device: str) -> float:
        own = [s for s, e in zip(spans, events, strict=True) if device_of(e) == device]
        return covered_ns(own, depth=1) / wall_ns

    def device_of(event: TaskEvent) -> str:
        return stages[event.task.subgraph].device

    if wall_ns == 0:
        return Utilisation(npu_busy=0.0, cpu_busy=0.0, overlap=0.0)
    computed = [span for span, event in zip(spans, events, strict=True) if device_of(event) != "link"]
    return Utilisation(npu_busy=share("npu"), cpu_busy=share("cpu"), overlap=covered_ns(computed, depth=2) / wall_ns)


def covered_ns(spans: Sequence[tuple[int, int]], *, depth: int) -> int:
    """Return the time covered by at least `depth` of the (start, end) spans."""
    changes = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    covered = num_open = previous = 0
    for time, change in changes:
        if num_open >= depth:
            covered += time - previous
        num_open += change
        previous = time
    return covered
