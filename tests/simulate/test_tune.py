"""The search: its choice equals that of a plain search over all simulations, and an engine accepts its file."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache, reduce
from itertools import product
from math import ceil
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest
from fixture_checkpoints import checkpoint
from one_line import expect_one_line

import chunkrt
import chunkrt.simulate.tune as search
from chunkrt.cli.compile import compile as compile_command
from chunkrt.cli.eval import eval as eval_command
from chunkrt.cli.profile import profile as profile_command
from chunkrt.engine.resolve import choose_recipe
from chunkrt.engine.settings import read_settings
from chunkrt.engine_directory.manifest import read_manifest, read_plan
from chunkrt.errors import ConfigError
from chunkrt.graph.placement import Placement
from chunkrt.graph.plan import Plan
from chunkrt.quant.scheme import Scheme, find_scheme
from chunkrt.simulate import Shape, find_device, simulate
from chunkrt.simulate.arrivals import draw
from chunkrt.simulate.experiments import near_plans_of, with_shadow
from chunkrt.simulate.partition_search import TIE
from chunkrt.simulate.quality import Quality, read_quality
from chunkrt.simulate.queue import NUM_ARRIVALS
from chunkrt.simulate.tune import NATURAL, PARTITIONS, SEARCHED, Setup, Tuned, tune

GGUF = str(checkpoint("llama_biased_gguf"))
SMALL = Shape(
    source="made up",
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=1000,
    context_length=512,
)
PROMPTS, CHUNKS = (64, 100), (32, 64)
MINE = {"first layer on cpu": {"model.layers.0": "cpu"}}


@pytest.fixture(scope="module", autouse=True, params=["few", pytest.param("all", marks=pytest.mark.slow)])
def searched(request: pytest.FixtureRequest) -> Iterator[None]:
    """Reduce the search to some policies and chunks in flight, or keep all."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "few":
            patch.setattr(search, "SEARCHED_POLICIES", search.SEARCHED_POLICIES[:2])
            patch.setattr(search, "CHUNKS_IN_FLIGHT", search.CHUNKS_IN_FLIGHT[:2])
        yield


@pytest.fixture(scope="module")
def tuned(searched: None) -> Tuned:
    return tune(SMALL, "sd8gen3", prompt_lengths=PROMPTS, chunk_lengths=CHUNKS, placements=MINE, workers=1)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A measured profile of the small checkpoint on this machine."""
    path = tmp_path_factory.mktemp("profile") / "here.toml"
    options = ["-o", str(path), "-r", "1", "--chunk", "8", "--threads", "2"]
    profile_command.main([GGUF, *options], standalone_mode=False)
    return path


@cache
def plan_of(partition: str) -> Plan:
    return SMALL.plan({**PARTITIONS, **MINE}[partition])


@cache
def by_hand(
    partition: str, attention: str, chunk_length: int, policy: str, in_flight: int | None
) -> tuple[float, int, float]:
    """Return the geometric mean of the times, the largest memory and the total energy of one choice; simulated here."""
    return figures_of(plan_of(partition), {**PARTITIONS, **MINE}[partition], attention, chunk_length, policy, in_flight)


def figures_of(
    plan: Plan, placement: Placement, attention: str, chunk_length: int, policy: str, in_flight: int | None
) -> tuple[float, int, float]:
    found = [
        simulate(
            plan,
            find_device("sd8gen3"),
            prompt_length=prompt,
            chunk_length=chunk_length,
            policy=policy,
            scheme="w8a16",
            near=near_plans_of(plan, placement, attention) if attention != "cpu" else {},
            chunks_in_flight=in_flight,
        )
        for prompt in PROMPTS
    ]
    time = geometric_mean(s.time_to_first_token_ms for s in found)
    return time, max(s.peak_memory_bytes for s in found), sum(s.energy_joules or 0.0 for s in found)


def grid() -> list[tuple[str, str, int, str, int | None]]:
    """Return all choices. Attention on the NPU has one policy; it needs its linears, norms and sums on the NPU."""
    names = {**PARTITIONS, **MINE}
    on_cpu = product(names, ["cpu"], CHUNKS, search.SEARCHED_POLICIES, search.CHUNKS_IN_FLIGHT)
    beside_linears = ("qkv_proj on cpu", "o_proj on cpu", "attention's linears on cpu")
    able = [name for name in names if name not in (*beside_linears, "norms, residuals on cpu", "all on cpu")]
    return [*on_cpu, *product(able, ["npu:512"], CHUNKS, ["look_ahead"], [None])]


def test_every_choice_has_the_figures_of_its_simulations(tuned: Tuned) -> None:
    for choice in tuned.choices:
        key = (choice.attention, choice.chunk_length, choice.policy, choice.chunks_in_flight)
        figures = (choice.time_ms, choice.peak_memory_bytes, choice.energy_joules)
        if choice.partition.startswith(SEARCHED):
            assert figures == figures_of(SMALL.plan(choice.placement), choice.placement, *key)
        else:
            assert figures == by_hand(choice.partition, *key)
    assert of_grid(tuned) == {*PARTITIONS, *MINE}
    assert {c.partition for c in tuned.choices} - of_grid(tuned) == {s.found.partition for s in tuned.searched}
    assert tuned.left_out == {}


def test_the_best_is_the_smallest_of_the_good_ones(tuned: Tuned) -> None:
    figures = [by_hand(*key) for key in grid()]
    assert tuned.num_simulated >= len(figures)
    searched = [c for c in tuned.choices if c.partition.startswith(SEARCHED)]
    figures += [(c.time_ms, c.peak_memory_bytes, c.energy_joules or 0.0) for c in searched]
    costs = [time * energy**0.1 for time, _, energy in figures]
    good = [figure for figure, cost in zip(figures, costs, strict=True) if cost <= (1 + TIE) * min(costs)]
    expected = min(good, key=lambda figure: (figure[1], figure[0]))
    assert (tuned.best.time_ms, tuned.best.peak_memory_bytes, tuned.best.energy_joules) == expected
    assert [c.time_ms for c in tuned.choices] == sorted(c.time_ms for c in tuned.choices)


@pytest.mark.parametrize("objective", ["energy", "edp"])
def test_objective_is_minimised(objective: str) -> None:
    found = tune(
        SMALL, "sd8gen3", prompt_lengths=PROMPTS, chunk_lengths=CHUNKS, placements=MINE, objective=objective, workers=1
    )
    costs = [energy * (time if objective == "edp" else 1) for time, _, energy in (by_hand(*key) for key in grid())]
    cost = (found.best.energy_joules or 0.0) * (found.best.time_ms if objective == "edp" else 1)
    assert cost <= (1 + TIE) * min(costs)


def test_much_energy_is_not_paid_for_little_time() -> None:
    """A choice that saves 2 % of the time for 44 % more energy costs more; one that saves 10 % for 44 % costs less."""
    options = {"partition": "natural", "placement": {}, "attention": "cpu", "chunk_length": 32, "policy": "in_order"}
    options |= {"chunks_in_flight": None, "times_ms": (100.0,), "p95_ms": 100.0, "peak_memory_bytes": 1}
    options |= {"quantisation": {"scheme": "w8a16"}, "num_shadows": 0, "mean_kl": None, "graphs": ""}
    usual = Setup(**options, time_ms=100.0, energy_joules=1.0)
    wasteful = replace(usual, times_ms=(98.0,), energy_joules=1.44)
    fast = replace(usual, times_ms=(90.0,), energy_joules=1.44)
    assert fast.cost("time") < usual.cost("time") < wasteful.cost("time")


def of_grid(tuned: Tuned) -> set[str]:
    """Return the partitions of the grid, which no search found."""
    return {c.partition for c in tuned.choices if not c.partition.startswith(SEARCHED)}


def test_the_bound_is_below_every_choice_and_the_gap_is_that_of_the_best(tuned: Tuned) -> None:
    assert tuned.bound is not None
    assert all(choice.cost("time") >= tuned.bound for choice in tuned.choices)
    assert tuned.gap == pytest.approx(tuned.best.cost("time") / tuned.bound - 1)
    for searched in tuned.searched:
        assert searched.bound >= tuned.bound
        assert searched.found.cost("time") >= searched.bound
        assert searched.rule is None or searched.found.cost("time") <= searched.rule.cost("time")
        placed = SMALL.plan(searched.found.placement)
        if searched.attention == "cpu":
            on_npu = sum(subgraph.device == "npu" for subgraph in placed.subgraphs)
            assert searched.found_cut[:2] == (on_npu, len(placed.subgraphs) - on_npu)


def test_p95_is_the_time_that_one_of_twenty_prompts_exceeds() -> None:
    lengths = [32] * 18 + [64, 500]
    found = tune(SMALL, "sd8gen3", prompt_lengths=lengths, chunk_lengths=[32, 64], objective="p95", workers=1)
    of_64 = [choice.times_ms[18] for choice in found.choices]
    assert found.best.cost("p95") == found.best.times_ms[18]
    assert found.best.times_ms[18] <= (1 + TIE) * min(of_64)


def waiting_p95_ms(arrivals_ms: list[float], service_ms: list[float]) -> float:
    """Return the 95th percentile of the times in a queue, by one event after another."""
    free_ms, times = 0.0, []
    for arrival_ms, own_ms in zip(arrivals_ms, service_ms, strict=True):
        free_ms = max(free_ms, arrival_ms) + own_ms
        times.append(free_ms - arrival_ms)
    return sorted(times)[ceil(0.95 * len(times)) - 1]


def test_p95_with_arrivals_counts_waiting() -> None:
    """At a high rate, the choice with the best tail of one prompt alone may be another one than with waiting."""
    options = {"prompt_lengths": [32, 500], "chunk_lengths": [32, 64], "objective": "p95", "workers": 1}
    alone = tune(SMALL, "sd8gen3", **options)
    rate = 0.7 / (sum(alone.best.times_ms) / 2e3)
    found = tune(SMALL, "sd8gen3", **options, arrivals=f"poisson:{rate}", seed=3)
    load = draw(f"poisson:{rate}", "1", "1", requests=NUM_ARRIVALS, context_length=2, seed=3)
    arrivals_ms = [(request.arrival_ns or 0.0) / 1e6 for request in load.requests]
    assert found.queue is not None
    for choice in found.choices:
        if rate * sum(choice.times_ms) / 2e3 >= 1:
            assert choice.p95_ms is None
        else:
            service_ms = [choice.times_ms[index] for index in found.queue.prompts]
            assert choice.p95_ms == pytest.approx(waiting_p95_ms(arrivals_ms, service_ms))
            assert choice.p95_ms > max(choice.times_ms)
    able = [choice.p95_ms for choice in found.choices if choice.p95_ms is not None]
    assert found.best.p95_ms == pytest.approx(min(able), rel=TIE)
    assert found.bound is not None
    assert found.bound <= min(able)
    assert "arrivals poisson:" in found.to_toml()
    seldom = tune(SMALL, "sd8gen3", **options, arrivals="poisson:0.001")
    assert seldom.best.p95_ms == pytest.approx(alone.best.p95_ms)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arrivals": "poisson:1e6"}, "no choice keeps up with 1e+06 requests per second: the fastest takes"),
        ({"arrivals": "poisson:0"}, "arrivals are 'poisson:0', expected poisson:RATE"),
        ({"arrivals": "closed"}, "arrivals are 'closed', expected poisson:RATE"),
        ({"arrivals": "poisson:x"}, "arrivals are 'poisson:x', expected poisson:RATE"),
        ({"arrivals": "poisson:1", "seed": -1}, "the seed is -1, expected 0 or more"),
        ({"arrivals": "poisson:1", "objective": "time"}, "arrivals count for the objective 'p95', not for 'time'"),
    ],
)
def test_wrong_arrivals_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tune(SMALL, "sd8gen3", **{"prompt_lengths": [64], "chunk_lengths": [32], "objective": "p95", **options})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_command_prints_overloaded_choices_and_the_rate(command, tmp_path: Path) -> None:
    options = ["--device", "sd8gen3", "-p", "100", "--chunk", "32", "--objective", "p95", "-o", tmp_path / "tuned.toml"]
    alone = json.loads(command("tune", GGUF, *options, "--json").out)
    rate = 990 / alone["default"]["time_ms"]
    slower = [choice for choice in alone["choices"] if choice["time_ms"] * rate > 1000]
    finished = command("tune", GGUF, *options, "--arrivals", f"poisson:{rate}", "--seed", "1", "--json")
    found = json.loads(finished.out)
    assert (found["arrivals"], found["seed"]) == (f"poisson:{rate}", 1)
    assert sum(choice["p95_ms"] is None for choice in found["choices"]) >= len(slower) > 0
    shown = command("tune", GGUF, *options, "--arrivals", f"poisson:{rate * 1.2}")
    assert "with arrivals poisson:" in shown.out.splitlines()[0]
    assert "overloaded" in shown.out


def quality(name: str, mean_kl: float, shadow: str | None = None, **others: object) -> Quality:
    found = Quality(
        source=f"{name}.json", scheme=with_shadow(name, shadow), mean_kl=mean_kl, checkpoint="", conditions=()
    )
    return replace(found, **others)


DOWN_PROJ = "*.down_proj.weight"
QUALITIES = [quality("w8a16", 0.006), quality("w8a8", 0.148), quality("w8a8", 0.044, DOWN_PROJ)]


@pytest.fixture(scope="module")
def of_qualities(searched: None) -> Tuned:
    return tune(SMALL, "sd8gen3", prompt_lengths=[100], chunk_lengths=[32], qualities=QUALITIES, workers=1)


def test_choices_have_the_divergence_and_the_figures_of_their_schemes(of_qualities: Tuned) -> None:
    found = {
        (c.quantisation["scheme"], c.quantisation.get("shadow"), c.num_shadows, c.mean_kl) for c in of_qualities.choices
    }
    assert found == {("w8a16", None, 0, 0.006), ("w8a8", None, 0, 0.148), ("w8a8", DOWN_PROJ, SMALL.num_layers, 0.044)}
    for choice in of_qualities.choices:
        if (choice.partition, choice.attention, choice.policy, choice.chunks_in_flight) == (
            *(NATURAL, "cpu", "look_ahead", None),
        ):
            scheme = with_shadow(choice.quantisation["scheme"], choice.quantisation.get("shadow"))
            [plan] = search.plans_of(SMALL, [{}], lambda what, done, total: None, scheme)
            own = simulate(
                plan, find_device("sd8gen3"), prompt_length=100, chunk_length=32, policy="look_ahead", scheme=scheme
            )
            assert (choice.time_ms, choice.peak_memory_bytes) == (
                pytest.approx(own.time_to_first_token_ms),
                own.peak_memory_bytes,
            )


def test_divergence_is_an_axis_of_the_pareto_front(of_qualities: Tuned) -> None:
    points = {(c.time_ms, c.peak_memory_bytes, c.energy_joules or 0.0, c.mean_kl or 0.0) for c in of_qualities.choices}
    front = {p for p in points if not any(q != p and all(a <= b for a, b in zip(q, p, strict=True)) for q in points)}
    assert {(c.time_ms, c.peak_memory_bytes, c.energy_joules, c.mean_kl) for c in of_qualities.pareto} == front
    assert len(of_qualities.pareto) == len(front)
    assert {c.mean_kl for c in of_qualities.pareto} > {0.006}
    assert max(c.time_ms for c in of_qualities.pareto if c.mean_kl == 0.006) > of_qualities.pareto[0].time_ms


def test_a_budget_leaves_the_schemes_within_it(of_qualities: Tuned) -> None:
    found = tune(SMALL, "sd8gen3", prompt_lengths=[100], chunk_lengths=[32], qualities=QUALITIES, budget=0.1, workers=1)
    assert {c.mean_kl for c in found.choices} == {0.006, 0.044}
    assert found.left_out == {"w8a8": "its mean KL of 0.148 exceeds the budget"}
    within = [c for c in of_qualities.choices if (c.mean_kl or 0.0) <= 0.1]
    assert found.best.cost("time") <= (1 + TIE) * min(c.cost("time") for c in within)
    least = tune(
        SMALL, "sd8gen3", prompt_lengths=[64], chunk_lengths=[32], qualities=QUALITIES, budget=0.006, workers=1
    )
    assert least.settings["scheme"] == "w8a16"
    assert "shadow" not in least.settings


@pytest.mark.parametrize(
    "options",
    [
        {"scheme": "w8a8", "shadow": "*.down_proj.weight,*.o_proj.weight"},
        {"scheme": "w8a8", "shadow": "all", "equalisation": "off"},
        {"scheme": "w4a16", "rotation": False, "rounding": "nearest"},
    ],
)
def test_settings_quantise_as_the_evaluated_model(options: dict[str, object]) -> None:
    evaluated = choose_recipe(chunkrt.EngineOptions(npu="qnn", **options), "w8a16").scheme
    found = tune(
        SMALL,
        "sd8gen3",
        prompt_lengths=[64],
        chunk_lengths=[32],
        qualities=[quality("w8a16", 0.1, scheme=evaluated)],
        workers=1,
    )
    names = chunkrt.EngineOptions.__dataclass_fields__
    own = chunkrt.EngineOptions(npu="qnn", **{key: value for key, value in found.settings.items() if key in names})
    assert choose_recipe(own, "w8a16").scheme == evaluated


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qualities": [], "budget": 0.1}, "`budget` needs measured divergences"),
        ({"budget": 0.001}, "no measured scheme stays within the budget of kl=0.001; the smallest divergence is 0.006"),
        ({"scheme": "w4a16"}, "the KL divergence of w4a16 is unknown"),
        ({"scheme": "w8a8", "shadow": "all"}, "the KL divergence of w8a8 with shadow all is unknown"),
        ({"qualities": [*QUALITIES, QUALITIES[0]]}, "w8a16.json and w8a16.json evaluate the same scheme"),
        (
            {"qualities": [QUALITIES[0], replace(QUALITIES[1], conditions=("other.txt",))]},
            "w8a8.json and w8a16.json have other texts, windows or bases",
        ),
        (
            {"qualities": [replace(q, checkpoint=name) for q, name in zip(QUALITIES, "abc", strict=True)]},
            "evaluate different checkpoints",
        ),
        (
            {"qualities": [quality("w8a8", 0.1, scheme=replace(with_shadow("w8a8", None), float_outputs=("*",)))]},
            "w8a8.json evaluates w8a8 with float outputs, which an NPU quantises",
        ),
        ({"qualities": [quality("w8a8-dynamic", 0.1)]}, "'w8a8-dynamic', which the NPU does not run"),
        (
            {"qualities": [quality("w8a8", 0.1, scheme=replace(with_shadow("w8a8", None), name="mixed"))]},
            "compile the model with --scheme mixed, and tune the engine directory",
        ),
        (
            {"qualities": [quality("w8a8", 0.1, scheme=replace(with_shadow("w8a8", None), wide=("*",)))]},
            "with linear layers that no options choose",
        ),
    ],
)
def test_an_unknown_divergence_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tune(SMALL, **{"device": "sd8gen3", "prompt_lengths": [64], "qualities": QUALITIES, **options})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def evaluations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Outputs of `chunkrt eval --json` under two schemes, by their names."""
    folder = tmp_path_factory.mktemp("evaluations")
    (folder / "text.txt").write_text("The prompt streams through both processors in chunks. " * 20)
    found = {}
    for name, options in (("w8a16", ["--scheme", "w8a16"]), ("shadowed", ["--scheme", "w8a8", "--shadow", DOWN_PROJ])):
        found[name] = folder / f"{name}.json"
        with found[name].open("w") as out, redirect_stdout(out):
            text = ["--text", str(folder / "text.txt"), "--window", "64", "--windows", "1"]
            eval_command.main([GGUF, *text, "--as-npu", *options, "--json"], standalone_mode=False)
    return found


def test_command_reads_evaluations_and_shows_their_divergences(command, evaluations, tmp_path: Path) -> None:
    measured = {
        name: json.loads(path.read_text())["text"]["figures"]["comparison"]["mean_kl"]
        for name, path in evaluations.items()
    }
    options = ["--device", "sd8gen3", "-p", "64", "--chunk", "32", "-o", tmp_path / "tuned.toml"]
    given = [part for path in evaluations.values() for part in ("--quality", path)]
    finished = command("tune", GGUF, *options, *given, "--budget", "kl=1", "--pareto")
    assert finished.status == 0, finished.err
    assert "KL  shadows" in finished.out
    assert f"{min(measured.values()):.4f}" in finished.out
    finished = command("tune", GGUF, *options, *given, "--scheme", "w8a8", "--json")
    found = json.loads(finished.out)
    assert {choice["mean_kl"] for choice in found["choices"]} == {measured["shadowed"]}
    assert {choice["num_shadows"] for choice in found["choices"]} == {2}
    assert read_settings(tmp_path / "tuned.toml")["shadow"] == DOWN_PROJ


def edited(evaluation: dict[str, Any], *keys: str, value: object) -> dict[str, Any]:
    """Return an evaluation with another value at a path of keys; None removes the key."""
    found = copy.deepcopy(evaluation)
    last = reduce(lambda inner, key: inner[key], keys[:-1], found)
    last[keys[-1]] = value
    if value is None:
        del last[keys[-1]]
    return found


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (["text", "figures", "comparison", "mean_kl"], float("nan"), "has a mean KL divergence of nan"),
        (["text", "figures", "comparison", "mean_kl"], "small", "is not an output of `chunkrt eval --json`"),
        (["text", "figures", "comparison"], None, "is not an output of `chunkrt eval --json`"),
        (["text", "base"], 0, "is not an output of `chunkrt eval --json`"),
        (["run", "quantisation"], None, "does not record the quantisation of its model"),
        (["run", "quantisation", "weight_bits"], 5, "is not an output of `chunkrt eval --json`"),
    ],
)
def test_a_damaged_evaluation_is_one_line(evaluations, tmp_path: Path, keys, value: object, message: str) -> None:
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(edited(json.loads(evaluations["w8a16"].read_text()), *keys, value=value)))
    with pytest.raises(ConfigError) as caught:
        read_quality(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_evaluation_without_a_base_has_no_divergence(evaluations, tmp_path: Path) -> None:
    evaluation = json.loads(evaluations["w8a16"].read_text())
    evaluation["text"]["base"] = evaluation["text"]["figures"]["comparison"] = None
    (tmp_path / "edited.json").write_text(json.dumps(evaluation))
    with pytest.raises(ConfigError, match="has no KL divergence; run `chunkrt eval` with --text FILE and a base"):
        read_quality(tmp_path / "edited.json")


def test_command_refuses_evaluations_of_another_checkpoint(command, evaluations, tmp_path: Path) -> None:
    options = ["--device", "sd8gen3", "-o", tmp_path / "tuned.toml", "--quality", evaluations["w8a16"]]
    expect_one_line(command("tune", checkpoint("lfm2"), *options), "evaluates another checkpoint", 1)


def test_an_engine_directory_has_the_divergence_of_its_own_scheme(command, evaluations, tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    command("compile", GGUF, "-o", folder, "--scheme", "w8a16")
    options = ["--device", "sd8gen3", "-p", "64", "--chunk", "32", "-o", tmp_path / "tuned.toml", "--json"]
    finished = command("tune", folder, *options, "--quality", evaluations["w8a16"])
    assert finished.status == 0, finished.err
    assert None not in {choice["mean_kl"] for choice in json.loads(finished.out)["choices"]}
    finished = command("tune", folder, *options, "--quality", evaluations["shadowed"])
    assert finished.status == 1
    assert "the KL divergence of w8a16 is unknown" in finished.err


def test_default_choice_is_the_engines_default(tuned: Tuned) -> None:
    options = chunkrt.EngineOptions()
    assert tuned.default.placement == {}
    assert tuned.default.partition == NATURAL
    assert (tuned.default.chunk_length, tuned.default.policy) == (32, options.policy)
    assert tuned.default.chunks_in_flight is options.chunks_in_flight is None
    assert tuned.default in tuned.choices


def test_a_memory_limit_is_kept(tuned: Tuned) -> None:
    limit = tuned.best.peak_memory_bytes - 1
    within = tune(SMALL, "sd8gen3", prompt_lengths=PROMPTS, chunk_lengths=CHUNKS, memory_bytes=limit, workers=1)
    assert within.best.peak_memory_bytes <= limit
    assert within.best.time_ms >= tuned.best.time_ms
    with pytest.raises(ConfigError, match=r"no choice stays within 0.001 MB, the smallest takes \d"):
        tune(SMALL, "sd8gen3", prompt_lengths=[64], chunk_lengths=[32], memory_bytes=1000, workers=1)


def test_settings_file_has_the_choice_and_its_conditions(tuned: Tuned, tmp_path: Path) -> None:
    path = tmp_path / "tuned.toml"
    path.write_text(tuned.to_toml(), encoding="utf-8")
    settings = read_settings(path)
    assert settings == tuned.settings
    assert settings["soc"] == "SM8650"
    assert settings["chunk_length"] == tuned.best.chunk_length
    assert settings.get("placement", {}) == tuned.best.placement
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
    for part in ("Snapdragon 8 Gen 3", "64, 100 tokens", "no limit", f"{tuned.best.time_ms:.1f} ms"):
        assert any(part in comment for comment in comments), part


@pytest.mark.parametrize(("device", "soc"), [("SM8850+executorch", "SM8850"), ("SM8735", None), ("profile", "SM8650")])
def test_a_simulation_reads_the_device_of_a_settings_file(
    command, tmp_path: Path, device: str, soc: str | None
) -> None:
    if device == "profile":
        device = str(tmp_path / "mine.toml")
        bundled = Path(search.__file__).parent / "devices" / "sd8gen3.toml"
        text = bundled.read_text(encoding="utf-8").replace('name = "Snapdragon 8 Gen 3"', 'name = "mine"')
        Path(device).write_text(text, encoding="utf-8")
    path = tmp_path / "tuned.toml"
    options = ["-p", "64", "--chunk", "32", "--objective", "energy", "--json"]
    tuned = command("tune", GGUF, "--device", device, "-o", path, *options)
    assert tuned.status == 0, tuned.err
    best = json.loads(tuned.out)["best"]
    assert read_settings(path).get("soc") == soc
    again = command("simulate", GGUF, "--settings", path, "-p", "64", "--json")
    assert again.status == 0, again.err
    [row] = json.loads(again.out)
    assert row["device"] == json.loads(tuned.out)["device"]
    assert row["time_to_first_token_ms"] == pytest.approx(best["time_ms"])
    other = command("simulate", GGUF, "--settings", path, "--device", "sdxelite", "-p", "64", "--json")
    assert json.loads(other.out)[0]["device"] == find_device("sdxelite").name


def test_partitions_that_the_npu_refuses_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "PARTITIONS", {NATURAL: {}, "look-up on npu": {"model.embed_tokens": "npu"}})
    found = tune(SMALL, "sd8gen3", prompt_lengths=[64], chunk_lengths=[32], workers=1)
    assert of_grid(found) == {NATURAL}
    assert "the NPU does not support Gather" in found.left_out["look-up on npu"]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "gemma3_window_5"])
def test_every_partition_is_one_of_any_family(name: str) -> None:
    found = tune(str(checkpoint(name)), "sd8gen3", prompt_lengths=[40], chunk_lengths=[32], workers=1)
    assert found.left_out == {}
    assert of_grid(found) == set(PARTITIONS)
    assert len({c.times_ms for c in found.choices if c.partition not in (NATURAL, "norms on cpu")}) > 5


def test_a_device_with_an_idle_npu_is_tuned_for_its_cpu() -> None:
    found = tune(SMALL, "SM8850+llama.cpp", prompt_lengths=[64], chunk_lengths=[32, 64], workers=1)
    assert {(choice.attention, choice.partition) for choice in found.choices} == {("cpu", NATURAL)}
    assert found.best.time_ms == min(choice.time_ms for choice in found.choices)


def test_without_power_figures_the_objective_is_the_time() -> None:
    device = find_device("sd8gen3")
    idle = {"npu": replace(device.npu, busy_watts=0.0), "cpu": replace(device.cpu, busy_watts=0.0)}
    device = replace(device, **idle, idle_watts=0.0, memory=replace(device.memory, pj_per_byte=0.0))
    found = tune(SMALL, device, prompt_lengths=[64], chunk_lengths=[32], workers=1)
    assert found.best.time_ms <= 1.01 * min(choice.time_ms for choice in found.choices)
    assert found.gap is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "sd8gen"}, "unknown device 'sd8gen'"),
        ({"scheme": "float"}, "the NPU runs no linear layers under the scheme 'float'"),
        ({"prompt_lengths": [513]}, "prompt_lengths: 513, expected a whole number of 1 to 512"),
        ({"prompt_lengths": []}, "prompt_lengths is empty"),
        ({"chunk_lengths": [0]}, "chunk_lengths: 0"),
        ({"chunk_lengths": []}, "chunk_lengths is empty"),
        ({"placements": {"mine": {"lm_haed": "npu"}}}, "did you mean 'lm_head'"),
        ({"scheme": "mixed"}, "depends on a search over a model's weights"),
        ({"device": "SM8850+llama.cpp", "placements": {"mine": {}}}, "leaves the NPU idle, so placements make no"),
    ],
)
def test_bad_input_is_one_clear_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tune(SMALL, **{"device": "sd8gen3", **options})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_command_prints_a_table_and_writes_a_file_that_runs(command, tmp_path: Path) -> None:
    path = tmp_path / "tuned.toml"
    finished = command("tune", GGUF, "--device", "sd8gen3", "-p", "100", "--chunk", 32, "--chunk", 64, "-o", path)
    assert finished.status == 0, finished.err
    assert finished.out.count("chosen") == 1 + finished.out.splitlines()[0].count("chosen")
    assert "default" in finished.out
    assert list(tmp_path.iterdir()) == [path]
    settings = read_settings(path)
    ran = command("bench", GGUF, "-p", "20", "-n", "0", "-r", "1", "-o", "json", "--settings", path)
    [row] = json.loads(ran.out)
    assert (row["scheme"], row["chunk"]) == (settings["scheme"], settings["chunk_length"])


def test_a_mix_of_prompts_is_a_file_or_drawn(command, tmp_path: Path) -> None:
    mix = tmp_path / "prompts.txt"
    mix.write_text("20\n64\n20\n")
    for prompts, expected in ((str(mix), 3), ("uniform:10:60", 20)):
        options = ["-p", prompts, "--chunk", "32", "--objective", "p95", "-o", tmp_path / "tuned.toml"]
        finished = command("tune", GGUF, "--device", "sd8gen3", *options, "--json")
        assert finished.status == 0, finished.err
        found = json.loads(finished.out)
        assert len(found["prompt_lengths"]) == expected
        assert all(len(choice["times_ms"]) == expected for choice in found["choices"])


def test_command_prints_the_partitions_of_rule_and_optimiser_and_the_front(command, tmp_path: Path) -> None:
    path = tmp_path / "tuned.toml"
    finished = command(
        "tune", str(checkpoint("lfm2")), "--device", "sd8gen3", "-p", "60", "--chunk", "32", "-o", path, "--pareto"
    )
    assert finished.status == 0, finished.err
    assert "partitions by the rule and by the optimiser" in finished.out
    assert "searched 1" in finished.out
    assert "of a lower bound over all partitions" in finished.out


def test_a_list_of_layers_is_searched_as_the_same_placement_in_a_file(command, tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('"model.layers.*" = "cpu"\n"model.layers.1" = "npu"\n')
    out = tmp_path / "tuned.toml"
    options = ["--chunk", "32", "-p", "20", "--json", "--memory", "1 GiB", "--place", "layers=1", "--place", mine]
    finished = command("tune", GGUF, "--device", "sdxelite", "-o", out, *options)
    assert finished.status == 0, finished.err
    found = json.loads(finished.out)
    assert (found["settings"], found["memory_bytes"]) == (read_settings(out), 2**30)
    of = {
        name: [
            {key: value for key, value in choice.items() if key != "partition"}
            for choice in found["choices"]
            if choice["partition"] == name
        ]
        for name in ("layers=1", str(mine))
    }
    assert of["layers=1"] == of[str(mine)] != []
    assert of["layers=1"][0]["placement"] == {"model.layers.*": "cpu", "model.layers.1": "npu"}
    assert {choice["attention"] for choice in of["layers=1"]} == {"npu:512"}
    options = ["--device", "sdxelite", "-p", "20", "--chunk", "32", "--place", "layers=1", "--json"]
    [alone] = json.loads(command("simulate", GGUF, *options).out)
    assert of["layers=1"][0]["time_ms"] == pytest.approx(alone["time_to_first_token_ms"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-o", "tuned.json"], "expected a name that ends in .toml"),
        (["-o", "nowhere/tuned.toml"], "there is no folder"),
        (["--device", "sd9"], "unknown device 'sd9'"),
        (["-p", "x.txt"], "-p is 'x.txt', expected numbers of at least 1, separated by commas, e.g. 64,256; uniform:"),
        (["-p", "x.txt"], "or a file; there is no such file"),
        (["-p", "0,64"], "-p is '0,64', expected numbers of at least 1"),
        (["--chunk", "0"], "--chunk is '0', expected numbers of tokens, at least 1"),
        (["--chunk", "1000"], "--chunk: 1000, expected a whole number of 1 to 128"),
        (["--memory", "much"], "--memory is 'much', expected a size above 0, e.g. 2GB"),
        (["--memory", "0GB"], "--memory is '0GB'"),
        (["--seed", "1"], "--seed is for random arrivals; give --arrivals"),
        (["--arrivals", "poisson:1"], "arrivals count for the objective 'p95', not for 'time'"),
        (["--budget", "kl=0.1"], "--budget needs measured divergences; give --quality FILE"),
        (["--budget", "0", "--quality", __file__], "--budget is '0', expected a number of nats above 0"),
        (["--quality", "nowhere.json"], "nowhere.json: No such file"),
        (["--quality", __file__], "is not an output of `chunkrt eval --json`"),
        (["--memory", "0.01MB", "--chunk", "32"], "no choice stays within 0.01 MB, the smallest takes "),
        (["--place", "nowhere.toml"], "cannot read the placement file"),
        (["--place", "layers=a"], "the placement is 'layers=a', expected numbers of layers"),
        (["--place", "layers=7"], "model.layers.7"),
        (["--scheme", "w8a8-dynamic"], "use a static one"),
        (["--dask", "nonsense"], "found no Dask scheduler at 'nonsense'"),
    ],
)
def test_a_wrong_command_prints_one_line_and_writes_nothing(command, tmp_path: Path, options, message: str) -> None:
    if "--dask" in options:
        pytest.importorskip("distributed", reason="distributed is not installed")
    options = [str(tmp_path / option) if option.startswith(("tuned", "nowhere")) else option for option in options]
    expect_one_line(
        command("tune", GGUF, "--device", "sd8gen3", "-p", "64", "-o", tmp_path / "tuned.toml", *options), message, 1
    )
    assert not list(tmp_path.iterdir())


def test_a_measured_profile_fixes_all_but_policy_and_chunks_in_flight(command, profile: Path, tmp_path: Path) -> None:
    out = tmp_path / "tuned.toml"
    finished = command("tune", GGUF, "--device", profile, "-p", "100", "-o", out, "--json")
    assert finished.status == 0, finished.err
    assert "only policy and chunks in flight were searched" in finished.err
    found = json.loads(finished.out)
    assert {(c["partition"], c["chunk_length"]) for c in found["choices"]} == {(NATURAL, 8)}
    settings = read_settings(out)
    assert (settings["scheme"], settings["chunk_length"], settings["threads"]) == ("w8a8-dynamic", 8, 2)
    assert not settings.keys() & {"soc", "placement"}


def test_a_measured_profile_has_a_p95_but_no_energy(profile: Path) -> None:
    found = tune(GGUF, str(profile), prompt_lengths=[20, 64], objective="p95", workers=1)
    assert found.best.p95_ms == max(found.best.times_ms)
    assert found.best.p95_ms <= (1 + TIE) * min(max(choice.times_ms) for choice in found.choices)
    with pytest.raises(ConfigError, match="has no power figures, which the objective 'edp' needs"):
        tune(GGUF, str(profile), prompt_lengths=[20], objective="edp", workers=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "w8a16"}, "was measured with scheme w8a8-dynamic and chunks of 8, not w8a16"),
        ({"chunk_lengths": [8, 32]}, "and chunks of 8, not 32; omit the chunk length"),
        ({"placements": MINE}, "its placement is fixed too, omit other placements"),
    ],
)
def test_measured_profile_refuses_other_choices(profile: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tune(GGUF, str(profile), prompt_lengths=[64], **options)


def test_an_engine_directory_keeps_its_scheme_and_its_partition(command, tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    command("compile", GGUF, "-o", folder, "--scheme", "w8a16")
    found = tune(str(folder), "sd8gen3", prompt_lengths=[100], workers=1)
    assert found.settings["scheme"] == "w8a16"
    assert {c.partition for c in found.choices} == {NATURAL}
    assert {c.chunk_length for c in found.choices} == {32, 64, 96, 128}
    with pytest.raises(ConfigError, match="was compiled under w8a16, not w8a8"):
        tune(str(folder), "sd8gen3", prompt_lengths=[100], scheme="w8a8")


def test_an_engine_directory_that_the_npu_does_not_run_is_refused(command, tmp_path: Path) -> None:
    """Without a SoC, `w8a8` has outputs in float."""
    folder = tmp_path / "engine"
    command("compile", GGUF, "-o", folder, "--scheme", "w8a8")
    expect_one_line(
        command("tune", folder, "--device", "sd8gen3", "-o", tmp_path / "tuned.toml"),
        "was compiled under w8a8, which the NPU does not run: MatMul of u8 by s8 into float32",
        1,
    )


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Scheme]:
    """An engine directory for which a search chose the bits of each layer, and its scheme."""
    folder = tmp_path_factory.mktemp("mixed") / "engine"
    compile_command.main([GGUF, "-o", str(folder), "--scheme", "mixed", "--budget", "kl=0.0003"], standalone_mode=False)
    scheme = read_manifest(folder).scheme
    assert scheme.wide or scheme.shadowed
    return folder, scheme


def test_an_engine_directory_of_a_mixed_scheme_has_the_bits_of_its_layers(mixed, tmp_path: Path) -> None:
    folder, scheme = mixed
    plan = read_plan(folder)
    found = tune(str(folder), "sd8gen3", prompt_lengths=[100], workers=1)
    assert {choice.quantisation["scheme"] for choice in found.choices} == {"mixed"}
    choice = next(c for c in found.choices if c.attention == "cpu" and c.chunks_in_flight is None)
    options = {"prompt_length": 100, "chunk_length": choice.chunk_length, "policy": choice.policy}
    times = [
        simulate(plan, find_device("sd8gen3"), scheme=each, **options).time_to_first_token_ms
        for each in (scheme, find_scheme("w8a8"))
    ]
    assert choice.time_ms == pytest.approx(times[0])
    assert times[0] != times[1]
    (tmp_path / "tuned.toml").write_text(found.to_toml())
    with chunkrt.load(folder, **{**read_settings(tmp_path / "tuned.toml"), "npu": "auto"}) as engine:
        assert engine.scheme == scheme


def test_an_engine_directory_of_a_mixed_scheme_has_its_divergence(mixed, tmp_path: Path) -> None:
    folder, scheme = mixed
    options = {"prompt_lengths": [100], "chunk_lengths": [32], "workers": 1}
    measured = quality("w8a8", 0.125, scheme=scheme)
    assert tune(str(folder), "sd8gen3", qualities=[measured], **options).best.mean_kl == 0.125
    with pytest.raises(ConfigError, match="the KL divergence of mixed is unknown"):
        tune(str(folder), "sd8gen3", qualities=[quality("w8a8", 0.125)], **options)


@pytest.mark.parametrize(
    ("placed", "attentions"),
    [
        ("layers=1", {True}),  # the attention of such layers too, for chunks within the window
        ('"model.layers.*.mlp" = "cpu"', {False, True}),
        ('"model.layers.1.self_attn" = "npu"', {True}),
    ],
)
def test_an_engine_directory_keeps_its_placement(command, tmp_path: Path, placed: str, attentions: set[bool]) -> None:
    folder, tuned = tmp_path / "engine", tmp_path / "tuned.toml"
    (tmp_path / "place.toml").write_text(placed)
    place = placed if placed.startswith("layers") else tmp_path / "place.toml"
    made = command("compile", GGUF, "-o", folder, "--scheme", "w8a8", "--soc", "SM8650", "--place", place)
    assert made.status == 0, made.err
    options = ("--device", "sd8gen3", "-p", 100, "--chunk", 32, "--json")
    found = command("tune", folder, *options, "-o", tuned)
    assert found.status == 0, found.err
    best, choices = (json.loads(found.out)[key] for key in ("best", "choices"))
    assert {choice["partition"] for choice in choices} == {NATURAL}
    assert {choice["attention"] != "cpu" for choice in choices} == attentions
    [row] = json.loads(command("simulate", folder, "--settings", tuned, *options).out)
    assert row["time_to_first_token_ms"] == pytest.approx(best["time_ms"])
    with chunkrt.load(folder, **{**read_settings(tuned), "npu": "native", "soc": None, "attention": "auto"}) as engine:
        assert engine.chunk_length == 32
