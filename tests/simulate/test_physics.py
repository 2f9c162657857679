"""Terms of the cost model against hand-computed times, composed profiles, intervals, energy and heat."""

from __future__ import annotations

import csv
import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from free_device import free_device

from chunkrt.engine.npu_attention import near_plans
from chunkrt.engine.options import EngineOptions
from chunkrt.errors import ConfigError
from chunkrt.graph.plan import Plan
from chunkrt.simulate import DeviceProfile, Shape, Simulation, find_device, find_shape, read_profile, simulate
from chunkrt.simulate import profile as profile_module
from chunkrt.simulate.profile import ThermalCost, ThrottleCost
from chunkrt.simulate.sustained import sustain

ROOT = Path(__file__).parents[2]
HIDDEN, WIDE, LAYERS, HEADS, KV_HEADS, WIDTH, WORDS = 256, 512, 3, 4, 2, 64, 1000
SHAPE = Shape(
    source="made up",
    hidden_size=HIDDEN,
    intermediate_size=WIDE,
    num_layers=LAYERS,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=WIDTH,
    vocab_size=WORDS,
    context_length=4096,
)
LINEARS = LAYERS * (HIDDEN * (HEADS + 2 * KV_HEADS) * WIDTH + HEADS * WIDTH * HIDDEN + 3 * HIDDEN * WIDE)
HEAD = HIDDEN * WORDS
WINDOW, CHUNK = 1000, 24


def device(kind: str = "", *, cache_bytes: float = 2.0, fast_mb: float | None = None, **costs: float) -> DeviceProfile:
    """A device on which nothing costs time except the given numbers of one kind of operator on the NPU."""
    found = find_device("SM8750+genie")
    assert isinstance(found, DeviceProfile)
    free = free_device(found, npu={kind: costs} if kind else {})
    npu = replace(free.npu, cache_bytes=cache_bytes, fast_mb=fast_mb)
    return replace(free, npu=npu, transfer=replace(free.transfer, cache_gb_per_s=1e15))


def whole() -> tuple[Plan, dict[int, Plan]]:
    """The plan with all of the decoder but the embedding on the NPU, and attention to a padded window."""
    placement = {"lm_head": "npu"}
    plan = SHAPE.plan(placement)  # type: ignore[arg-type]
    options = EngineOptions(attention="npu", npu_window=WINDOW)
    near = near_plans(plan, placement, options, plan.context_length)  # type: ignore[arg-type]
    return plan, {one.reach: one.plan for one in near}


def run(profile: DeviceProfile, chunk: int = CHUNK, scheme: str = "w8a16") -> Simulation:
    plan, near = whole()
    return simulate(plan, profile, prompt_length=chunk, chunk_length=chunk, policy="in_order", scheme=scheme, near=near)


def test_operations_of_all_linears_take_their_time() -> None:
    expected = 2 * CHUNK * (LINEARS + HEAD) / (50 * 1e6)
    assert run(device("linear_a16", gops=50.0)).time_to_first_token_ms == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("rows", "tiles"), [(1, 1), (24, 1), (32, 1), (33, 2)])
def test_rows_are_computed_in_complete_tiles(rows: int, tiles: int) -> None:
    expected = 2 * 32 * tiles * (LINEARS + HEAD) / (50 * 1e6)
    found = run(device("linear_a16", gops=50.0, tile_rows=32.0), chunk=rows)
    assert found.time_to_first_token_ms == pytest.approx(expected, rel=1e-4)


def test_weights_are_read_once_for_a_chunk() -> None:
    found = run(device("linear_a16", gb_per_s=2.0)).time_to_first_token_ms
    assert found == pytest.approx((LINEARS + HEAD) / 2e6, rel=0.03)  # one byte each, and scales


def test_inputs_beyond_the_fast_memory_read_the_weights_again() -> None:
    rows = 128
    inputs = {HIDDEN: 2 * rows * HIDDEN, WIDE: 2 * rows * WIDE}  # 65,536 and 131,072 bytes
    once = run(device("linear_a16", gb_per_s=2.0, fast_mb=0.2), chunk=rows).time_to_first_token_ms
    twice = run(device("linear_a16", gb_per_s=2.0, fast_mb=0.1), chunk=rows).time_to_first_token_ms
    assert inputs[HIDDEN] < 1e5 < inputs[WIDE] < 2e5  # only down_proj exceeds 0.1 MB, and needs two parts
    more = LAYERS * (HIDDEN * WIDE + inputs[WIDE] + 2 * rows * HIDDEN)
    assert twice - once == pytest.approx(more / 2e6, rel=0.03)


def test_attention_pays_for_the_padded_context() -> None:
    scores = CHUNK * (WINDOW + CHUNK) * HEADS * LAYERS
    found = run(device("attention", softmax_g_per_s=0.5)).time_to_first_token_ms
    assert found == pytest.approx(scores / (0.5 * 1e6), rel=1e-4)
    products = run(device("attention", gops=5.0)).time_to_first_token_ms
    assert products == pytest.approx(4 * WIDTH * scores / (5 * 1e6), rel=1e-4)


@pytest.mark.parametrize("width", [1.0, 2.0])
def test_attention_reads_caches_of_the_profiles_width(width: float) -> None:
    elements = 2 * LAYERS * KV_HEADS * WIDTH * (WINDOW + CHUNK)
    found = run(device("attention", gb_per_s=3.0, cache_bytes=width)).time_to_first_token_ms
    assert found == pytest.approx(width * elements / 3e6, rel=1e-4)


def test_separate_heads_cost_a_time_each() -> None:
    plain = device()
    apart = replace(plain, transfer=replace(plain.transfer, head_us=7.0))
    found = run(apart).time_to_first_token_ms - run(plain).time_to_first_token_ms
    assert found == pytest.approx(2 * KV_HEADS * LAYERS * 7.0 / 1000, abs=1e-3)


def test_the_time_is_the_sum_of_its_parameters() -> None:
    found = find_device("SM8850+genie")
    assert isinstance(found, DeviceProfile)
    simulation = run(found, scheme="w4a16")
    assert sum(simulation.ms_by_parameter.values()) == pytest.approx(simulation.time_to_first_token_ms, rel=1e-3)


def test_a_composed_number_is_a_multiple_of_a_fact() -> None:
    software, facts = (read(name) for name in ("software/genie.toml", "socs.toml"))
    share = software["npu"]["operators"]["linear_a16"]["gops"]
    fact = facts["SA8775P"]["npu_tops"]
    found = find_device("sa8775p+genie")
    assert isinstance(found, DeviceProfile)
    key = "npu.operators.linear_a16.gops"
    assert found.npu.operators["linear_a16"].gops == pytest.approx(share["value"] * fact["value"])
    up = math.hypot(*(math.log(part["range"][1] / part["value"]) for part in (share, fact)))
    assert found.sources[key].high == pytest.approx(share["value"] * fact["value"] * math.exp(up))
    assert "SA8775P" in found.sources[key].text


def read(name: str) -> dict[str, Any]:
    return tomllib.loads((Path(profile_module.__file__).parent / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["SM8850", "SM8735", "SA8295P", "X2 Elite", "QCS8550+llama.cpp", "8gen5+executorch"])
def test_socs_without_a_profile_of_their_own_are_composed(name: str) -> None:
    found = find_device(name)
    assert isinstance(found, DeviceProfile)
    assert "with" in found.name
    assert all(source.low < source.high for source in found.sources.values())


def test_an_unknown_software_is_refused_with_all_names() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'SM8850\+genie'"):
        find_device("SM8850+geni")


def test_a_software_without_the_npu_runs_on_the_cpu() -> None:
    found = find_device("SM8850+llama.cpp")
    plan, near = whole()
    arguments: Any = {"prompt_length": 24, "chunk_length": 24, "policy": "in_order", "scheme": "w4a8-dynamic"}
    assert simulate(plan, found, **arguments).npu_busy == 0
    with pytest.raises(ConfigError, match="leaves the NPU idle"):
        simulate(plan, found, near=near, **arguments)


def test_an_interval_combines_the_errors_of_model_and_parameters(tmp_path: Path) -> None:
    exact = replace(device("linear_a16", gops=50.0), sources={}, model_error=0.2)
    low, high = run(exact).interval.tokens_per_s  # type: ignore[union-attr]
    assert high / low == pytest.approx(math.exp(2 * 1.2816 * 0.2), rel=1e-3)
    text = (Path(profile_module.__file__).parent / "devices" / "sd8gen3.toml").read_text(encoding="utf-8")
    path = tmp_path / "ranges.toml"
    path.write_text(text.replace("gops = { value = 6500,", "gops = { value = 6500, range = [3250, 13000],"))
    profile = read_profile(path)
    assert isinstance(profile, DeviceProfile)
    only = replace(exact, sources={"npu.operators.linear_a16.gops": profile.sources["npu.operators.linear_a16.gops"]})
    low, high = run(only).interval.tokens_per_s  # type: ignore[union-attr]
    assert math.log(high / low) / 2 == pytest.approx(math.hypot(math.log(2), 1.2816 * 0.2), rel=1e-3)


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ("[7000, 8000]", "expected ends above 0 around the value 6500"),
        ("[6000]", "expected two numbers"),
        ("[1, inf]", "two numbers"),
    ],
)
def test_a_wrong_range_is_refused_by_its_key(tmp_path: Path, ends: str, message: str) -> None:
    text = (Path(profile_module.__file__).parent / "devices" / "sd8gen3.toml").read_text(encoding="utf-8")
    path = tmp_path / "wrong.toml"
    path.write_text(text.replace("gops = { value = 6500,", f"gops = {{ value = 6500, range = {ends},"))
    with pytest.raises(ConfigError, match=message) as error:
        read_profile(path)
    assert "linear_a16.gops.range" in str(error.value)


def test_temperature_follows_the_circuits_differential_equation() -> None:
    thermal = ThermalCost(ambient_c=20.0, c_per_w=1.5, j_per_c=60.0)
    celsius, step = 25.0, 0.001
    for _ in range(100_000):  # 100 s of 8 W
        celsius += step * (8.0 - (celsius - 20.0) / 1.5) / 60.0
    assert thermal.after(25.0, 8.0, 100.0) == pytest.approx(celsius, abs=0.01)
    assert thermal.after(25.0, 8.0, 1e9) == pytest.approx(20 + 8 * 1.5)


def test_a_throttled_clock_falls_to_its_least() -> None:
    throttle = ThrottleCost(from_c=30.0, per_c=0.05, least=0.5)
    assert [throttle.clock(celsius) for celsius in (20, 30, 34, 50)] == pytest.approx([1.0, 1.0, 0.8, 0.5])


def test_sustained_load_warms_up_and_slows_down() -> None:
    cold = replace(
        device("linear_a16", gops=0.05), idle_watts=1.0, thermal=ThermalCost(ambient_c=20.0, c_per_w=2.0, j_per_c=5.0)
    )
    cold = replace(cold, npu=replace(cold.npu, busy_watts=9.0), memory=replace(cold.memory, pj_per_byte=0.0))
    hot = replace(cold, npu=replace(cold.npu, throttle=ThrottleCost(from_c=30.0, per_c=0.1, least=0.5)))
    steady = sustain(run, cold, minutes=2)
    assert steady.throttled_after_s is None
    assert steady.last_tokens_per_s == pytest.approx(steady.first_tokens_per_s)
    assert steady.energy_joules == pytest.approx(10.0 * steady.seconds, rel=1e-3)
    assert steady.last_c == pytest.approx(20 + 20 * (1 - math.exp(-steady.seconds / 10)), abs=0.01)
    slowed = sustain(run, hot, minutes=2)
    assert slowed.throttled_after_s is not None
    assert 0 < slowed.throttled_after_s < 30
    # In balance, T = 20 + 2 (1 + 9 s^2) and s = 1 - 0.1 (T - 30), so that 1.8 s^2 + s - 1.8 = 0.
    balance = (math.sqrt(1 + 4 * 1.8 * 1.8) - 1) / (2 * 1.8)
    assert slowed.last_tokens_per_s / slowed.first_tokens_per_s == pytest.approx(balance, abs=0.02)
    at_least = sustain(run, hot, minutes=0.001, start_c=60.0).first_tokens_per_s
    assert at_least == pytest.approx(slowed.first_tokens_per_s / 2)


def test_power_modes_scale_clock_and_memory() -> None:
    found = find_device("SC8380XP+genie")
    assert isinstance(found, DeviceProfile)
    mode = found.modes["power_saver"]
    base = replace(device("linear_a16", gops=50.0), modes=found.modes)
    slow = run(base.in_mode("power_saver")).time_to_first_token_ms / run(base).time_to_first_token_ms
    assert slow == pytest.approx(1 / mode.clock, rel=1e-3)
    bound = replace(device("linear_a16", gb_per_s=2.0), modes=found.modes)
    slow = run(bound.in_mode("power_saver")).time_to_first_token_ms / run(bound).time_to_first_token_ms
    assert slow == pytest.approx(1 / mode.bandwidth, rel=1e-3)
    with pytest.raises(ConfigError, match="did you mean 'power_saver'"):
        found.in_mode("power_saving")
    with pytest.raises(ConfigError, match="has no power modes"):
        replace(found, modes={}).in_mode("burst")


def test_joules_are_power_times_time() -> None:
    profile = replace(device("linear_a16", gops=5.0), idle_watts=2.0)
    profile = replace(profile, npu=replace(profile.npu, busy_watts=3.0))
    simulation = run(profile)
    seconds = simulation.time_to_first_token_ms / 1000
    assert simulation.joules["npu busy"] == pytest.approx(3 * seconds, rel=1e-3)
    assert simulation.joules["idle"] == pytest.approx(2 * seconds, rel=1e-3)
    assert simulation.energy_joules == pytest.approx(sum(simulation.joules.values()))


GENIE = ("llama-3.2-1b", "--device", "SM8750+genie", "-p", 128, "--chunk", 128, "--scheme", "w4a16")


def test_the_command_prints_energy_and_sustained_rates(command) -> None:
    finished = command("simulate", *GENIE, "--energy", "--minutes", "1", "--start-celsius", "30")
    assert finished.status == 0, finished.err
    assert "npu busy J" in finished.out
    assert "tokens/s first" in finished.out
    (row,) = json.loads(command("simulate", *GENIE, "--minutes", "1", "--start-celsius", "30", "--json").out)
    assert row["sustained"]["first_c"] == 30
    assert row["sustained"]["seconds"] >= 60
    low, high = row["interval"]["tokens_per_s"]
    assert low < row["tokens_per_s"] < high


def test_the_command_runs_in_a_power_mode(command) -> None:
    rates = [
        json.loads(command("simulate", *GENIE, *mode, "--json").out)[0]["tokens_per_s"]
        for mode in ((), ("--power-mode", "low_power_saver"))
    ]
    assert rates[1] < 0.7 * rates[0]


SERVED = ("llama-3.2-1b", "--device", "SM8750+genie", "--arrivals", "closed", "--prompt", "8", "--generate", "2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*GENIE, "--minutes", "0"), "--minutes is 0"),
        (("gemma-2b", "--device", "sd8gen3", "--minutes", "1"), "choose an SoC with a software, e.g. SM8650+genie"),
        ((*GENIE, "--start-celsius", "30"), "--minutes"),
        ((*GENIE, "--power-mode", "fast"), "unknown power mode"),
        ((*SERVED, "--energy"), "--energy needs single prompts"),
        ((*SERVED, "--minutes", "1"), "--minutes repeats one prompt"),
    ],
)
def test_wrong_options_are_refused(command, arguments: tuple[str | int, ...], message: str) -> None:
    finished = command("simulate", *arguments)
    assert finished.status != 0
    assert message in finished.err


def test_published_figures_have_sources_and_known_shapes() -> None:
    with (ROOT / "bench" / "published.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len({row["id"] for row in rows}) == len(rows) > 150
    by_id = {row["id"]: row for row in rows}
    assert float(by_id["A15"]["prefill"]) == pytest.approx(128 / 0.14278, rel=1e-3)  # ms of one run of the graph
    for row in rows:
        assert row["source"], row["id"]
        assert row["excluded"] or find_shape(row["model"]), row["id"]
