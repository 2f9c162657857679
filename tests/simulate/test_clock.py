"""The clock on which tasks slow each other down, on cases that can be worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from fake_backend import make_plan, make_schedule, npu_and_cpu, shared_cpu

from chunkrt.runtime.policy import POLICIES
from chunkrt.runtime.schedule import Schedule
from chunkrt.runtime.tasks import Processor, Task, TaskEvent
from chunkrt.runtime.virtual_clock import run_on_virtual_clock
from chunkrt.simulate.speeds import crowd_speeds, memory_speeds
from chunkrt.simulate.work import Work, cut

ROUNDING_NS = 1


def run(schedule: Schedule, work_of: Callable[[Task], Work], gb_per_s: float) -> list[TaskEvent]:
    return run_on_virtual_clock(schedule, lambda task: work_of(task).ns, memory_speeds(gb_per_s, work_of))


def speeds_of(*num_bytes: float) -> Sequence[float]:
    """Return the speeds of tasks that take 100 ns alone and share 10 GB/s."""
    tasks = [Task(0, chunk) for chunk in range(len(num_bytes))]
    return memory_speeds(10.0, lambda task: Work(100, num_bytes[task.chunk]))(tasks)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(20))
def test_at_full_speed_every_task_takes_its_time_and_starts_when_something_ends(policy: str, seed: int) -> None:
    random = Random(seed)
    plan, chunks = make_plan(random.randint(1, 4)), random.randint(1, 6)
    processors = random.choice((npu_and_cpu, shared_cpu))(random.randint(1, 3))
    durations = {Task(s, c): random.randint(0, 50) for s in range(len(plan.subgraphs)) for c in range(chunks)}
    schedule = make_schedule(plan, chunks, processors=processors, policy=policy)
    events = run_on_virtual_clock(schedule, durations.__getitem__)
    assert len(events) == schedule.num_tasks
    assert all(event.end_ns - event.start_ns == durations[event.task] for event in events)
    assert [event.end_ns for event in events] == sorted(event.end_ns for event in events)
    assert {event.start_ns for event in events} <= {0, *(event.end_ns for event in events)}


def converting_npu(workers: int) -> tuple[Processor, ...]:
    npu, cpu = npu_and_cpu()
    return replace(npu, workers=workers, num_computing=1), cpu


def test_the_conversion_of_a_chunk_overlaps_the_computing_of_the_one_before() -> None:
    """A task on the NPU takes 10 ns for its inputs, 50 for itself and 20 for its outputs; the CPU takes no time."""
    plan = make_plan(1)  # embedding, static.0, dynamic.0, static.1, head
    durations, edges = (0, 80, 0, 80, 0), (10.0, 20.0)

    def events_of(workers: int) -> list[TaskEvent]:
        schedule = make_schedule(plan, 3, processors=converting_npu(workers))
        events = run_on_virtual_clock(schedule, lambda task: durations[task.subgraph], edges=lambda task: edges)
        return [event for event in events if event.processor == "npu"]

    def times(event: TaskEvent) -> tuple[int, ...]:
        assert event.passage is not None
        return event.start_ns, *event.passage, event.end_ns

    one = events_of(1)
    assert [times(event) for event in one] == [(t, t + 10, t + 10, t + 60, t + 80) for t in range(0, 320, 80)]
    two = events_of(2)
    assert [(event.task, times(event)) for event in two] == [
        (Task(1, 0), (0, 10, 10, 60, 80)),
        (Task(1, 1), (0, 10, 60, 110, 130)),
        (Task(1, 2), (80, 90, 110, 160, 180)),
        (Task(3, 2), (180, 190, 190, 240, 260)),
    ]
    computing = sorted((event.passage.began_ns, event.passage.ended_ns) for event in two if event.passage)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(computing))
    assert [event.own_ns for event in two] == [80] * 4
    spans = {span: end - start for span, start, end in two[1].spans}
    assert spans == {"entering": 10, "waiting": 50, "computing": 50, "leaving": 20}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(20))
def test_npu_with_one_call_is_independent_of_the_conversion_share(policy: str, seed: int) -> None:
    random = Random(seed)
    plan, chunks = make_plan(random.randint(1, 4)), random.randint(1, 6)
    durations = {Task(s, c): random.randint(1, 50) for s in range(len(plan.subgraphs)) for c in range(chunks)}
    shares = {}
    for task, total in durations.items():
        entering = random.randint(0, total - 1)
        shares[task] = entering, random.randint(0, total - 1 - entering)
    whole = run_on_virtual_clock(
        make_schedule(plan, chunks, processors=npu_and_cpu(2), policy=policy), durations.__getitem__
    )
    npu, cpu = npu_and_cpu(2)
    schedule = make_schedule(plan, chunks, processors=(replace(npu, num_computing=1), cpu), policy=policy)
    parted = run_on_virtual_clock(schedule, durations.__getitem__, edges=shares.__getitem__)
    assert [event._replace(passage=None) for event in parted] == whole


def test_two_tasks_that_both_stream_all_the_time_take_twice_as_long() -> None:
    plan = make_plan(1)  # embedding, static.0, dynamic.0, static.1, head
    work = {0: Work(0, 0.0), 1: Work(100, 1000.0), 2: Work(100, 1000.0), 3: Work(50, 0.0), 4: Work(10, 0.0)}
    events = run(make_schedule(plan, 2), lambda task: work[task.subgraph], 10.0)
    spans = {event.task: (event.start_ns, event.end_ns) for event in events}
    assert spans[Task(1, 0)] == (0, 100)
    assert spans[Task(1, 1)] == (100, 300)
    assert spans[Task(2, 0)] == (100, 300)
    assert spans[Task(2, 1)] == (300, 400)
    assert spans[Task(3, 1)] == (400, 450)
    assert spans[Task(4, 1)] == (450, 460)
    assert len(events) == 3 + 5  # the first chunk, without logits, ends with its attention


def test_a_task_speeds_up_again_when_the_other_ends() -> None:
    plan = make_plan(1)
    work = {0: Work(0, 0.0), 1: Work(100, 1000.0), 2: Work(30, 300.0), 3: Work(1, 0.0), 4: Work(1, 0.0)}
    events = run(make_schedule(plan, 2), lambda task: work[task.subgraph], 10.0)
    spans = {event.task: (event.start_ns, event.end_ns) for event in events}
    assert spans[Task(2, 0)] == (100, 160)  # 30 ns of work at half speed
    assert spans[Task(1, 1)] == (100, 230)  # 30 ns of its 100 at half speed


def test_memory_bandwidth_is_shared_max_min_fairly() -> None:
    assert speeds_of(1000.0, 200.0, 0.0) == [0.8, 1.0, 1.0]
    assert speeds_of(600.0, 400.0) == [1.0, 1.0]
    assert speeds_of(1000.0, 1000.0) == [0.5, 0.5]


def test_a_crowd_runs_at_the_speed_that_was_measured_for_its_number() -> None:
    speeds = crowd_speeds(lambda task: [1.0, 0.6])
    assert speeds([Task(0, 0)]) == [1.0]
    assert speeds([Task(0, 0)] * 2) == [0.6, 0.6]
    assert speeds([Task(0, 0)] * 3) == [0.6, 0.6, 0.6]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_task_runs_once_and_none_overlaps_another_on_its_worker(policy: str) -> None:
    plan, chunks = make_plan(3), 5
    random = Random(0)
    work = {
        Task(s, c): Work(random.randint(1, 99), random.random() * 2000)
        for s in range(len(plan.subgraphs))
        for c in range(chunks)
    }
    events = run(make_schedule(plan, chunks, processors=npu_and_cpu(2), policy=policy), work.__getitem__, 8.0)
    assert len({event.task for event in events}) == len(events)
    by_worker: dict[tuple[str, int], int] = {}
    for event in sorted(events, key=lambda event: event.start_ns):
        assert event.start_ns >= by_worker.get((event.processor, event.worker), 0)
        assert event.end_ns - event.start_ns >= work[event.task].ns - ROUNDING_NS
        by_worker[event.processor, event.worker] = event.end_ns


def test_a_prompt_is_cut_into_chunks_and_the_last_token_alone_gets_logits() -> None:
    chunks = cut(70, 32)
    assert [chunk.num_tokens for chunk in chunks] == [32, 32, 6]
    assert [chunk.position for chunk in chunks] == [0, 32, 64]
    assert [chunk.num_rows for chunk in chunks] == [0, 0, 1]
    assert sum(chunk.pairs(0) for chunk in chunks) == 70 * 71 // 2
