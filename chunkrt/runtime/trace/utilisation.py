"""Utilisation of the processors in a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chunkrt.runtime.record import Stage
from chunkrt.runtime.tasks import TaskEvent


@dataclass(frozen=True, kw_only=True)
class Utilisation:
    """Shares of the time between a run's first start and last end, each from 0 to 1.

    `npu_busy` and `cpu_busy`: at least one task of that role ran. `overlap`: at least two tasks of these ran.
    """

    npu_busy: float
    cpu_busy: float
    overlap: float


def utilisation(events: Sequence[TaskEvent], stages: Sequence[Stage]) -> Utilisation:
    """Return how busy the roles were during runs of one pipeline; all zero if nothing ran or no time passed."""
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
    """Return the time during which at least `depth` of the (start, end) spans are open."""
    changes = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    covered = num_open = previous = 0
    for time, change in changes:
        if num_open >= depth:
            covered += time - previous
        num_open += change
        previous = time
    return covered
