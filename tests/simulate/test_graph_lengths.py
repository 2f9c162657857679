"""Graphs of several lengths on the NPU, and windows that slide: predictions of their rows, costs and memory."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from fixture_checkpoints import checkpoint
from free_device import free_device
from measured_profiles import toy_profile
from one_line import expect_one_line
from small_shape import SMALL_SHAPE

import chunkrt
from chunkrt.backends.qnn.socs import GB, SOCS
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.engine.npu_attention import near_by_reach
from chunkrt.engine.options import EngineOptions
from chunkrt.errors import ConfigError
from chunkrt.graph.placement import Placement
from chunkrt.graph.plan import Plan
from chunkrt.quant.scheme import SCHEMES
from chunkrt.runtime.record import RunRecord
from chunkrt.runtime.trace.file import read_trace, write_trace
from chunkrt.simulate import DeviceProfile, Simulation, find_device, simulate
from chunkrt.simulate.arrivals import draw
from chunkrt.simulate.fit import Fit, find_remedy, fit_plan
from chunkrt.simulate.learn import learn_costs
from chunkrt.simulate.measured import write_measured
from chunkrt.simulate.serving import simulate_serving
from chunkrt.simulate.tune import tune

GGUF = str(checkpoint("llama_biased_gguf"))
LENGTHS = (1, 8, 32)
OPTIONS: dict[str, Any] = {"chunk_length": 32, "policy": "in_order", "scheme": "w8a16"}
HEAD_ON_NPU: Placement = {"lm_head": "npu"}


@pytest.fixture(scope="module")
def multiplying(device: DeviceProfile) -> DeviceProfile:
    """A device that takes a microsecond for 1,000 operations of a linear on the NPU, and no time for anything else."""
    return free_device(device, npu={"linear_a16": {"gops": 1.0}})


def rows_by_call(simulation: Simulation | Sequence[RunRecord]) -> Counter[int]:
    """Count the calls of NPU graphs by their rows, as an executor with the records' pipelines makes them."""
    records = simulation.records if isinstance(simulation, Simulation) else simulation
    counted: Counter[int] = Counter()
    for record in records:
        for event in record.events:
            if event.processor == "npu":
                done = event.task.chunk * record.pipeline.chunk_length
                num_tokens = min(record.pipeline.chunk_length, record.num_tokens - done)
                counted[record.pipeline.rows_on_npu(num_tokens)] += 1
    return counted


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 9, 32, 33, 37, 41, 100])
def test_rows_on_the_npu_are_those_of_a_recorded_run(fake_npu: ModuleType, tmp_path: Path, num_tokens: int) -> None:
    options = {"npu": fake_npu.SEVERAL, "chunk_length": 32, "scheme": "w8a16", "decode_on": "npu"}
    records: list[RunRecord] = []
    with chunkrt.load(GGUF, threads=1, prefix_cache="off", **options) as engine, engine.session() as session:
        session.on_run = records.append
        engine.loaded.npu_backend.rows_run.clear()
        session.prefill(list(range(3, 3 + num_tokens)))
        ran = Counter(engine.loaded.npu_backend.rows_run)
        plan, scheme = engine.plan, engine.scheme
    write_trace(tmp_path / "trace.json", records, "run")
    (record,) = read_trace(tmp_path / "trace.json")
    assert record.pipeline.graph_lengths == LENGTHS
    found = simulate(
        plan,
        find_device("sd8gen3"),
        prompt_length=record.num_tokens,
        chunk_length=record.pipeline.chunk_length,
        graph_lengths=record.pipeline.graph_lengths,
        policy=record.pipeline.policy,
        scheme=scheme,
    )
    assert found.graph_lengths == LENGTHS
    assert rows_by_call(found) == rows_by_call([record]) == ran
    chunks = [32] * (num_tokens // 32) + [n for n in (num_tokens % 32,) if n]
    computed = [next(length for length in LENGTHS if count <= length) for count in chunks]
    assert found.padding == pytest.approx(1 - num_tokens / sum(computed))


def test_head_on_the_npu_runs_the_graph_of_the_rows_that_need_logits(fake_npu: ModuleType) -> None:
    options = {"npu": fake_npu.SEVERAL, "chunk_length": 32, "scheme": "w8a16", "placement": HEAD_ON_NPU}
    with chunkrt.load(GGUF, threads=1, prefix_cache="off", **options) as engine, engine.session() as session:
        engine.loaded.npu_backend.rows_run.clear()
        session.prefill(list(range(3, 40)))
        ran = Counter(engine.loaded.npu_backend.rows_run)
    assert ran[1] == 1


def linear_flops(plan: Plan, *, rows: str = "T") -> dict[str, int]:
    """Return the operations per row of the NPU's linears, by subgraph."""
    found: dict[str, int] = {}
    for subgraph in plan.subgraphs:
        if subgraph.device == "npu" and subgraph.rows == rows:
            weights = {node.inputs[1] for node in subgraph.nodes if node.op == "MatMul"}
            found[subgraph.name] = sum(2 * int(np.prod(np.array(plan.tensors[name].shape))) for name in weights)
    return found


LAYER = 2 * (64 * (64 + 32 + 32) + 64 * 64 + 64 * 2 * 96 + 96 * 64)
AFTER_ATTENTION = LAYER - 2 * 64 * (64 + 32 + 32)
"""Operations per row of a layer of SMALL_SHAPE, and of its part after attention, which chunks without logits skip in
the last layer."""


@pytest.mark.parametrize(
    ("num_tokens", "without", "last"),
    [(1, 0, 1), (5, 0, 8), (8, 0, 8), (9, 0, 32), (33, 1, 1), (37, 1, 8), (64, 1, 32), (65, 2, 1)],
)
def test_chunks_cost_the_rows_of_their_graphs(
    plan: Plan, multiplying: DeviceProfile, num_tokens: int, without: int, last: int
) -> None:
    found = simulate(plan, multiplying, prompt_length=num_tokens, graph_lengths=LENGTHS, **OPTIONS)
    assert sum(linear_flops(plan).values()) == 2 * LAYER
    operations = without * 32 * (2 * LAYER - AFTER_ATTENTION) + last * 2 * LAYER
    assert found.makespan_ms * 1e6 == pytest.approx(operations, abs=40)
    one = simulate(plan, multiplying, prompt_length=num_tokens, **OPTIONS)
    operations = without * 32 * (2 * LAYER - AFTER_ATTENTION) + 32 * 2 * LAYER
    assert one.makespan_ms * 1e6 == pytest.approx(operations, abs=40)


def test_head_on_the_npu_costs_one_row(multiplying: DeviceProfile) -> None:
    plan = SMALL_SHAPE.plan(HEAD_ON_NPU)
    head = 2 * SMALL_SHAPE.hidden_size * SMALL_SHAPE.vocab_size
    found = simulate(plan, multiplying, prompt_length=5, graph_lengths=LENGTHS, **OPTIONS)
    assert found.makespan_ms * 1e6 == pytest.approx(8 * 2 * LAYER + head, abs=40)
    one = simulate(plan, multiplying, prompt_length=5, **OPTIONS)
    assert one.makespan_ms * 1e6 == pytest.approx(32 * (2 * LAYER + head), abs=40)


def test_every_graph_is_a_context_with_its_own_weights(plan: Plan, device: DeviceProfile) -> None:
    one = simulate(plan, device, prompt_length=40, **OPTIONS)
    several = simulate(plan, device, prompt_length=40, graph_lengths=LENGTHS, **OPTIONS)
    on_npu = sum(subgraph.device == "npu" for subgraph in plan.subgraphs)
    assert (one.contexts, several.contexts) == (on_npu, 3 * on_npu)
    weights = 2 * (LAYER // 2)  # a byte for each weight of two layers
    scales = several.peak_memory_bytes - one.peak_memory_bytes - 2 * weights
    assert 0 < scales < weights / 5  # scales of columns, and norms


def test_lengths_with_equal_graphs_count_once(plan: Plan, device: DeviceProfile) -> None:
    found = simulate(plan, device, prompt_length=40, graph_lengths=(1, 2, 32, 64), **OPTIONS)
    assert found.graph_lengths == (2, 32)
    with_8_bits = simulate(plan, device, prompt_length=40, graph_lengths=LENGTHS, **(OPTIONS | {"scheme": "w8a8"}))
    assert with_8_bits.graph_lengths == ()
    assert with_8_bits == simulate(plan, device, prompt_length=40, **(OPTIONS | {"scheme": "w8a8"}))
    with pytest.raises(ConfigError, match="a graph length is 0, expected at least 1"):
        simulate(plan, device, prompt_length=40, graph_lengths=(0, 32), **OPTIONS)


@pytest.mark.parametrize(("sessions", "rows"), [(1, 1), (4, 8)])
def test_tokens_decode_on_the_npu_in_small_graphs(
    plan: Plan, multiplying: DeviceProfile, sessions: int, rows: int
) -> None:
    """All prompts of 8 tokens share the first chunk; then each token runs in a graph of 1 or of 8 rows."""
    load = draw("closed", "8", "3", requests=sessions, context_length=512)
    found = simulate_serving(
        plan, multiplying, load, sessions=sessions, decode_on="npu", graph_lengths=LENGTHS, **OPTIONS
    )
    assert found.graph_lengths == LENGTHS
    first = 8 if sessions == 1 else 32
    assert found.chunks == 3
    assert found.padding == pytest.approx(1 - sessions * 10 / (first + 2 * rows))
    assert found.seconds * 1e9 == pytest.approx((first + 2 * rows) * 2 * LAYER, rel=1e-3)
    assert found.gap_ms is not None
    assert found.gap_ms.mean * 1e6 == pytest.approx(rows * 2 * LAYER, rel=1e-3)
    assert {record.pipeline.graph_lengths for record in found.records()} == {LENGTHS}


def near(plan: Plan, **options: Any) -> dict[int, Plan]:
    return near_by_reach(plan, {}, EngineOptions(npu="qnn", attention="npu", **options), plan.context_length)


def test_windows_that_slide_keep_all_chunks_on_the_npu(plan: Plan, device: DeviceProfile) -> None:
    slides, moves = near(plan, npu_window="64", npu_sinks=4), near(plan, npu_window="64")
    assert (list(slides), list(moves)) == ([512], [64])
    found = simulate(plan, device, prompt_length=230, near=slides, **OPTIONS)
    other = simulate(plan, device, prompt_length=230, near=moves, **OPTIONS)
    assert [record.num_tokens for record in found.records] == [32] * 7 + [6]
    assert [record.num_tokens for record in other.records] == [32] * 3 + [134]
    times = [record.end_ns - record.start_ns for record in found.records[:-1]]
    assert max(times) == pytest.approx(min(times))  # each reads the same number of slots
    assert other.contexts > found.contexts == sum(s.device == "npu" for s in slides[512].subgraphs)
    tail = simulate(plan, device, prompt_length=230, near=slides, graph_lengths=LENGTHS, **OPTIONS)
    assert tail.padding == pytest.approx(1 - 230 / (7 * 32 + 8))
    assert tail.records[-1].end_ns - tail.records[-1].start_ns < found.records[-1].end_ns - found.records[-1].start_ns


def fit(plan: Plan, lengths: tuple[int, ...], scheme: str = "w8a16", *, ram: int = 64 * GB, **options: Any) -> Fit:
    given = EngineOptions(npu="qnn", **options)
    return fit_plan(
        plan,
        SCHEMES[scheme],
        SOCS["SM8650"],
        chunk_length=lengths[-1],
        graph_lengths=lengths,
        context_length=plan.context_length,
        ram_bytes=ram,
        options=given,
    )


def test_fit_counts_the_weights_and_buffers_of_every_graph(plan: Plan) -> None:
    one, several = fit(plan, (32,)), fit(plan, LENGTHS)
    assert [context.rows for context in several.contexts][:3] == [2, 8, 32]
    assert len(several.contexts) == 3 * len(one.contexts)
    assert len({context.name for context in several.contexts}) == len(several.contexts)
    for name in ("weight_bytes", "edge_bytes"):
        of_one, of_several = (sum(getattr(c, name) for c in each.contexts) for each in (one, several))
        rows = 3 if name == "weight_bytes" else (2 + 8 + 32) / 32
        assert of_several == pytest.approx(rows * of_one, abs=0)
    assert several.cpu_weight_bytes == one.cpu_weight_bytes
    assert several.chunk_bytes == one.chunk_bytes
    assert several.cache_bytes == one.cache_bytes


def test_fit_counts_contexts_that_lengths_share_once(plan: Plan) -> None:
    assert fit(plan, (1, 2, 32)) == fit(plan, (2, 32))
    assert fit(plan, LENGTHS, "w8a8") == fit(plan, (32,), "w8a8")
    assert fit(plan, LENGTHS, "w8a8").graph_lengths == ()


def test_fit_counts_windows_that_slide_without_the_graphs_of_the_cpus_attention(plan: Plan) -> None:
    slides = fit(plan, (32,), attention="npu", npu_window="64", npu_sinks=4)
    moves = fit(plan, (32,), attention="npu", npu_window="64")
    assert 2 * sum(c.weight_bytes for c in slides.contexts) == sum(c.weight_bytes for c in moves.contexts)


def test_remedy_drops_graphs_first(plan: Plan) -> None:
    large = replace(SMALL_SHAPE, hidden_size=2048, intermediate_size=8192, num_layers=8, num_heads=128).plan()
    one, several = fit(large, (32,)), fit(large, LENGTHS)
    ram = 2 * (one.total_bytes + several.total_bytes) // 2
    crowded = fit(large, LENGTHS, ram=int(ram / 1.2))
    assert crowded.problems
    assert find_remedy(large, SCHEMES["w8a16"], crowded) == "--chunk 32"


def test_experiment_takes_several_lengths_and_windows_that_slide(plan: Plan, device: DeviceProfile) -> None:
    grid = {"devices": ["sd8gen3"], "schemes": ["w8a16"], "prompt_lengths": [200], "workers": 1}
    rows = chunkrt.experiment(
        SMALL_SHAPE,
        chunk_lengths=[32, "1,8,32"],
        policies=["in_order"],
        attentions=["cpu", "npu:64:sinks=4", "npu:64"],
        **grid,
    )
    assert [(row.attention, row.chunk_length, row.graphs) for row in rows] == [
        (attention, 32, graphs) for attention in ("cpu", "npu:64:sinks=4", "npu:64") for graphs in ("", "1,8,32")
    ]
    nears = {"cpu": {}, "npu:64:sinks=4": near(plan, npu_window="64", npu_sinks=4), "npu:64": near(plan, npu_window=64)}
    for row in rows:
        lengths = LENGTHS if row.graphs else ()
        own = simulate(plan, device, prompt_length=200, near=nears[row.attention], graph_lengths=lengths, **OPTIONS)
        assert row.time_to_first_token_ms == own.time_to_first_token_ms
        assert row.peak_memory_bytes == own.peak_memory_bytes
    for chunks, message in (["8,8", "expected numbers of 1 to 512"], ["8,1024", "expected numbers of 1 to 512"]):
        with pytest.raises(ConfigError, match=message):
            chunkrt.experiment(SMALL_SHAPE, chunk_lengths=[chunks], policies=["in_order"], **grid)
    for attention in ("npu:64:sinks=", "npu:sinks", "npu:64:sinks=64", "cpu:sinks=1", "npu::sinks=x"):
        with pytest.raises(ConfigError):
            chunkrt.experiment(SMALL_SHAPE, chunk_lengths=[32], policies=["in_order"], attentions=[attention], **grid)


def test_tune_chooses_graphs_of_several_lengths_and_windows_that_slide() -> None:
    wide = replace(SMALL_SHAPE, hidden_size=1024, intermediate_size=4096)
    found = tune(wide, "sd8gen3", prompt_lengths=[33], chunk_lengths=[32, "1,8,32"], npu_sinks=4, workers=1)
    assert found.best.graphs == "1,8,32"
    assert found.settings["chunk_length"] == "1,8,32"
    assert found.default.graphs == ""
    assert found.bound is not None
    assert found.bound <= min(choice.cost("time") for choice in found.choices) * 1.0001
    on_npu = [choice for choice in found.choices if choice.attention != "cpu"]
    assert {choice.attention for choice in on_npu} == {"npu:512:sinks=4"}
    assert EngineOptions(npu="qnn", **found.settings).chunk_lengths == LENGTHS
    if found.best.attention != "cpu":
        assert (found.settings["npu_sinks"], found.settings["decode_on"]) == (4, "npu")
    assert 'chunk_length = "1,8,32"' in found.to_toml()


def test_measured_profile_of_several_graphs_is_learnt_kept_and_used(plan: Plan, tmp_path: Path) -> None:
    truth = toy_profile(plan, has_npu=True, graph_lengths=LENGTHS, prompt_us=0.0)
    options = OPTIONS | {"policy": "sequential", "graph_lengths": LENGTHS}
    records = [simulate(plan, truth, prompt_length=n, **options).records[0] for n in (256, 16, 8)]
    times = {
        record.num_tokens: max(e.end_ns - e.start_ns for e in record.events if e.processor == "npu")
        for record in records
    }
    assert times == {256: 74_000, 16: 74_000, 8: 26_000}
    for name, cost in learn_costs(plan, records).items():
        if name != "head":  # it has one row in all of these runs
            assert (cost.fixed_us, cost.row_us) == pytest.approx((10.0, 2.0), rel=1e-2)
    path = tmp_path / "profile.toml"
    path.write_text(write_measured(truth))
    assert find_device(path) == truth
    with pytest.raises(ConfigError, match="chunks of 1,8,32, not w8a16 and 32; run `chunkrt profile` with these"):
        simulate(plan, truth, prompt_length=40, **OPTIONS)
    path.write_text(write_measured(truth).replace("[1, 8, 32]", "[0]"))
    with pytest.raises(ConfigError, match=r"measured.graph_lengths is \[0\], expected numbers of at least 1"):
        find_device(path)


def test_profile_without_an_npu_has_no_graphs(plan: Plan) -> None:
    on_cpu = toy_profile(plan, prompt_us=0.0)
    found = simulate(plan, on_cpu, prompt_length=40, graph_lengths=LENGTHS, **OPTIONS)
    assert (found.graph_lengths, found.contexts, found.padding) == ((), 0, None)


SIMULATE = ("simulate", "qwen1.5-1.8b", "--device", "sd8gen3", "-p", 37, "--policy", "in_order")


def test_command_takes_the_form_of_run_and_repeats_to_compare(command: Any) -> None:
    rows = json.loads(command(*SIMULATE, "--chunk", "1,8,32", "--chunk", "32", "--json").out)
    assert [(row["chunk_length"], row["graph_lengths"]) for row in rows] == [(32, [1, 8, 32]), (32, [])]
    assert rows[0]["time_to_first_token_ms"] < rows[1]["time_to_first_token_ms"]
    assert rows[0]["contexts"] == 3 * rows[1]["contexts"]
    printed = command(*SIMULATE, "--chunk", "1,8,32").out.splitlines()
    assert printed[2].split()[:3] == ["37", "1,8,32", "in_order"]
    assert f"{rows[0]['contexts']} {100 * (1 - 37 / 40):.1f}%" in " ".join(printed[2].split())
    assert "contexts" not in command(*SIMULATE, "--chunk", "32").out


def test_command_reads_lengths_and_sinks_of_a_settings_file(command: Any, tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text('chunk_length = "1,8,32"\nattention = "npu"\nnpu_window = "32"\nnpu_sinks = 4\n')
    (row,) = json.loads(command(*SIMULATE, "--settings", settings, "--json").out)
    assert row["graph_lengths"] == [1, 8, 32]
    arguments = ("--chunk", "1,8,32", "--attention", "npu", "--npu-window", 32, "--npu-sinks", 4, "--json")
    assert command(*SIMULATE, *arguments).out == command(*SIMULATE, "--settings", settings, "--json").out
    found = json.loads(command("fit", "qwen1.5-1.8b", "--soc", "SM8650", "--settings", settings, "--json").out)
    assert found["graph_lengths"] == [1, 8, 32]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--chunk", "8,8"), "--chunk is '8,8', expected numbers of tokens, at least 1, with commas between"),
        (("--chunk", "1,x"), "--chunk is '1,x', expected numbers of tokens"),
        (("--npu-sinks", 4), "--npu-sinks has no effect without --attention npu; omit it"),
        (
            ("--chunk", "1,8", "--scheme", "w8a8-dynamic"),
            "--chunk 1,8 has no effect with several lengths without work on an NPU; give one length, or repeat --chunk",
        ),
    ],
)
def test_lengths_without_effect_are_refused_in_one_line(command: Any, arguments: tuple[Any, ...], message: str) -> None:
    expect_one_line(command(*SIMULATE, *arguments), f"chunkrt: {message}", 1)


def test_plan_of_a_checkpoint_has_the_same_rows(device: DeviceProfile) -> None:
    plan = plan_checkpoint(Path(GGUF), {}).plan
    found = simulate(plan, device, prompt_length=37, graph_lengths=LENGTHS, **OPTIONS)
    assert set(rows_by_call(found)) == {32, 8}
