"""The simulator: its figures are consistent and agree with results worked out by hand; its command prints them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from free_device import free_device
from measured_profiles import toy_profile
from small_shape import SMALL_SHAPE

from chunkrt.cli import cli
from chunkrt.errors import ConfigError
from chunkrt.graph.plan import Plan
from chunkrt.graph.rewrites import merged_on_cpu
from chunkrt.runtime.policy import POLICIES
from chunkrt.simulate import DeviceProfile, find_shape, simulate
from chunkrt.simulate.arrivals import draw
from chunkrt.simulate.learn import learn_costs, learn_decode, learn_speeds
from chunkrt.simulate.measured import SubgraphCost, twins, write_measured
from chunkrt.simulate.serving import simulate_serving

SMALL = replace(SMALL_SHAPE, num_layers=3)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return SMALL.plan()


def test_one_worker_takes_the_sum_of_its_tasks(plan: Plan) -> None:
    found = simulate(plan, toy_profile(plan), prompt_length=80, chunk_length=32, policy="in_order", scheme="w8a16")
    rows = [32, 32, 16]
    tasks = [1 + 3 + 3, 1 + 3 + 3, 1 + 4 + 3]  # the last static subgraph and the LM head run for the last chunk alone
    us = sum(n * (10 + 2 * r) for n, r in zip(tasks, rows, strict=True)) + 10 + 2  # the LM head has one row
    us += 0.5 * 3 * (80 * 81 / 2)
    assert found.makespan_ms == pytest.approx(us / 1000)
    assert found.time_to_first_token_ms == pytest.approx((us + 100) / 1000)
    assert found.tokens_per_s == pytest.approx(80 / (us + 100) * 1e6)
    assert found.processors["cpu"].busy == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("length", "policy", "is_fused", "has_gaps"),
    [
        (32, "in_order", True, False),  # the native backend computes one chunk as one program
        (32, "sequential", True, True),
        (32, "in_order", False, True),
        (33, "in_order", True, True),
    ],
)
def test_one_chunk_has_no_time_between_tasks_if_subgraphs_are_fused(
    plan: Plan, length: int, policy: str, is_fused: bool, has_gaps: bool
) -> None:
    fused = [SubgraphCost(subgraph=s.name, fixed_us=1, row_us=0, pair_us=0) for s in merged_on_cpu(plan).subgraphs]
    decode = {cost.subgraph: cost for cost in fused} if is_fused else {}
    without, found = (
        simulate(
            plan,
            toy_profile(plan, decode=decode, task_us=task_us),
            prompt_length=length,
            chunk_length=32,
            policy=policy,
            scheme="w8a16",
        )
        for task_us in (0.0, 5.0)
    )
    gaps_ms = len(found.records[0].events) * 5 / 1000 if has_gaps else 0.0
    assert found.makespan_ms - without.makespan_ms == pytest.approx(gaps_ms)


def test_two_workers_that_halve_each_other_gain_nothing(plan: Plan) -> None:
    options = {"prompt_length": 160, "chunk_length": 32, "policy": "in_order", "scheme": "w8a16"}
    alone = simulate(plan, toy_profile(plan), **options)
    halved = simulate(plan, toy_profile(plan, threads=2, speeds=(1.0, 0.5)), **options)
    free = simulate(plan, toy_profile(plan, threads=2, speeds=(1.0, 1.0)), **options)
    assert halved.makespan_ms == pytest.approx(alone.makespan_ms, rel=1e-6)
    assert free.makespan_ms < 0.7 * alone.makespan_ms


@pytest.mark.parametrize("policy", POLICIES)
def test_busy_and_idle_fill_the_makespan(plan: Plan, device: DeviceProfile, policy: str) -> None:
    found = simulate(plan, device, prompt_length=200, chunk_length=32, policy=policy, scheme="w8a16")
    for shares in found.processors.values():
        assert shares.busy + sum(shares.idle.values()) == pytest.approx(1.0, abs=1e-9)
    assert found.npu_busy == pytest.approx(found.processors["npu"].busy)
    assert found.overlap <= min(found.npu_busy, found.cpu_busy)
    assert found.makespan_ms * 1e6 == max(event.end_ns for event in found.records[0].events)


def test_a_task_costs_the_values_that_cross_from_the_other_processor(device: DeviceProfile) -> None:
    """The first residual comes from the embedding on the CPU, and later residuals from the NPU itself."""
    plan = replace(SMALL, num_layers=4).plan()
    found = simulate(plan, device, prompt_length=32, chunk_length=32, policy="in_order", scheme="w8a16")
    stages = found.records[0].pipeline.stages
    us = {stages[e.task.subgraph].name: (e.end_ns - e.start_ns) / 1000 for e in found.records[0].events}
    residual_bytes = 4 * 32 * SMALL.hidden_size
    crossing_us = device.transfer.fixed_us + residual_bytes / (1000 * device.transfer.gb_per_s)
    assert us["static.1"] - us["static.2"] == pytest.approx(crossing_us, abs=0.002)
    assert us["static.2"] == us["static.3"]


def test_overlapped_conversion_saves_at_most_its_own_time(plan: Plan, device: DeviceProfile) -> None:
    device = replace(device, transfer=replace(device.transfer, gb_per_s=0.5))
    options = {"prompt_length": 512, "chunk_length": 32, "policy": "in_order", "scheme": "w8a16"}
    apart = simulate(plan, device, **options)
    beside = simulate(plan, device, **options, overlaps_conversion=True)
    spans = dict.fromkeys(("entering", "waiting", "computing", "leaving"), 0)
    for event in apart.records[0].events:
        assert (event.passage is not None) == (event.processor == "npu")
        for span, start_ns, end_ns in event.spans:
            spans[span] += end_ns - start_ns
    assert spans["waiting"] == 0
    converted_ms = (spans["entering"] + spans["leaving"]) / 1e6
    assert converted_ms > 0.1 * apart.makespan_ms
    assert apart.makespan_ms - converted_ms <= beside.makespan_ms < apart.makespan_ms
    computing = sorted(e.passage[1:] for e in beside.records[0].events if e.passage is not None)
    assert all(end_ns <= begin_ns for (_, end_ns), (begin_ns, _) in pairwise(computing))


def test_measured_profile_has_no_conversion_time(plan: Plan) -> None:
    with pytest.raises(
        ConfigError, match="toy was measured with conversion included and has no duration of conversion alone"
    ):
        simulate(
            plan,
            toy_profile(plan),
            prompt_length=32,
            chunk_length=32,
            policy="in_order",
            scheme="w8a16",
            overlaps_conversion=True,
        )


@pytest.mark.parametrize("policy", ["sequential", "in_order"])
def test_more_bandwidth_is_never_slower(device: DeviceProfile, policy: str) -> None:
    plan = replace(SMALL, hidden_size=1024, intermediate_size=4096, head_dim=256).plan()
    rates = []
    for gb_per_s in (2, 5, 10, 20, 40, 80):
        slower = replace(device, memory=replace(device.memory, gb_per_s=float(gb_per_s)))
        found = simulate(plan, slower, prompt_length=256, chunk_length=32, policy=policy, scheme="w8a16")
        rates.append(found.tokens_per_s)
    assert rates == sorted(rates)
    assert rates[0] < 0.5 * rates[-1]


def test_a_linear_costs_the_longer_of_its_bytes_and_its_operations(device: DeviceProfile) -> None:
    bare = free_device(device, npu={"linear_a16": {"fixed_us": 3.0, "gops": 1.0}})
    watts = {"npu": replace(bare.npu, busy_watts=1.0), "cpu": replace(bare.cpu, busy_watts=0.0), "idle_watts": 2.0}
    bare = replace(bare, **watts, memory=replace(bare.memory, pj_per_byte=0.0))
    found = simulate(SMALL.plan(), bare, prompt_length=1, chunk_length=32, policy="in_order", scheme="w8a16")
    linears = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96
    us = 3 * (4 * 3.0 + 32 * 2 * linears / 1000)  # a complete chunk, regardless of its rows
    assert found.makespan_ms == pytest.approx(us / 1000, rel=1e-4)
    assert found.energy_joules == pytest.approx(us * 1e-6 * 3.0, rel=1e-4)  # one watt while busy, two always


def test_memory_grows_by_the_keys_and_values_of_a_longer_prompt(plan: Plan, device: DeviceProfile) -> None:
    options = {"chunk_length": 32, "policy": "in_order", "scheme": "w8a16", "chunks_in_flight": 1}
    short = simulate(plan, device, prompt_length=32, **options)
    long = simulate(plan, device, prompt_length=64, **options)
    assert long.peak_memory_bytes - short.peak_memory_bytes == 32 * 3 * 2 * 2 * 16 * 2


def test_the_memory_of_windows_does_not_grow_with_a_prompt(plan: Plan, device: DeviceProfile) -> None:
    parts = [
        replace(part, nodes=tuple(replace(n, attributes={**n.attributes, "window": 64}) for n in part.nodes))
        if part.state
        else part
        for part in plan.subgraphs
    ]
    rings = {t.name: replace(t, shape=(t.shape[0], "W", t.shape[2])) for t in plan.state_tensors}
    windowed = replace(plan, subgraphs=tuple(parts), tensors={**plan.tensors, **rings})
    options = {"chunk_length": 32, "policy": "in_order", "scheme": "w8a16", "chunks_in_flight": 1}
    short, long, whole = (
        simulate(p, device, prompt_length=n, **options) for p, n in ((windowed, 256), (windowed, 320), (plan, 320))
    )
    assert short.peak_memory_bytes == long.peak_memory_bytes
    assert whole.peak_memory_bytes - long.peak_memory_bytes == (320 - 128) * 3 * 2 * 2 * 16 * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_length": 0}, "prompt length 0 is outside 1..512"),
        ({"prompt_length": 513}, "prompt length 513 is outside 1..512"),
        ({"chunk_length": 0}, "chunk length 0 is outside"),
        ({"policy": "inorder"}, "did you mean 'in_order'"),
        ({"scheme": "w8a17"}, "did you mean 'w8a16'"),
        ({"chunks_in_flight": 0}, "0 chunks in flight"),
        ({"threads": 2}, "omit the number of threads"),
    ],
)
def test_invalid_arguments_are_refused(plan: Plan, device: DeviceProfile, options: dict, message: str) -> None:
    good = {"prompt_length": 64, "chunk_length": 32, "policy": "in_order", "scheme": "w8a16"}
    with pytest.raises(ConfigError) as error:
        simulate(plan, device, **{**good, **options})
    assert message in str(error.value)


def test_a_profile_of_something_else_is_refused(plan: Plan) -> None:
    good = {"prompt_length": 64, "chunk_length": 32, "policy": "in_order", "scheme": "w8a16"}
    with pytest.raises(ConfigError, match="measured with scheme w8a16 and chunks of 32, not float and 32"):
        simulate(plan, toy_profile(plan), **{**good, "scheme": "float"})
    with pytest.raises(ConfigError, match="with 1 threads, not 2"):
        simulate(plan, toy_profile(plan), **good, threads=2)
    other = replace(SMALL, attention_bias=True, num_layers=1).plan()
    trimmed = toy_profile(other)
    trimmed.budgets[1].subgraphs.pop("head")
    with pytest.raises(ConfigError, match="has no subgraph head"):
        simulate(other, trimmed, **good)


def test_costs_and_speeds_are_learnt_back_from_simulated_runs(plan: Plan) -> None:
    """`chunkrt profile` recovers the known costs of simulated runs."""
    options = {"chunk_length": 32, "scheme": "w8a16"}
    truth = toy_profile(plan, threads=2, speeds=(1.0, 0.6))
    runs = [simulate(plan, truth, prompt_length=n, policy="sequential", **options).records[0] for n in (256, 16)]
    costs = learn_costs(plan, runs)
    assert set(costs) == set(twins(plan).values())
    for name, cost in costs.items():
        expected = truth.budgets[2].subgraphs[name]
        rows = 1 if name == "head" else 32
        assert cost.fixed_us + cost.row_us * rows == pytest.approx(expected.fixed_us + expected.row_us * rows, rel=1e-3)
        assert cost.pair_us == pytest.approx(expected.pair_us, abs=1e-4)
    crowded = [simulate(plan, truth, prompt_length=256, policy="in_order", **options).records[0]]
    learnt = learn_speeds(plan, costs, crowded, 2)
    assert learnt["static.1"] == pytest.approx((1.0, 0.6), rel=1e-3)
    assert learnt["dynamic.0"] == pytest.approx((1.0, 0.6), rel=1e-3)


@pytest.mark.parametrize("is_merged", [True, False])
def test_costs_of_decode_are_learnt_back_from_simulated_servers(plan: Plan, is_merged: bool) -> None:
    """Runs of one sequence with a short and with a long history, and of eight sequences, suffice."""
    decoder = merged_on_cpu(plan) if is_merged else plan.on_cpu()
    names = twins(decoder).values()
    costs = {
        name: SubgraphCost(
            subgraph=name,
            fixed_us=400.0,
            row_us=30.0,
            pair_us=2.0 if name.startswith("dynamic") or ".." in name else 0.0,
        )
        for name in names
    }
    truth = toy_profile(plan, step_us=50.0, token_us=10.0, decode=costs)
    runs = [
        simulate_serving(
            plan,
            truth,
            draw("closed", str(depth), "9", requests=number, context_length=512),
            sessions=number,
            chunk_length=32,
            policy="in_order",
            scheme="w8a16",
        ).records()
        for number, depth in ((1, 4), (1, 400), (8, 4))
    ]
    decode, step_us, token_us = learn_decode(plan, runs)
    assert (step_us, token_us) == pytest.approx((50, 10), rel=1e-3)
    assert set(decode) == set(names)
    for name, cost in decode.items():
        for rows, pairs in ((1, 50), (4, 600)):
            expected = 400 + 30 * rows + costs[name].pair_us * pairs
            assert cost.fixed_us + cost.row_us * rows + cost.pair_us * pairs == pytest.approx(expected, rel=1e-3)
    assert learn_decode(plan, [[record for record in runs[0] if not record.is_decode]]) == ({}, 0, 0)


def run_cli(*arguments: str) -> list[dict]:
    result = CliRunner().invoke(cli, ["simulate", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    rows: list[dict] = json.loads(result.stdout)
    return rows


def test_the_command_prints_a_row_for_every_case() -> None:
    rows = run_cli(
        "gemma-2b", "--device", "sd8gen3", "-p", "64,128", "--chunk", "32", "--chunk", "64", "--policy", "all"
    )
    assert len(rows) == 2 * 2 * len(POLICIES)
    assert set(rows[0]) == {
        "model", "origin", "device", "scheme", "policy", "prompt_length", "chunk_length", "chunks_in_flight",
        "time_to_first_token_ms", "tokens_per_s", "makespan_ms", "processors", "npu_busy", "cpu_busy", "overlap",
        "link", "peak_memory_bytes", "energy_joules", "interval", "joules", "ms_by_parameter", "graph_lengths",
        "contexts", "padding",
    }  # fmt: skip
    assert set(rows[0]["processors"]) == {"npu", "cpu"}
    assert set(rows[0]["processors"]["npu"]) == {"busy", "idle"}


def test_the_command_prints_a_table() -> None:
    result = CliRunner().invoke(cli, ["simulate", "phi-2", "--device", "sdxelite", "-p", "64", "--chunk", "32"])
    assert result.exit_code == 0
    head, columns, row, origin = result.stdout.splitlines()
    assert origin.startswith("predicted from the profile of Snapdragon X Elite: -61 to +20 % off 22 published figures")
    assert head == "phi-2 on Snapdragon X Elite, scheme w8a16"
    assert columns.split()[:4] == ["prompt", "chunk", "policy", "ttft"]
    assert row.split()[:3] == ["64", "32", "look_ahead"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gemma-2b", "--device", "pixel"], "unknown device 'pixel'"),
        (["gemma-2b", "--device", "sd8gen3", "-p", "0"], "-p is '0', expected"),
        (["gemma-2b", "--device", "sd8gen3", "-p", ""], "-p is '', expected"),
        (["gemma-2b", "--device", "sd8gen3", "--chunk", "x"], "--chunk is 'x', expected"),
        (["gemma-2b", "--device", "sd8gen3", "--policy", "fast"], "unknown policy 'fast'"),
        (["gemma-2", "--device", "sd8gen3"], "built-in shapes are allam-7b, "),
        (["gemma-2b", "--device", "sd8gen3", "--scheme", "float", "--overlap-conversion"], "without work on an NPU"),
        (["gemma-2b", "--device", "SM8650+llama.cpp", "--overlap-conversion"], "without work on an NPU; omit it"),
        (
            ["gemma-2b", "--device", "SM8850+llama.cpp", "--power-mode", "balanced"],
            "--power-mode has no effect without",
        ),
        (["gemma-2b", "--device", "SM9999+genie"], "unknown SoC 'SM9999'"),
        *(
            (["gemma-2b", "--device", "SM8850+genie", "--minutes", "1", "--start-celsius", text], "expected -50 to 120")
            for text in ("-400", "1e9")
        ),
    ],
)
def test_a_wrong_command_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        CliRunner().invoke(cli, ["simulate", *arguments], catch_exceptions=False)
    assert message in str(error.value)


def test_the_command_takes_a_measured_profile(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    path.write_text(write_measured(toy_profile(find_shape("gemma-2b").plan())), encoding="utf-8")
    rows = run_cli("gemma-2b", "--device", str(path), "-p", "64")
    assert [row["chunk_length"] for row in rows] == [32]
    assert rows[0]["energy_joules"] is None
    assert set(rows[0]["processors"]) == {"cpu"}
