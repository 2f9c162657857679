"""Utilisation figures."""

from __future__ import annotations

import pytest
from fake_backend import make_plan
from hypothesis import given
from hypothesis import strategies as st
from virtual_record import make_record

from chunkrt.runtime.record import RunRecord
from chunkrt.runtime.tasks import Task, TaskEvent
from chunkrt.runtime.trace.utilisation import covered_ns, utilisation

PLAN = make_plan(layers=1)
CPU, NPU = 0, 1
"""Indices of a CPU and of an NPU subgraph in PLAN."""


def event(subgraph: int, start: int, end: int) -> TaskEvent:
    return TaskEvent(Task(subgraph, 0), "any", 0, start, end)


def record_of(events: list[TaskEvent]) -> RunRecord:
    return make_record(events, [], PLAN, num_tokens=1, slots=1)


def test_utilisation_of_a_small_run() -> None:
    events = [event(CPU, 100, 110), event(NPU, 110, 150), event(CPU, 130, 170), event(CPU, 140, 160)]
    assert utilisation([record_of(events)]) == {"npu_busy": 40 / 70, "cpu_busy": 50 / 70, "overlap": 30 / 70}


def test_utilisation_of_adjacent_tasks_has_no_overlap() -> None:
    events = [event(CPU, 0, 5), event(NPU, 5, 10)]
    assert utilisation([record_of(events)]) == {"npu_busy": 0.5, "cpu_busy": 0.5, "overlap": 0.0}


@pytest.mark.parametrize("events", [[], [event(CPU, 3, 3)]])
def test_utilisation_of_nothing_is_zero(events: list[TaskEvent]) -> None:
    assert utilisation([record_of(events)]) == {"npu_busy": 0.0, "cpu_busy": 0.0, "overlap": 0.0}


@given(
    spans=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted).map(tuple), max_size=8),
    depth=st.integers(1, 3),
)
def test_covered_ns_counts_time_at_a_depth(spans: list[tuple[int, int]], depth: int) -> None:
    moments = [sum(start <= t < end for start, end in spans) for t in range(30)]
    assert covered_ns(spans, depth=depth) == sum(count >= depth for count in moments)
