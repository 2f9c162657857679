"""The schedule and the policies on a virtual clock: the exact order of events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import pytest
from fake_backend import make_plan, make_schedule, npu_and_cpu, shared_cpu, subgraph
from hypothesis import given
from hypothesis import strategies as st

from chunkrt.errors import ConfigError
from chunkrt.graph.plan import Plan
from chunkrt.runtime.policy import POLICIES, Policy, find_policy
from chunkrt.runtime.schedule import Schedule
from chunkrt.runtime.tasks import Processor, Task
from chunkrt.runtime.virtual_clock import run_on_virtual_clock

Span = tuple[int, int, str, Task]
"""(start, end, processor, task)"""


def simulate(schedule: Schedule, duration: Callable[[Task], int] = lambda task: 1) -> list[Span]:
    """Return the tasks in the order of their starts; those with the same start in the order of their ends."""
    events = sorted(run_on_virtual_clock(schedule, duration), key=lambda event: event.start_ns)
    return [(e.start_ns, e.end_ns, e.processor, e.task) for e in events]


def lines(plan: Plan, spans: Sequence[Span]) -> list[str]:
    """Return one line for each task: "start-end processor subgraph/chunk"."""
    return [f"{s}-{e} {name} {plan.subgraphs[t.subgraph].name}/{t.chunk}" for s, e, name, t in spans]


def test_sequential_runs_chunk_after_chunk() -> None:
    plan = make_plan(layers=1)
    spans = simulate(make_schedule(plan, 2, policy="sequential"))
    assert lines(plan, spans) == [
        "0-1 cpu embedding/0",
        "1-2 npu static.0/0",
        "2-3 cpu dynamic.0/0",
        "3-4 cpu embedding/1",
        "4-5 npu static.0/1",
        "5-6 cpu dynamic.0/1",
        "6-7 npu static.1/1",
        "7-8 cpu head/1",
    ]


def test_workers_of_both_roles_share_static_subgraphs() -> None:
    plan = make_plan(layers=1)
    spans = simulate(make_schedule(plan, 2, all_logits=True, processors=shared_cpu(2)))
    assert lines(plan, spans) == [
        "0-1 cpu embedding/0",
        "0-1 cpu embedding/1",
        "1-2 cpu static.0/0",
        "1-2 cpu static.0/1",
        "2-3 cpu dynamic.0/0",
        "3-4 cpu static.1/0",
        "3-4 cpu dynamic.0/1",
        "4-5 cpu head/0",
        "4-5 cpu static.1/1",
        "5-6 cpu head/1",
    ]


def test_overtaking_chunk_frees_its_own_slot() -> None:
    plan = make_plan(layers=1)
    schedule = make_schedule(plan, 3, in_flight=2, all_logits=True, processors=shared_cpu(2))
    slow = Task(3, 0)
    spans = simulate(schedule, lambda task: 20 if task == slow else 1)
    assert [schedule.slot(chunk) for chunk in range(3)] == [0, 1, 1]
    ends = {task: end for _, end, _, task in spans}
    assert ends[Task(4, 2)] < ends[slow]


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_decoder_of_one_subgraph_takes_chunk_after_chunk(in_flight: int) -> None:
    whole = subgraph("whole", "cpu", ["input_ids"], ["hidden"], state=["cache"])
    head = subgraph("head", "cpu", ["hidden", "logit_rows"], ["logits"], rows="R")
    plan = replace(make_plan(), subgraphs=(whole, head))
    schedule = make_schedule(plan, 3, in_flight=in_flight, processors=shared_cpu(2))
    tasks = [(start, task) for start, _, _, task in simulate(schedule)]
    assert tasks == [(0, Task(0, 0)), (1, Task(0, 1)), (2, Task(0, 2)), (3, Task(1, 2))]


def test_failed_chunk_ends_and_later_chunks_continue() -> None:
    schedule = make_schedule(make_plan(), 3)
    assert schedule.claim(shared_cpu(2)[0]) == Task(0, 0)
    error = RuntimeError("lost")
    schedule.fail(Task(0, 0), error)
    assert schedule.ended == [(0, (Task(0, 0), error))]
    spans = simulate(schedule)
    assert {task.chunk for *_, task in spans} == {1, 2}
    assert [number for number, failure in schedule.ended if failure is None] == [1, 2]


@pytest.mark.parametrize("slots", [1, 3, 9])
@pytest.mark.parametrize("num_steps", [0, 1, 7, 18])
def test_recalled_chunks_have_not_begun_and_the_others_end(slots: int, num_steps: int) -> None:
    schedule, begun = make_schedule(make_plan(), 8, in_flight=slots, processors=shared_cpu(1)), set[int]()
    for _ in range(num_steps):
        task = schedule.claim(shared_cpu(1)[0])
        assert task is not None
        begun.add(task.chunk)
        schedule.complete(task)
    num_left = schedule.recall()
    assert num_left == max(begun, default=-1) + 1
    simulate(schedule)
    assert [number for number, _ in schedule.ended] == list(range(num_left))


def test_task_that_ends_after_cancelling_unlocks_nothing() -> None:
    schedule = make_schedule(make_plan(), 4)
    task = schedule.claim(shared_cpu(1)[0])
    assert task is not None
    schedule.cancel()
    schedule.complete(task)
    assert schedule.is_finished
    assert not schedule.ready
    assert schedule.chunks_done == 0


class _Choosing:
    name = "choosing"
    is_concurrent = True

    def __init__(self, choose: Callable[[], object]) -> None:
        self._choose = choose

    def select(self, ready: Sequence[Task], schedule: Schedule) -> Task | None:
        return cast(Task, self._choose())


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (lambda: Task(99, 0), r"'choosing' chose Task\(subgraph=99, chunk=0\), which is not ready"),
        (lambda: 7, "'choosing' chose 7, which is not ready"),
        (lambda: None, "'choosing' chose none of 1 ready tasks while none runs"),
        (lambda: 1 / 0, "'choosing' failed: ZeroDivisionError: division by zero"),
    ],
)
def test_policy_errors_name_the_policy(choose: Callable[[], object], message: str) -> None:
    schedule = Schedule(
        make_plan(),
        routes=make_plan().flow.routes(1, ()),
        chunks_in_flight=1,
        processors=npu_and_cpu(),
        policy=_Choosing(choose),
    )
    with pytest.raises(ConfigError, match=message):
        schedule.claim(npu_and_cpu()[1])
    assert not schedule.running


class _Adversary:
    """Policy that follows a drawn list, so that every order that the rules allow can occur."""

    name = "adversary"
    is_concurrent = True

    def __init__(self, choices: Sequence[int]) -> None:
        self._choices = list(choices)

    def select(self, ready: Sequence[Task], schedule: Schedule) -> Task | None:
        choice = self._choices.pop() if self._choices else 0
        return ready[choice % len(ready)]


@given(
    layers=st.integers(1, 3),
    shadowed=st.integers(0, 4),
    num_chunks=st.integers(1, 5),
    in_flight=st.integers(1, 6),
    all_logits=st.booleans(),
    workers=st.integers(1, 3),
    is_shared=st.booleans(),
    policy=st.one_of(
        st.sampled_from(sorted(POLICIES)).map(find_policy),
        st.lists(st.integers(0, 5), max_size=60).map(_Adversary),
    ),
    durations=st.lists(st.integers(0, 5), min_size=7, max_size=7),
)
def test_every_task_runs_once_and_the_rules_hold(
    layers: int,
    shadowed: int,
    num_chunks: int,
    in_flight: int,
    all_logits: bool,
    workers: int,
    is_shared: bool,
    policy: Policy,
    durations: list[int],
) -> None:
    plan = make_plan(layers, shadowed=shadowed)
    processors = shared_cpu(workers) if is_shared else npu_and_cpu(workers)
    options = {"policy": policy, "in_flight": in_flight, "all_logits": all_logits, "processors": processors}
    schedule = make_schedule(plan, num_chunks, **options)
    spans = simulate(schedule, lambda task: durations[sum(task) % 7])
    last_state = max(i for i, part in enumerate(plan.subgraphs) if part.state)
    has_logits = [all_logits or chunk == num_chunks - 1 for chunk in range(num_chunks)]
    lengths = [len(plan.subgraphs) if wanted else last_state + 1 for wanted in has_logits]
    expected = [Task(s, chunk) for chunk in range(num_chunks) for s in range(lengths[chunk])]
    assert sorted(task for *_, task in spans) == sorted(expected)
    times = {task: (start, end) for start, end, _, task in spans}
    for task, (start, _) in times.items():
        for index, source in enumerate(plan.subgraphs):
            if set(source.outputs) & set(plan.subgraphs[task.subgraph].inputs):
                assert times[Task(index, task.chunk)][1] <= start
        if plan.subgraphs[task.subgraph].state and task.chunk > 0:
            assert times[Task(task.subgraph, task.chunk - 1)][1] <= start
    for chunk in range(num_chunks):
        entered = times[Task(0, chunk)][0]
        ended = [max(times[Task(s, c)][1] for s in range(lengths[c])) for c in range(chunk)]
        assert sum(end > entered for end in ended) < in_flight


@given(
    choices=st.lists(st.integers(0, 5), max_size=60),
    shadowed=st.integers(0, 3),
    in_flight=st.integers(1, 4),
    all_logits=st.booleans(),
    is_headless=st.booleans(),
)
def test_unlocked_by_equals_the_tasks_that_complete_adds(
    choices: list[int], shadowed: int, in_flight: int, all_logits: bool, is_headless: bool
) -> None:
    """Also if a chunk begins and ends with state, so that its end passes on both its turn and its slot."""
    plan = make_plan(2, shadowed=shadowed)
    if is_headless:
        first = replace(plan.subgraphs[0], state=("cache.0",))
        second = subgraph("second", "cpu", ["input_ids"], ["qkv.0"], state=["cache.1"])
        plan = replace(plan, subgraphs=(first, second))
    schedule = Schedule(
        plan,
        routes=plan.flow.routes(4, range(4) if all_logits else ()),
        chunks_in_flight=in_flight,
        processors=shared_cpu(1),
        policy=_Adversary(choices),
    )
    (everyone,) = schedule.processors
    while (task := schedule.claim(everyone)) is not None:
        unlocked = schedule.unlocked_by(task)
        expected = sorted([*schedule.ready, *unlocked])
        schedule.complete(task)
        assert sorted(schedule.ready) == expected
    assert schedule.chunks_done == 4


FORK = make_plan(layers=1, shadowed=1)
"""embedding, static.0, linear.0 and shadow.0 at once, join.0, dynamic.0, static.1, head."""

FORK_TIMES = {"embedding": 1, "static": 1, "linear": 3, "shadow": 2, "join": 1, "dynamic": 2, "head": 1}


def fork_lines(policy: str, num_chunks: int) -> list[str]:
    schedule = make_schedule(FORK, num_chunks, policy=policy)
    times = [FORK_TIMES[part.name.partition(".")[0]] for part in FORK.subgraphs]
    return lines(FORK, simulate(schedule, lambda task: times[task.subgraph]))


def test_independent_tasks_of_one_chunk_run_at_once() -> None:
    expected = [
        "0-1 cpu embedding/0",
        "1-2 npu static.0/0",
        "2-4 cpu shadow.0/0",
        "2-5 npu linear.0/0",
        "5-6 npu join.0/0",
        "6-8 cpu dynamic.0/0",
        "8-9 npu static.1/0",
        "9-10 cpu head/0",
    ]
    for policy in POLICIES:
        if policy != "sequential":
            assert fork_lines(policy, 1) == expected, policy


def test_sequential_runs_one_side_of_a_fork_after_the_other() -> None:
    assert fork_lines("sequential", 1) == [
        "0-1 cpu embedding/0",
        "1-2 npu static.0/0",
        "2-5 npu linear.0/0",
        "5-7 cpu shadow.0/0",
        "7-8 npu join.0/0",
        "8-10 cpu dynamic.0/0",
        "10-11 npu static.1/0",
        "11-12 cpu head/0",
    ]


def test_chunk_without_requested_logits_omits_stateless_stages() -> None:
    aside = subgraph("aside", "cpu", ["narrow.0"], ["aside"])
    plan = replace(FORK, subgraphs=(*FORK.subgraphs[:3], aside, *FORK.subgraphs[3:]))
    passed = {task for *_, task in simulate(make_schedule(plan, 2))}
    assert {plan.subgraphs[s].name for s, chunk in passed if chunk == 1} == {part.name for part in plan.subgraphs}
    assert {plan.subgraphs[s].name for s, chunk in passed if chunk == 0} == {
        "embedding",
        "static.0",
        "linear.0",
        "shadow.0",
        "join.0",
        "dynamic.0",
    }


def test_devices_are_handed_out_to_their_processors() -> None:
    """One processor runs both roles, the other only the NPU's."""
    both = Processor(name="both", devices=frozenset({"npu", "cpu"}), workers=1)
    npu = Processor(name="npu", devices=frozenset({"npu"}), workers=1)
    schedule = make_schedule(FORK, 2, processors=[both, npu])
    assert schedule.claim(npu) is None
    assert (schedule.num_ready(both), schedule.num_ready(npu)) == (2, 0)
    schedule.claim(both)
    schedule.claim(both)
    schedule.complete(Task(0, 0))
    schedule.complete(Task(0, 1))
    assert (schedule.num_ready(both), schedule.num_ready(npu)) == (2, 2)
    assert schedule.claim(npu) == Task(1, 0)
    assert schedule.claim(both) == Task(1, 1)
