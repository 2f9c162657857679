"""Tests of the output and formats of `chunkrt bench`, `plan`, `models`, `doctor` and `pull`."""

import contextlib
import csv
import io
import json
import shutil
import sqlite3
import sys
from dataclasses import fields
from types import SimpleNamespace

import onnx
import pytest
from fixture_checkpoints import checkpoint
from one_line import expect_one_line

import chunkrt
from chunkrt import backends
from chunkrt.backends.reference import ReferenceBackend
from chunkrt.cli import COMMANDS
from chunkrt.cli.bench_tests import BenchRow, Case, measure
from chunkrt.runtime.policy import DEFAULT_POLICY

GGUF = checkpoint("llama_biased_gguf")
BENCH = ("bench", GGUF, "-p", "8,20", "-n", "3", "-r", "2", "--chunk", "8", "--threads", "2")
COLUMNS = [field.name for field in fields(BenchRow)]


def check_rows(rows):
    assert [row["test"] for row in rows] == ["pp8", "pp20", "tg3"]
    for row in rows:
        assert list(row) == COLUMNS
        assert (row["backend"], row["scheme"], row["policy"]) == ("native", "w8a8-dynamic", DEFAULT_POLICY)
        assert (row["chunk"], row["threads"]) == (8, 2)
        assert row["avg_ts"] > 0
        assert row["stddev_ts"] >= 0
        assert len(row["samples_ns"]) == 2
        assert 0 <= row["cpu_busy"] <= 1
        assert (row["npu_busy"], row["overlap"]) == (None, None)  # there is no NPU


def test_bench_prints_json(command):
    finished = command(*BENCH, "-o", "json")
    assert (finished.status, finished.err) == (0, "")
    check_rows(json.loads(finished.out))


def test_bench_prints_json_lines(command):
    finished = command(*BENCH, "-o", "jsonl")
    check_rows([json.loads(line) for line in finished.out.splitlines()])


def test_bench_prints_csv(command):
    finished = command(*BENCH, "-o", "csv")
    rows = list(csv.DictReader(io.StringIO(finished.out)))
    numbers = {"chunk": int, "threads": int, "samples_ns": lambda text: [int(n) for n in text.split()]}
    numbers |= dict.fromkeys(("avg_ts", "stddev_ts", "cpu_busy"), float)
    numbers |= dict.fromkeys(("npu_busy", "overlap"), lambda text: text or None)
    check_rows([{name: numbers.get(name, str)(text) for name, text in row.items()} for row in rows])


def test_bench_prints_markdown(command):
    finished = command(*BENCH)
    head, rule, *rows = (line for line in finished.out.splitlines() if line.startswith("|"))
    assert [cell.strip() for cell in head.strip("|").split("|")][-3:] == ["test", "t/s", "ttft ms"]
    assert set(rule) == set("| -:")
    assert len({len(line) for line in (head, rule, *rows)}) == 1
    assert [row.split("|")[-4].strip() for row in rows] == ["pp8", "pp20", "tg3"]


def test_wide_bench_table_moves_common_columns_above(command, tmp_path):
    model = shutil.copy(GGUF, tmp_path / f"{'a_long_name_' * 4}.gguf")
    shown = command("bench", model, "-p", "8", "-n", "2", "-r", "1", "-t", "1,2")
    above, empty, head, rule, *rows = shown.out.splitlines()
    assert (above, empty) == (f"model {model.name}, backend native, scheme w8a8-dynamic", "")
    assert max(map(len, (head, rule, *rows))) <= 80
    assert [row.split("|")[1].strip() for row in rows] == ["1", "1", "2", "2"]


LLAMA_BENCH = {
    **dict.fromkeys(("build_commit", "cpu_info", "gpu_info", "backends", "model_filename", "model_type"), str),
    **dict.fromkeys(("cpu_mask", "type_k", "type_v", "split_mode", "devices", "tensor_split", "test_time"), str),
    **dict.fromkeys(("build_number", "model_size", "model_n_params", "n_batch", "n_ubatch", "n_threads", "poll"), int),
    **dict.fromkeys(("n_gpu_layers", "main_gpu", "n_prompt", "n_gen", "n_depth", "avg_ns", "stddev_ns"), int),
    **dict.fromkeys(("cpu_strict", "no_kv_offload", "flash_attn", "use_mmap", "embeddings"), bool),
    **dict.fromkeys(("avg_ts", "stddev_ts"), float),
    **dict.fromkeys(("samples_ns", "samples_ts"), list),
}
"""Columns, with types, that readers of llama-bench's JSON use, e.g. compare-llama-bench.py."""


def test_bench_json_has_columns_of_llama_bench(command):
    finished = command("bench", GGUF, "-p", "16-64+16", "-t", "1,2", "-r", 2, "-o", "json")
    assert (finished.status, finished.err) == (0, "")
    rows = json.loads(finished.out)
    tests = [(16, 0), (32, 0), (48, 0), (64, 0), (0, 32)]
    found = [(row["n_threads"], row["n_prompt"], row["n_gen"]) for row in rows]
    assert found == [(threads, *test) for threads in (1, 2) for test in tests]
    for row in rows:
        assert {name: type(row[name]) for name in LLAMA_BENCH} == LLAMA_BENCH
        assert row["avg_ts"] == pytest.approx(sum(row["samples_ts"]) / 2)
        assert row["avg_ns"] == pytest.approx(sum(row["samples_ns"]) / 2, abs=1)
        assert (row["ttft_ms"] is None) == (row["n_prompt"] == 0)
        assert row["peak_memory_bytes"] > 1e6


def test_bench_sql_is_valid(command):
    database = sqlite3.connect(":memory:")
    database.executescript(command(*BENCH, "-o", "sql").out)
    with contextlib.closing(database):
        found = database.execute("SELECT test, n_prompt, model_filename, npu_busy FROM llama_bench").fetchall()
    assert found == [("pp8", 8, str(GGUF), None), ("pp20", 20, str(GGUF), None), ("tg3", 0, str(GGUF), None)]


def test_bench_at_a_depth_and_of_both_kinds_at_once(command):
    asked = ("-p", 8, "-n", 0, "-pg", "8,3", "-d", "0,20", "-r", 1, "--json")
    rows = json.loads(command("bench", GGUF, *asked).out)
    assert [row["test"] for row in rows] == ["pp8", "pp8+tg3", "pp8 @ d20", "pp8+tg3 @ d20"]
    assert [(row["n_prompt"], row["n_gen"], row["n_depth"]) for row in rows] == [
        (8, 0, 0),
        (8, 3, 0),
        (8, 0, 20),
        (8, 3, 20),
    ]


def test_bench_depth_is_not_timed():
    """Every timed run starts at the depth and runs the test's own tokens."""
    with chunkrt.load(GGUF) as engine:
        records = []
        measure(Case(n_prompt=8, n_gen=2, n_depth=20), engine, "m", 2, records)
    assert [(record.position, record.num_tokens) for record in records] == [(20, 8), (28, 1), (29, 1)]


def test_bench_of_several_models_and_of_a_text(command, tmp_path):
    (tmp_path / "text.txt").write_text("one two three")
    other = shutil.copy(GGUF, tmp_path / "other.gguf")
    out = tmp_path / "rows.jsonl"
    finished = command("bench", GGUF, "-m", other, "--prompt-file", tmp_path / "text.txt", "-n", 2, "-r", 1, "-o", out)
    assert finished.out == ""
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    with chunkrt.load(GGUF) as engine:
        length = len(engine.tokenizer.encode("one two three", add_special=True, parse_special=False))
    assert [(row["model"], row["test"]) for row in rows] == [
        (str(model), test) for model in (GGUF, other) for test in (f"pp{length}", "tg2")
    ]


def test_bench_default_lengths_fit_the_context(command):
    rows = json.loads(command("bench", GGUF, "-r", 1, "-o", "json").out)
    assert [row["test"] for row in rows] == ["pp127", "tg32"]
    rows = json.loads(command("bench", GGUF, "-r", 1, "-c", 16, "-o", "json").out)
    assert [row["test"] for row in rows] == ["pp15", "tg15"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-p", "16-64+0"), "whose steps never reach the end"),
        (("-p", "1-9*1"), "whose steps never reach the end"),
        (("-p", "64-16"), "ends before it begins; write 16-64"),
        (("-p", "1-1000000"), "more than 1000 numbers"),
        (("-p", "16-"), "expected whole numbers separated by commas"),
        (("-t", "0"), "--threads is '0', expected no number below 1"),
        (("-pg", "8"), "-pg is '8', expected two numbers"),
        (("-o", "rows.xml"), "-o is 'rows.xml', expected one of md, json"),
        (("-o", "json", "--format", "csv"), "-o is json and --format is csv"),
        (("--parallel", "2", "-d", "8"), "--parallel excludes -pg, -d"),
        (("--prompt-file", "-"), "the prompt file is empty"),
        (("-d", "120", "-p", "20"), "140 tokens do not fit the context of 128"),
    ],
)
def test_bench_refuses_wrong_options(command, arguments, message):
    expect_one_line(command("bench", GGUF, *arguments), message)


def test_bench_of_one_kind(command):
    finished = command("bench", GGUF, "-p", "0", "-n", "2", "-r", "1", "-o", "json")
    (row,) = json.loads(finished.out)
    assert (row["test"], row["stddev_ts"]) == ("tg2", 0)


def test_plan_json_holds_subgraphs_and_figures(command):
    finished = command("plan", GGUF, "--json", "--chunk", 8, "--prompt-length", 64)
    assert (finished.status, finished.err) == (0, "")
    result = json.loads(finished.out)
    assert (result["chunk"], result["scheme"], result["prompt_length"]) == (8, "w8a8-dynamic", 64)
    names = ["embedding", "static.0", "dynamic.0", "static.1", "dynamic.1", "static.2", "head"]
    assert [subgraph["name"] for subgraph in result["subgraphs"]] == names
    assert [subgraph["name"] for subgraph in result["plan"]["subgraphs"]] == names
    attention = result["attention"]
    assert attention["chunked_flops"] / attention["unchunked_flops"] == (1 + 8 / 64) / 2


def test_plan_prints_a_table_of_subgraphs(command):
    finished = command("plan", GGUF, "--chunk", 8)
    lines = finished.out.splitlines()
    assert lines[0].split()[:3] == ["subgraph", "on", "kind"]
    assert [line.split()[:3] for line in lines[1:4]] == [
        ["embedding", "cpu", "dynamic"],
        ["static.0", "npu", "static"],
        ["dynamic.0", "cpu", "dynamic"],
    ]
    assert "npu: 3 subgraphs" in finished.out
    assert "cpu: 4 subgraphs" in finished.out
    assert "a chunk of 8 tokens moves" in finished.out


def test_plan_shows_converted_bytes(command):
    static, dynamic = (command("plan", GGUF, "--chunk", 8, "--scheme", name) for name in ("w8a16", "w8a8-dynamic"))
    found = json.loads(command("plan", GGUF, "--chunk", 8, "--scheme", "w8a16", "--json").out)
    converted = [subgraph["converted_bytes"] for subgraph in found["subgraphs"]]
    assert [num_bytes > 0 for num_bytes in converted] == [s["device"] == "npu" for s in found["subgraphs"]]
    entering = sum(subgraph["entering_bytes"] for subgraph in found["subgraphs"])
    assert (
        f"an NPU converts {sum(converted) / 1e6:.2f} MB of float16 from and to float32 per chunk: "
        f"{entering / 1e6:.2f} MB enter it, {(sum(converted) - entering) / 1e6:.2f} MB leave it\n" in static.out
    )
    assert "converts" not in dynamic.out


def test_plan_counts_linear_layers_with_4_bits(command):
    found = command("plan", GGUF, "--scheme", "w4a8-dynamic")
    assert found.out.endswith("weights of 8 linear layers have 4 bits, and weights of 1 have 8 bits\n")
    summary = json.loads(command("plan", GGUF, "--scheme", "w4a8-dynamic", "--json").out)
    assert summary["linears_by_weight_bits"] == {"4": 8, "8": 1, "32": 0}
    assert "have 4 bits" not in command("plan", GGUF).out


def test_plan_of_an_engine_directory(command, home):
    command("run", GGUF, "-p", "x", "-n", 1)
    with chunkrt.load(GGUF) as engine:
        folder = engine.folder
    assert command("plan", folder).out == command("plan", GGUF).out


class _Npu(ReferenceBackend):
    """A reference backend that is separate from the CPU, like an NPU."""

    name, concurrency = "tiny", 1


LENGTHS = [
    ((), {}),
    (("--chunk", 8), {"chunk_length": 8}),
    (("--context", 20), {"context_length": 20}),
    (("--npu", "tiny"), {"npu": "tiny"}),
    (("--npu", "tiny", "--context", 40), {"npu": "tiny", "context_length": 40}),
]


@pytest.mark.parametrize(("arguments", "options"), LENGTHS, ids=[" ".join(map(str, a)) for a, _ in LENGTHS])
def test_plan_shows_the_chunks_that_an_engine_has(command, monkeypatch, arguments, options):
    """The length also holds with an NPU, whose default differs."""
    npu = SimpleNamespace(name="tiny", conflict="", load=lambda: lambda threads: _Npu())
    monkeypatch.setattr(backends.PLUGINS, "plugins", [npu])
    finished = command("plan", GGUF, *arguments, "--json")
    assert finished.status == 0, finished.err
    with chunkrt.load(GGUF, **options) as engine:
        assert json.loads(finished.out)["chunk"] == engine.chunk_length


def test_plan_refuses_a_scheme_without_a_backend(command, tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path))
    expect_one_line(command("run", GGUF, "-p", "x", "--scheme", "float"), "under the scheme 'float' this linear")
    assert not list(tmp_path.rglob("weights.safetensors"))
    assert command("run", GGUF, "-p", "x", "-n", 1, "--scheme", "float", "--npu", "reference").status == 0
    assert list(tmp_path.rglob("weights.safetensors"))


@pytest.mark.parametrize("scheme", ["w8a8-dynamic", "w8a16"])
def test_an_engine_directory_is_simulated_under_its_own_scheme(command, tmp_path, scheme):
    folder = tmp_path / "engine"
    assert command("compile", GGUF, "-o", folder, "--scheme", scheme).status == 0
    found = command("simulate", folder, "--device", "sd8gen3", "-p", 64, "--chunk", 32, "--json")
    assert found.status == 0, found.err
    assert json.loads(found.out)[0]["scheme"] == scheme
    other = command("simulate", folder, "--device", "sd8gen3", "--scheme", "w8a8")
    expect_one_line(other, f"was compiled under {scheme!r}, not 'w8a8'; compile it again")


def test_plan_without_npu(command):
    result = json.loads(command("plan", GGUF, "--npu", "off", "--json").out)
    assert [subgraph["device"] for subgraph in result["subgraphs"]] == ["cpu", "cpu"]


@pytest.mark.parametrize("scheme", ["float", "w8a8-dynamic"])
def test_plan_saves_every_subgraph_as_onnx(command, tmp_path, scheme):
    folder = tmp_path / "made" / "here"
    finished = command("plan", GGUF, "--save-onnx", folder, "--scheme", scheme, "--json")
    assert finished.status == 0
    assert finished.err == f"7 ONNX files written to {folder}\n"
    names = [subgraph["name"] for subgraph in json.loads(finished.out)["subgraphs"]]
    files = sorted(folder.iterdir())
    assert [path.name for path in files] == [f"{i}_{name}.onnx" for i, name in enumerate(names)]
    for path in files:
        model = onnx.load(path)
        onnx.checker.check_model(model, full_check=True)
        assert all(initializer.raw_data for initializer in model.graph.initializer)
    again = command("plan", GGUF, "--save-onnx", folder, "--scheme", scheme)
    assert again.status == 0
    assert sorted(folder.iterdir()) == files


def test_models_lists_the_catalogue_as_text_and_json(command):
    finished = command("models")
    *table, terms = finished.out.splitlines()
    head, *rows = (line.split() for line in table)
    assert head == ["NAME", "FAMILY", "SIZE", "LICENCE", "PULLED"]
    assert terms.startswith("gemma-3-270m: terms of use at https://")
    assert ["smollm2-135m-instruct", "llama", "98", "MB", "apache-2.0", "no"] in rows
    known = {model["name"]: model for model in json.loads(command("models", "--json").out)}
    assert known["smollm2-135m-instruct"]["path"] is None
    assert known["smollm2-135m-instruct"]["scheme"] == "w8a8-dynamic"
    assert len(known) == len(rows)


def test_models_lists_a_pulled_model(command, tmp_path, monkeypatch):
    (tmp_path / "toy.toml").write_text(
        'family = "llama"\nscheme = "float"\ncontext_length = 128\nlicence = "none"\n'
        f"[source]\nkind = \"path\"\npath = '{GGUF}'\n"
    )
    monkeypatch.setenv("CHUNKRT_MODELS", str(tmp_path))
    known = {model["name"]: model for model in json.loads(command("models", "--json").out)}
    assert known["toy"]["path"] == str(GGUF)
    assert command("pull", "toy").out == f"{GGUF}\n"
    assert json.loads(command("run", "toy", "-p", "x", "-n", 1, "--npu", "onnxrt", "--json").out)["model"] == "toy"
    with chunkrt.load("toy", npu="onnxrt") as engine:
        assert engine.scheme.name == "float"


def test_doctor_prints_findings_as_text_and_json(command):
    finished = command("doctor")
    assert (finished.status, finished.err) == (0, "")
    assert all(line.startswith(("ok  ", "lack", " " * 21)) for line in finished.out.splitlines())
    findings = {finding["what"]: finding for finding in json.loads(command("doctor", "--json").out)}
    assert findings["native kernels"]["ok"]
    assert findings["attention"]["found"].startswith(("in float32 by ", "in bfloat16 by ", "in int8 by "))
    assert findings["onnx_ir"]["ok"]
    assert ("mpi4py" in findings) == (sys.platform != "win32"), "Windows has no ranks"
    assert not findings["npu"]["ok"]
    assert findings["npu"]["advice"]


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], *([name, "--help"] for name in COMMANDS)])
def test_help_goes_to_stdout(command, arguments):
    finished = command(*arguments)
    assert (finished.status, finished.err) == (0, "")
    assert finished.out.startswith("Usage: chunkrt")


def test_version_prints_the_version(command):
    finished = command("--version")
    assert finished.out.split()[-1] == chunkrt.__version__
