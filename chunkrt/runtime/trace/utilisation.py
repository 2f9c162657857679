"""Utilisation of the processors, and of the link between ranks, in a run."""

from __future__ import annotations

from collections.abc import Sequence

from chunkrt.graph.plan import Device
from chunkrt.runtime.record import RunRecord
from chunkrt.runtime.trace.shared import joined


def utilisation(records: Sequence[RunRecord]) -> dict[str, float]:
    """Return the utilisation of the roles during some runs.

    Returns:
        Shares of the time between the start of the first task and the end of the last task, from 0 to 1: "npu_busy" and
        "cpu_busy", in which at least one task of the role ran, and "overlap", in which at least two tasks of the two
        roles ran. All shares are 0 if no task ran or no time passed.
    """
    spans: dict[Device, list[tuple[int, int]]] = {"npu": [], "cpu": [], "link": []}
    for record in records:
        for event in record.events:
            spans[record.pipeline.stages[event.task.subgraph].device].append((event.start_ns, event.end_ns))
    moments = [moment for of_device in spans.values() for span in of_device for moment in span]
    wall_ns = max(moments, default=0) - min(moments, default=0)
    if wall_ns == 0:
        return {"npu_busy": 0.0, "cpu_busy": 0.0, "overlap": 0.0}
    return {
        "npu_busy": covered_ns(spans["npu"], depth=1) / wall_ns,
        "cpu_busy": covered_ns(spans["cpu"], depth=1) / wall_ns,
        "overlap": covered_ns(spans["npu"] + spans["cpu"], depth=2) / wall_ns,
    }


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


def link_time(records: Sequence[RunRecord]) -> dict[str, float] | None:
    """Return the times of sums over some runs, or None if the runs contain no sums over ranks.

    Returns:
        "busy_ns": nanoseconds during which at least one sum was in progress; "hidden_ns": the part during which at
        least one other task ran; "num_sums": the number of sums; "hidden": the hidden share of the busy time, 0 to 1,
        which is 1 if no sum took any time.
    """
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
    if not num_sums:
        return None
    hidden = hidden_ns / busy_ns if busy_ns else 1.0
    return {"busy_ns": busy_ns, "hidden_ns": hidden_ns, "num_sums": num_sums, "hidden": hidden}


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge spans into spans that do not overlap."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined
