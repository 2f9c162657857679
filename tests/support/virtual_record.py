"""Records of runs on a virtual clock, for tests of writers and drawings."""

from fake_backend import make_plan

from chunkrt.runtime.policy import find_policy
from chunkrt.runtime.record import Pipeline, RunRecord, stages_of
from chunkrt.runtime.schedule import Schedule
from chunkrt.runtime.virtual_clock import run_on_virtual_clock

PLAN = make_plan(layers=2)


def virtual_record(processors, *, plan=PLAN, num_chunks=4, slots=3, start=10**15, duration=1001, position=0):
    """Return a record whose tasks of one worker touch, at a late time, with odd nanoseconds."""
    schedule = Schedule(
        plan,
        routes=plan.flow.routes(num_chunks, range(num_chunks - 1, num_chunks)),
        chunks_in_flight=slots,
        processors=processors,
        policy=find_policy("in_order"),
    )
    events = [
        e._replace(start_ns=start + e.start_ns, end_ns=start + e.end_ns)
        for e in run_on_virtual_clock(schedule, lambda task: duration * (task.subgraph * 3 + task.chunk))
    ]
    pipeline = Pipeline(
        stages=stages_of(plan),
        processors=tuple(processors),
        policy="in_order",
        chunk_length=8,
        num_slots=slots,
        slot_bytes=500,
    )
    return RunRecord(
        pipeline=pipeline,
        num_tokens=8 * num_chunks - 3,
        position=position,
        position_bytes=24,
        start_ns=start,
        end_ns=max(event.end_ns for event in events) + 7,
        events=events,
    )
