"""bench/roofline.py: multiply-adds counted by hand and in a real run, and shares from made-up samples."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import pytest
from fixture_checkpoints import checkpoint

import chunkrt
from chunkrt.backends.native.cpu import cpu_info
from chunkrt.graph.plan import Plan
from chunkrt.quant.scheme import SCHEMES, Scheme
from chunkrt.runtime.tasks import Task
from chunkrt.simulate.shape import Shape
from chunkrt.simulate.work import cut

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from roofline_machine import PEAK_ASKS, READ_PIECE_BYTES, Machine
from roofline_parts import IDLE, PYTHON, Parts, Timed, draw_parts, part_rows
from roofline_prefill import start_command
from roofline_tables import markdown, parts_markdown
from roofline_work import Bounds, Peaks, Spread, Work, attainable, step_bounds, work_of

ONE_DIGIT, TWO_DIGITS = SCHEMES["w8a8-dynamic"], SCHEMES["w8a16"]
QKV, O_PROJ, GATE_UP, DOWN, HEAD = 64 * 128, 64 * 64, 64 * 192, 96 * 64, 64 * 100
"""Multiply-adds of each linear of SMALL for one row."""

SMALL = Shape(
    source="made up",
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=100,
    context_length=512,
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return SMALL.plan()


def tasks_of(plan: Plan, num_chunks: int) -> list[Task]:
    """Return all tasks except those after the last attention in chunks before the last."""
    last_with_state = max(index for index, subgraph in enumerate(plan.subgraphs) if subgraph.state)
    return [
        Task(subgraph, chunk)
        for chunk in range(num_chunks)
        for subgraph in range(len(plan.subgraphs) if chunk == num_chunks - 1 else last_with_state + 1)
    ]


@pytest.mark.parametrize(("scheme", "num_digits"), [(ONE_DIGIT, 1), (TWO_DIGITS, 2)])
def test_the_work_of_a_prefill_is_that_of_a_count_by_hand(plan: Plan, scheme: Scheme, num_digits: int) -> None:
    work = work_of(plan, scheme, cut(70, 32), tasks_of(plan, 3))  # chunks of 32, 32 and 6 tokens
    assert work.linear_macs == 70 * (3 * QKV + 2 * (O_PROJ + GATE_UP + DOWN)) + 6 * (O_PROJ + GATE_UP + DOWN) + HEAD
    assert work.digit_macs == num_digits * work.linear_macs
    assert work.attention_macs == 3 * 2 * 64 * sum(range(1, 71))


def test_a_head_of_16_bits_takes_two_digits(plan: Plan) -> None:
    work = work_of(plan, SCHEMES["w8a8"], cut(70, 32), tasks_of(plan, 3))
    assert work.digit_macs == work.linear_macs + HEAD


def test_every_task_reads_its_weights_once(plan: Plan) -> None:
    tasks = tasks_of(plan, 3)
    qkv, rest, head = (
        QKV + 4 * 128,
        O_PROJ + GATE_UP + DOWN + 4 * (64 + 192 + 64),
        64 * 112 + 4 * 100,
    )  # packed by 16 columns
    assert work_of(plan, ONE_DIGIT, cut(70, 32), tasks).weight_bytes == 3 * (3 * qkv + 2 * rest) + rest + head


def test_the_tasks_of_a_real_run_are_those_that_were_counted() -> None:
    with chunkrt.load(checkpoint("llama_gqa"), npu="native", chunk_length=8, threads=1) as engine:
        events = engine.session().prefill(list(range(1, 22))).events
        tasks = tasks_of(engine.plan, 3)
        assert sorted(event.task for event in events) == sorted(tasks)
        assert work_of(engine.plan, engine.scheme, cut(21, 8), tasks).linear_macs > 0


def test_the_nearer_bound_is_the_longer() -> None:
    work = Work(linear_macs=60, digit_macs=80, attention_macs=20, weight_bytes=300)
    bounds = Bounds.of(work, Peaks(integer_macs=40, float_macs=10, memory_bytes=100))
    assert (bounds.integer_s, bounds.attention_s, bounds.memory_s) == (2, 2, 3)
    assert (bounds.arithmetic_s, bounds.nearer) == (4, "arithmetic")
    assert Bounds.of(work, Peaks(integer_macs=40, float_macs=10, memory_bytes=50)).nearer == "memory"


def test_the_roofline_is_the_lower_of_peak_and_bandwidth() -> None:
    assert attainable(100, 10, work=64, num_bytes=8) == 80
    assert attainable(100, 10, work=128, num_bytes=8) == 100


def test_steps_have_bounds_of_their_own_work(plan: Plan) -> None:
    chunks, tasks = cut(70, 32), tasks_of(plan, 3)
    work = work_of(plan, ONE_DIGIT, chunks, tasks)
    peaks = Peaks(integer_macs=work.digit_macs / 3, float_macs=work.attention_macs / 5, memory_bytes=1e15)
    assert step_bounds(plan, ONE_DIGIT, chunks, tasks, peaks) == {"linear": 3, "block_linear": 0, "attention": 5}
    from_memory = Peaks(integer_macs=1e15, float_macs=1e15, memory_bytes=work.weight_bytes / 7)
    assert step_bounds(plan, ONE_DIGIT, chunks, tasks, from_memory)["linear"] == 7
    in_blocks = step_bounds(plan, SCHEMES["w4a8-dynamic"], chunks, tasks, peaks)
    assert in_blocks["linear"] + in_blocks["block_linear"] == pytest.approx(3)


def test_parts_are_each_threads_share_of_all_the_time() -> None:
    timed = Timed([], wall_s=10, tasks_s=9, callers_s=8, steps_s={"linear": 7, "attention": 4, "between_steps": 1})
    alone = Timed([], wall_s=10, tasks_s=9, callers_s=8, steps_s={"linear": 7, "between_steps": 1})
    assert alone.parts(1) == {"linear": 7, "between_steps": 1, PYTHON: 1, IDLE: 1}
    assert timed.parts(2) == {"linear": 3.5, "attention": 2, "between_steps": 0.5, PYTHON: 0.5, IDLE: 3.5}


def test_rows_of_parts_are_medians_and_their_shares() -> None:
    samples = [{"a": 1.0, IDLE: 9.0, "b": 3.0}, {"a": 2.0, IDLE: 4.0, "b": 4.0}, {"a": 1.0, IDLE: 5.0, "b": 4.0}]
    rows = part_rows(samples)
    assert [(row["part"], row["seconds"]["median"], row["share"]) for row in rows] == [
        *(("b", 4.0, 0.4), ("a", 1.0, 0.1), (IDLE, 5.0, 0.5)),
    ]


def test_the_parts_of_real_runs_have_names_and_are_drawn(tmp_path: Path) -> None:
    with chunkrt.load(checkpoint("llama_gqa"), npu="native", scheme="w8a8-dynamic", threads=1) as engine:
        parts = Parts(engine, (1, 2))
        parts.measure(counts=False)
        assert parts.samples == {}
        parts.measure(counts=True)
        peaks = Peaks(integer_macs=1e9, float_macs=1e9, memory_bytes=1e9)
        bars = []
        for test, threads in sorted(parts.samples):
            bounds = parts.bounds(test, peaks)
            rows = [row | {"bound_s": bounds.get(row["part"])} for row in part_rows(parts.samples[test, threads])]
            assert {"linear", "attention", "rms_norm", "quantize", "append_cache"} <= {row["part"] for row in rows}
            assert sum(row["share"] for row in rows) == pytest.approx(1)
            assert all(row["seconds"]["least"] >= 0 for row in rows if row["part"] not in (PYTHON, IDLE))
            bars.append({"test": test, "threads": threads, "parts": rows})
    lines = "\n".join(parts_markdown(bars)).split("\n\n")[1].splitlines()
    assert {line.count("|") for line in lines} == {1 + 1 + 3 * 4}
    draw_parts(bars, "a title", tmp_path / "parts.svg")
    picture = (tmp_path / "parts.svg").read_text()
    assert picture.startswith("<?xml")


def test_a_spread_is_the_median_between_the_extremes() -> None:
    assert Spread.of([3.0, 1.0, 8.0]) == (3.0, 1.0, 8.0)


class FakeProbe:
    """Answers like the program. Its first loop reaches 100 G a second on each thread and its second 200 G, every other
    time half as fast; a read of 64 KiB takes a microsecond, and a call of any kernel a millisecond.
    """

    def __init__(self) -> None:
        self.num_asked: dict[str, int] = {}

    def ask(self, line: str) -> dict:
        assert line == "about"
        loop = {"isa": "avx2", "kind": "int8", "instructions": "some", "work": 1e6}
        peaks = [loop | {"mix": "slow"}, loop | {"mix": "fast"}]
        kernels = ("gemm", "attention", "rms_norm", "quantize", "silu_mul")
        return {"peaks": peaks, "selected": dict.fromkeys(kernels, "avx2")}

    def seconds(self, line: str) -> float:
        count = self.num_asked[line] = self.num_asked.get(line, 0) + 1
        what, index, *_ = line.split()
        if what == "peak":
            return (1e-5, 5e-6)[int(index)] * (1 + count % 2)
        return 1e-6 if what == "read" else 1e-3


@pytest.fixture
def machine() -> Machine:
    found = Machine(FakeProbe(), (1, 2), {2: 1 << 20, 3: 32 << 20}, 256 << 20)
    found.measure()
    return found


def test_a_peak_is_the_best_sample_of_the_best_mix(machine: Machine) -> None:
    assert PEAK_ASKS > 1
    assert machine.peak("avx2", "int8", 1) == pytest.approx(200e9)
    assert machine.peak("avx2", "int8", 2) == pytest.approx(400e9)
    assert machine.peak("avx2", "float32", 1) is None
    assert machine.bandwidth("memory", 2) == pytest.approx(2 * READ_PIECE_BYTES / 1e-6)


@pytest.mark.parametrize(
    ("line", "level"),
    [("gemm 32 576 576 hot", "L2"), ("gemm 32 576 3072 hot", "L3"), ("gemm 32 576 576 streamed", "memory")],
)
def test_a_kernels_rate_is_a_share_of_the_peak(machine: Machine, line: str, level: str) -> None:
    case = next(case for case in machine.cases if case.line == line)
    row = machine.kernel_row(case, 2)
    macs = 32 * int(line.split()[2]) * int(line.split()[3])
    assert row["reads_from"] == level
    assert row["rate"]["median"] == pytest.approx(2 * macs / 1e-3 / 1e9)
    assert row["share_of_peak"] == pytest.approx(2 * macs / 1e-3 / 400e9)


def test_share_is_none_without_a_peak(machine: Machine) -> None:
    case = next(case for case in machine.cases if case.kernel == "attention")
    row = machine.kernel_row(case, 1)
    assert (row["share_of_peak"], row["share_of_roofline"]) == (None, None)


def test_every_instruction_set_has_a_file_of_peaks() -> None:
    root = Path(__file__).parents[2]
    files = {path.stem for path in (root / "csrc" / "kernels").glob("*/*.cc")}
    for isa in (isa["name"] for isa in cpu_info()["isas"] if isa["name"] != "reference"):
        assert isa in files
        assert (root / "bench" / "roofline" / f"peaks_{isa}.cc").is_file()


def test_all_tables_are_as_wide_as_their_heads(machine: Machine) -> None:
    counts = (1, 2)
    report = {
        "machine": {"processor": "P", "cores": 2, "threads": 2, "cache_bytes": {2: 1 << 20}, "rounds": 1},
        "peaks": machine.peak_rows(),
        "bandwidth": [{"level": "L2", "bytes_per_s": {str(t): machine.bandwidth("L2", t) for t in counts}}],
        "kernels": [machine.kernel_row(case, t) for case in machine.cases for t in counts],
    }
    tables = [table.splitlines() for table in "\n".join(markdown(report)).split("\n\n")[1:]]
    assert len(tables) == 3
    assert len(tables[0]) == 3  # the faster of the two mixes
    assert len(tables[2]) == 2 + len(machine.cases)
    for table in tables:
        assert {line.count("|") for line in table} == {table[0].count("|")}


def test_fresh_process_uses_the_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chunkrt").mkdir()
    (tmp_path / "chunkrt" / "__init__.py").write_text("raise ImportError('a source folder, without a native module')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(click.ClickException, match=r"status 1: chunkrt: .*none\.gguf"):
        start_command(str(tmp_path / "none.gguf"), 1, {})
