"""Records of runs on a virtual clock, for tests of writers and drawings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fake_backend import make_plan, make_schedule

from chunkrt.graph.plan import Plan
from chunkrt.runtime.record import Pipeline, RunRecord, stages_of
from chunkrt.runtime.tasks import Processor, TaskEvent
from chunkrt.runtime.virtual_clock import run_on_virtual_clock

PLAN = make_plan(layers=2)


def make_record(
    events: Sequence[TaskEvent],
    processors: Sequence[Processor],
    plan: Plan,
    *,
    num_tokens: int,
    slots: int,
    chunk_length: int = 8,
    policy: str = "in_order",
    **fields: Any,
) -> RunRecord:
    """Return the record of a run that begins at 0 and ends with its last event; `fields` replaces others."""
    pipeline = Pipeline(
        stages=stages_of(plan),
        processors=tuple(processors),
        policy=policy,
        chunk_length=chunk_length,
        num_slots=slots,
        slot_bytes=500,
    )
    others = {
        "position": 0,
        "position_bytes": 24,
        "start_ns": 0,
        "end_ns": max((event.end_ns for event in events), default=0),
    }
    return RunRecord(pipeline=pipeline, num_tokens=num_tokens, events=events, **others | fields)


def virtual_record(processors, *, plan=PLAN, num_chunks=4, slots=3, start=10**15, duration=1001, position=0):
    """Return a record whose tasks of one worker touch, at a late time, with odd nanoseconds."""
    schedule = make_schedule(plan, num_chunks, in_flight=slots, processors=processors)
    events = [
        e._replace(start_ns=start + e.start_ns, end_ns=start + e.end_ns)
        for e in run_on_virtual_clock(schedule, lambda task: duration * (task.subgraph * 3 + task.chunk))
    ]
    end = max(event.end_ns for event in events) + 7
    times = {"start_ns": start, "end_ns": end, "position": position}
    return make_record(events, processors, plan, num_tokens=8 * num_chunks - 3, slots=slots, **times)
