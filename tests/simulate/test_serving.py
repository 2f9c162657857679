"""Serving, simulated: cases worked out by hand, laws of queues, and invariants of any server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_backend import make_plan, shared_cpu
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_profiles import toy_profile
from small_shape import SMALL_SHAPE
from trace_checker import CheckedTrace

from chunkrt.errors import ConfigError
from chunkrt.graph.plan import Plan
from chunkrt.graph.rewrites import merged_on_cpu
from chunkrt.quant.scheme import find_scheme
from chunkrt.runtime.policy import POLICIES, find_policy
from chunkrt.runtime.record import RunRecord
from chunkrt.runtime.schedule import Schedule
from chunkrt.runtime.trace.file import read_trace, write_trace
from chunkrt.runtime.trace.idle import where_time_went
from chunkrt.runtime.trace.shared import packing
from chunkrt.runtime.virtual_clock import at_full_speed, run_on_virtual_clock
from chunkrt.simulate import DeviceProfile, MeasuredProfile, find_device
from chunkrt.simulate.arrivals import Load, SimulatedRequest, draw
from chunkrt.simulate.measured import SubgraphCost
from chunkrt.simulate.serving import Serving, serve, simulate_serving
from chunkrt.simulate.serving_costs import ServingCosts, Way, never
from chunkrt.simulate.work import ChunkWork, ModelledWork, Work

MS = 10**6
TASK_MS = 10
C = 8
PLAN = make_plan(layers=1)
"""A chunk takes 5 tasks if it has logits, else 3."""

SMALL = replace(SMALL_SHAPE, num_layers=2).plan()
DEVICE = find_device("sd8gen3")
assert isinstance(DEVICE, DeviceProfile)


def constant(plan: Plan = PLAN, task_ms: float = TASK_MS) -> ServingCosts:
    """One worker, and tasks that take equally long regardless of their content."""
    return ServingCosts(
        plan=plan,
        ways={"cpu": Way(plan=plan, first=0, processors=shared_cpu(1))},
        processors=shared_cpu(1),
        prompt_ns=0.0,
        chunks=[],
        work_of=lambda task: Work(round(task_ms * MS), 0.0),
        speeds=at_full_speed,
        decodes_apart=never,
    )


def served(requests: Sequence[SimulatedRequest], *, costs: ServingCosts | None = None, **changes: Any) -> Serving:
    options: dict[str, Any] = {"batcher": "packed", "policy": "in_order", "chunk_length": C, "sessions": 8}
    options |= {"chunks_in_flight": 1} | changes
    return serve(costs or constant(), Load(requests=requests, num_cut=0), **options)


def asked(at_ms: float | None, prompt: int, generate: int) -> SimulatedRequest:
    return SimulatedRequest(arrival_ns=None if at_ms is None else at_ms * MS, prompt=prompt, generate=generate)


TWO = [asked(0, 10, 3), asked(20, 4, 1)]


def rows_of(found: Serving) -> list[list[tuple[int, int, int]]]:
    """Return the segments of every chunk: sequence, position, tokens."""
    chunks = {chunk.number: chunk for record in found.records() for chunk in record.chunks}
    return [[tuple(segment) for segment in chunks[number].segments] for number in sorted(chunks)]


def test_two_requests_by_hand() -> None:
    """0 to 30: 8 tokens of the first; to 80: its last 2 and the second prompt; then its two further tokens."""
    found = served(TWO)
    assert rows_of(found) == [[(0, 0, 8)], [(0, 8, 2), (1, 0, 4)], [(0, 10, 1)], [(0, 11, 1)]]
    assert found.time_to_first_token_ms == pytest.approx((70, 70, 79))  # 80 and 60
    assert found.gap_ms == pytest.approx((50, 50, 50))
    assert found.queue_ms == pytest.approx((0, 0, 0))
    assert (found.seconds, found.chunks, found.rows_per_chunk, found.packed) == (pytest.approx(0.18), 4, 4.0, 0.25)
    assert found.prompt_tokens_per_s == pytest.approx(14 / 0.18)
    assert found.generated_tokens_per_s == pytest.approx(4 / 0.18)
    assert found.busy == {"cpu": pytest.approx(1.0)}
    assert (found.padding, found.on_cpu) == (None, 1.0)


def test_admission_wait_counts_into_time_to_first_token() -> None:
    found = served(TWO, sessions=1)
    assert rows_of(found) == [[(0, 0, 8)], [(0, 8, 2)], [(0, 10, 1)], [(0, 11, 1)], [(1, 0, 4)]]
    assert found.queue_ms == pytest.approx((80, 80, 152))  # 0 and 160
    assert found.time_to_first_token_ms == pytest.approx((145, 145, 203.5))  # 80 and 210


def test_prompt_overhead_delays_its_first_task() -> None:
    found = served([asked(5, 3, 1)], costs=replace(constant(), prompt_ns=7 * MS))
    assert found.time_to_first_token_ms == pytest.approx((57, 57, 57))


def test_closed_clients_send_a_request_after_every_answer() -> None:
    found = served([asked(None, 4, 2)] * 4, sessions=2)
    assert rows_of(found) == [
        [(0, 0, 4), (1, 0, 4)],
        [(0, 4, 1), (1, 4, 1)],
        [(2, 0, 4), (3, 0, 4)],
        [(2, 4, 1), (3, 4, 1)],
    ]
    assert found.time_to_first_token_ms == pytest.approx((50, 50, 50))
    assert found.seconds == pytest.approx(0.2)


def test_decoding_sequences_go_before_a_long_prompt() -> None:
    found = served([asked(0, 2, 4), asked(10, 30, 1)])
    assert rows_of(found) == [
        [(0, 0, 2)],
        [(0, 2, 1), (1, 0, 7)],
        [(0, 3, 1), (1, 7, 7)],
        [(0, 4, 1), (1, 14, 7)],
        [(1, 21, 8)],
        [(1, 29, 1)],
    ]
    assert found.gap_ms is not None
    assert found.gap_ms.p95 == pytest.approx(50)


def test_batching_pays_if_chunks_have_constant_cost() -> None:
    requests = [asked(None, 6, 20)] * 16
    packed, sequential = (served(requests, batcher=name) for name in ("packed", "sequential"))
    assert sequential.seconds == pytest.approx(16 * 20 * 0.05)
    assert packed.seconds < sequential.seconds / 4
    assert packed.generated_tokens_per_s > 4 * sequential.generated_tokens_per_s


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.3, 0.6])
def test_sequential_requests_are_a_queue_with_one_server(load: float) -> None:
    """M/D/1: the mean wait is load / (2 (1 - load)) of the time that each takes (Pollaczek and Khinchine)."""
    plan = make_plan(layers=0)
    task_ms, service_ms = 1.0, 3.0
    requests = draw(f"poisson:{load / service_ms * 1e3}", "5", "1", requests=15_000, context_length=100).requests
    wait_ms = service_ms * load / (2 * (1 - load))
    inside = served(requests, costs=constant(plan, task_ms), batcher="sequential", sessions=1 << 20)
    assert inside.time_to_first_token_ms.mean == pytest.approx(wait_ms + service_ms, rel=0.04)
    outside = served(requests, costs=constant(plan, task_ms), batcher="sequential", sessions=1)
    assert outside.queue_ms.mean == pytest.approx(wait_ms, rel=0.08)
    assert outside.time_to_first_token_ms == pytest.approx(inside.time_to_first_token_ms)
    assert inside.busy["cpu"] == pytest.approx(load, rel=0.02)


def check_records(records: Sequence[RunRecord], requests: Sequence[SimulatedRequest], chunk_length: int) -> None:
    """Check that every token of every sequence is run once, in order, in chunks within their limits."""
    chunks = {chunk.number: chunk for record in records for chunk in record.chunks}
    assert all(1 <= chunk.num_tokens <= chunk_length for chunk in chunks.values())
    positions = [0] * len(requests)
    for number in sorted(chunks):
        for sequence, position, num_tokens in chunks[number].segments:
            assert position == positions[sequence]
            positions[sequence] += num_tokens
    assert positions == [request.prompt + request.generate - 1 for request in requests]
    assert sum(record.num_tokens for record in records) == sum(positions)
    for time in where_time_went(records[:1]):  # the events satisfy the schedule's rules
        assert time.total_ns >= 0


@given(data=st.data())
@settings(deadline=None)
def test_every_token_runs_once_without_starvation(data: st.DataObject) -> None:
    times = data.draw(st.lists(st.integers(0, 400), min_size=1, max_size=8).map(sorted))
    is_closed = data.draw(st.booleans())
    requests = [
        asked(None if is_closed else at, data.draw(st.integers(1, 40)), data.draw(st.integers(1, 5))) for at in times
    ]
    found = served(
        requests,
        batcher=data.draw(st.sampled_from(["packed", "sequential"])),
        policy=data.draw(st.sampled_from(sorted(POLICIES))),
        sessions=data.draw(st.integers(1, 4)),
        chunks_in_flight=data.draw(st.integers(1, 4)),
    )
    check_records(found.records(), requests, C)
    assert found.requests == len(requests)
    assert found.generated_tokens == sum(request.generate for request in requests)
    assert found.busy["cpu"] <= 1 + 1e-9


OPTIONS: dict[str, Any] = {"sessions": 4, "chunk_length": 32, "policy": "look_ahead", "scheme": "w8a16"}


def load_of(seed: int = 0, arrivals: str = "closed") -> Load:
    return draw(arrivals, "uniform:1:90", "uniform:1:6", requests=12, context_length=512, seed=seed)


@pytest.mark.parametrize("decode_on", ["auto", "cpu", "npu"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_device_with_an_npu(policy: str, decode_on: Any, tmp_path: Path) -> None:
    load = load_of()
    found = simulate_serving(SMALL, DEVICE, load, **OPTIONS | {"policy": policy, "decode_on": decode_on})
    records = found.records()
    check_records(records, load.requests, 32)
    write_trace(tmp_path / "out.json", records, "toy")
    back = read_trace(tmp_path / "out.json")
    CheckedTrace(tmp_path / "out.json")
    full = packing(back)
    assert full is not None
    assert (full["chunks"], full["rows_per_chunk"]) == (found.chunks, found.rows_per_chunk)
    assert full["padding"] == pytest.approx(found.padding)
    of_npu = [record for record in back if len(record.pipeline.processors) == 2]
    for time in where_time_went(of_npu):
        assert sum(time.busy_ns.values()) + sum(time.idle_ns.values()) == time.total_ns
    is_decode_on_cpu = {len(record.pipeline.processors) == 1 for record in back if record.position}
    if policy == "sequential":  # tasks do not overlap
        assert found.on_cpu == 0
        assert found.chunks_in_flight == 1
    elif decode_on != "auto":
        assert is_decode_on_cpu == {decode_on == "cpu"}
        assert (found.on_cpu > 0) == (decode_on == "cpu")


def test_costs_decide_where_sequences_decode() -> None:
    """On an NPU that takes no time they decode there; on one that takes forever, on the CPU."""
    fast = {name: replace(cost, fixed_us=0.0, gb_per_s=1e9, gops=1e9) for name, cost in DEVICE.npu.operators.items()}
    slow = {name: replace(cost, fixed_us=1e6) for name, cost in DEVICE.npu.operators.items()}
    free = replace(DEVICE.transfer, fixed_us=0.0, gb_per_s=1e9)
    for operators, on_cpu in ((fast, False), (slow, True)):
        device = replace(DEVICE, npu=replace(DEVICE.npu, task_us=0.0, operators=operators), transfer=free)
        found = simulate_serving(SMALL, device, load_of(), **OPTIONS)
        assert (found.on_cpu > 0) == on_cpu


def test_the_same_seed_gives_the_same_figures() -> None:
    found = [simulate_serving(SMALL, DEVICE, load_of(seed, "poisson:50"), **OPTIONS).to_dict() for seed in (3, 3, 4)]
    assert found[0] == found[1] != found[2]
    assert json.loads(json.dumps(found[0])) == found[0]


def test_shared_chunks_attend_to_each_sequences_history() -> None:
    chunk = ChunkWork.shared([(10, 3), (0, 2)], 1)
    assert chunk.pairs(0) == (11 + 12 + 13) + (1 + 2)
    assert chunk.pairs(12) == (11 + 12 + 12) + (1 + 2)
    modelled = ModelledWork(SMALL, find_scheme("w8a16"), DEVICE, chunk_length=32, chunks=[])
    (attention, *_) = [index for index, subgraph in enumerate(SMALL.subgraphs) if subgraph.state]
    alone = [ChunkWork(num_tokens=3, num_rows=0, position=10), ChunkWork(num_tokens=2, num_rows=0, position=0)]
    together, (first, second) = modelled.of(attention, chunk), (modelled.of(attention, one) for one in alone)
    assert together.num_bytes == pytest.approx(first.num_bytes + second.num_bytes)
    assert max(first.ns, second.ns) < together.ns < first.ns + second.ns  # a task costs its start once


def profile_of(*, has_npu: bool = False, decode_us: float | None = 40.0) -> MeasuredProfile:
    """Return a profile in which all layers of decoding sequences take `decode_us` microseconds, 3 for each row and a
    quarter for each pair, and the head takes 5 and 1 for each row. A step takes 20 more, and a token 6.
    """
    layers, head = merged_on_cpu(SMALL).subgraphs
    decode = {
        layers.name: SubgraphCost(subgraph=layers.name, fixed_us=decode_us or 0.0, row_us=3.0, pair_us=0.25),
        head.name: SubgraphCost(subgraph=head.name, fixed_us=5.0, row_us=1.0, pair_us=0.0),
    }
    costs = {} if decode_us is None else decode
    return toy_profile(SMALL, decode=costs, has_npu=has_npu, step_us=20.0, token_us=6.0)


def test_a_measured_profile() -> None:
    profile = profile_of()
    load = Load(requests=[asked(0, 3, 1), asked(0, 5, 1)], num_cut=0)
    found = simulate_serving(SMALL, profile, load, **OPTIONS)
    us = 100 + 6 * (10 + 2 * 8) + (10 + 2 * 2) + 2 * 0.5 * (6 + 15)  # 6 tasks of 8 rows, the head of two
    assert found.time_to_first_token_ms.p50 == pytest.approx(us / 1000)
    with pytest.raises(ConfigError, match="without an NPU, so it cannot predict decode on the NPU"):
        simulate_serving(SMALL, profile, load, **OPTIONS, decode_on="npu")
    with pytest.raises(ConfigError, match="omit --in-flight"):
        simulate_serving(SMALL, profile, load, **OPTIONS, chunks_in_flight=2)
    with pytest.raises(ConfigError, match="there are no requests to serve"):
        simulate_serving(SMALL, profile, Load(requests=[], num_cut=0), **OPTIONS)


@pytest.mark.parametrize("has_npu", [False, True])
def test_a_measured_profile_of_decoding_sequences(has_npu: bool) -> None:
    """A step of two sequences takes the costs of decode, and the overhead of a step and two tokens."""
    load = Load(requests=[asked(0, 3, 4), asked(0, 5, 4)], num_cut=0)
    found = simulate_serving(SMALL, profile_of(has_npu=has_npu), load, **OPTIONS, decode_on="cpu")
    steps = [40 + 3 * 2 + 0.25 * pairs + 5 + 2 + 20 + 6 * 2 for pairs in (4 + 6, 5 + 7, 6 + 8)]
    assert found.gap_ms is not None
    assert found.gap_ms.mean == pytest.approx(sum(steps) / 3 / 1000)
    assert rows_of(found) == [[(0, 0, 3), (1, 0, 5)], *([(0, 3 + n, 1), (1, 5 + n, 1)] for n in range(3))]
    tasks = [len(record.events) for record in found.records()]
    assert tasks == [7, 2, 2, 2] * 2  # prompts have a task for each subgraph
    check_records(found.records(), load.requests, 32)


def test_a_measured_profile_decides_where_sequences_decode() -> None:
    load = Load(requests=[asked(0, 3, 4)], num_cut=0)
    for decode_us, on_cpu in ((40.0, 0.75), (400.0, 0.0)):  # the NPU and the CPU together take 7 tasks of about 12
        found = simulate_serving(SMALL, profile_of(has_npu=True, decode_us=decode_us), load, **OPTIONS)
        assert found.on_cpu == on_cpu
    npu = simulate_serving(SMALL, profile_of(has_npu=True, decode_us=None), load, **OPTIONS, decode_on="npu")
    assert npu.on_cpu == 0
    with pytest.raises(ConfigError, match="toy has no costs of decode on the CPU; run `chunkrt profile`"):
        simulate_serving(SMALL, profile_of(has_npu=True, decode_us=None), load, **OPTIONS, decode_on="cpu")


def test_clock_waits_for_external_events() -> None:
    schedule = Schedule(PLAN, chunks_in_flight=2, processors=shared_cpu(2), policy=find_policy("in_order"))
    times, coming = [0.0, 5.0, 5.25, 5.5, 6.0, 7.0, 8.0], {5.0: 1, 5.5: 1, 8.0: 0}
    called = []

    def outside(now: float) -> float | None:
        called.append(now)
        if now in coming and coming.pop(now):
            schedule.admit(PLAN.flow.with_logits)
        if not coming:
            schedule.close()
            return None
        return next(time for time in times if time > now)

    events = run_on_virtual_clock(schedule, lambda task: 1, outside=outside)
    spans = {event.task: (event.start_ns, event.end_ns) for event in events}
    assert len(spans) == 10
    assert [spans[0, 0], spans[4, 0]] == [(5, 6), (9, 10)]
    assert set(times[:-1]) <= set(called)
    assert called == sorted(called)
