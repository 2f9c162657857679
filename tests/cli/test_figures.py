"""`chunkrt bench`, `plan`, `models`, `doctor` and `pull`: what they print, and in which formats."""

import csv
import io
import json
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
from chunkrt.cli.bench import Row
from chunkrt.runtime.policy import DEFAULT_POLICY

GGUF = checkpoint("llama_biased_gguf")
BENCH = ("bench", GGUF, "-p", "8,20", "-n", "3", "-r", "2", "--chunk", "8", "--threads", "2")
COLUMNS = [field.name for field in fields(Row)]


def check_rows(rows):
    assert [row["test"] for row in rows] == ["pp8", "pp20", "tg3"]
    for row in rows:
        assert list(row) == COLUMNS
        assert (row["backend"], row["scheme"], row["policy"]) == ("native", "w8a8-dynamic", DEFAULT_POLICY)
        assert (row["chunk"], row["threads"]) == (8, 2)
        assert row["avg_ts"] > 0
        assert row["stddev_ts"] >= 0
        assert len(row["samples_ns"]) == 2
        assert all(0 <= row[share] <= 1 for share in ("npu_busy", "cpu_busy", "overlap"))


def test_bench_in_json(command):
    finished = command(*BENCH, "-o", "json")
    assert (finished.status, finished.err) == (0, "")
    check_rows(json.loads(finished.out))


def test_bench_in_json_lines(command):
    finished = command(*BENCH, "-o", "jsonl")
    check_rows([json.loads(line) for line in finished.out.splitlines()])


def test_bench_in_csv(command):
    finished = command(*BENCH, "-o", "csv")
    rows = list(csv.DictReader(io.StringIO(finished.out)))
    numbers = {"chunk": int, "threads": int, "samples_ns": lambda text: [int(n) for n in text.split()]}
    numbers |= dict.fromkeys(("avg_ts", "stddev_ts", "npu_busy", "cpu_busy", "overlap"), float)
    check_rows([{name: numbers.get(name, str)(text) for name, text in row.items()} for row in rows])


def test_bench_in_markdown(command):
    finished = command(*BENCH)
    head, rule, *rows = finished.out.splitlines()
    assert [cell.strip() for cell in head.strip("|").split("|")][6:8] == ["test", "t/s"]
    assert {line.count("|") for line in (head, rule, *rows)} == {12}
    assert [row.split("|")[7].strip() for row in rows] == ["pp8", "pp20", "tg3"]


def test_bench_of_one_kind(command):
    finished = command("bench", GGUF, "-p", "0", "-n", "2", "-r", "1", "-o", "json")
    (row,) = json.loads(finished.out)
    assert (row["test"], row["stddev_ts"]) == ("tg2", 0)


def test_plan_in_json(command):
    finished = command("plan", GGUF, "--json", "--chunk", 8, "--prompt-length", 64)
    assert (finished.status, finished.err) == (0, "")
    result = json.loads(finished.out)
    assert (result["chunk"], result["scheme"], result["prompt_length"]) == (8, "w8a8-dynamic", 64)
    names = ["embedding", "static.0", "dynamic.0", "static.1", "dynamic.1", "static.2", "head"]
    assert [subgraph["name"] for subgraph in result["subgraphs"]] == names
    assert [subgraph["name"] for subgraph in result["plan"]["subgraphs"]] == names
    attention = result["attention"]
    assert attention["chunked_flops"] / attention["unchunked_flops"] == (1 + 8 / 64) / 2


def test_plan_for_people(command):
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


def test_plan_shows_what_an_npu_converts(command):
    static, dynamic = (command("plan", GGUF, "--chunk", 8, "--scheme", name) for name in ("w8a16", "w8a8-dynamic"))
    found = json.loads(command("plan", GGUF, "--chunk", 8, "--scheme", "w8a16", "--json").out)
    converted = [subgraph["converted_bytes"] for subgraph in found["subgraphs"]]
    assert [num_bytes > 0 for num_bytes in converted] == [s["device"] == "npu" for s in found["subgraphs"]]
    assert f"an NPU converts {sum(converted) / 1e6:.2f} MB of float16 from and to float32 a chunk\n" in static.out
    assert "converts" not in dynamic.out


def test_plan_tells_how_many_linears_have_4_bits(command):
    found = command("plan", GGUF, "--scheme", "w4a8-dynamic")
    assert found.out.endswith("weights of 8 linears have 4 bits, of 1 8 bits\n")
    summary = json.loads(command("plan", GGUF, "--scheme", "w4a8-dynamic", "--json").out)
    assert summary["linears_by_weight_bits"] == {"4": 8, "8": 1, "32": 0}
    assert "have 4 bits" not in command("plan", GGUF).out


def test_plan_of_an_engine_directory(command, home):
    command("run", GGUF, "-p", "x", "-n", 1)
    with chunkrt.load(GGUF) as engine:
        folder = engine.folder
    assert command("plan", folder).out == command("plan", GGUF).out


class _Npu(ReferenceBackend):
    """The reference beside the CPU, which is what makes a backend an NPU."""

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
    """Also beside an NPU, for which another length is usual."""
    npu = SimpleNamespace(name="tiny", conflict="", load=lambda: lambda threads: _Npu())
    monkeypatch.setattr(backends.PLUGINS, "plugins", [npu])
    finished = command("plan", GGUF, *arguments, "--json")
    assert finished.status == 0, finished.err
    with chunkrt.load(GGUF, **options) as engine:
        assert json.loads(finished.out)["chunk"] == engine.chunk_length


def test_a_scheme_that_nobody_here_runs_is_refused_before_it_is_compiled(command, tmp_path, monkeypatch):
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


def test_plan_off_the_npu(command):
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


def test_models_for_people_and_in_json(command):
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


def test_a_pulled_model_is_said_to_be_there(command, tmp_path, monkeypatch):
    (tmp_path / "toy.toml").write_text(
        'family = "llama"\nscheme = "float"\ncontext_length = 128\nlicence = "none"\n'
        f'[source]\nkind = "path"\npath = "{GGUF}"\n'
    )
    monkeypatch.setenv("CHUNKRT_MODELS", str(tmp_path))
    known = {model["name"]: model for model in json.loads(command("models", "--json").out)}
    assert known["toy"]["path"] == str(GGUF)
    assert command("pull", "toy").out == f"{GGUF}\n"
    assert json.loads(command("run", "toy", "-p", "x", "-n", 1, "--npu", "onnxrt", "--json").out)["model"] == "toy"
    with chunkrt.load("toy", npu="onnxrt") as engine:
        assert engine.scheme.name == "float"


def test_doctor_for_people_and_in_json(command):
    finished = command("doctor")
    assert (finished.status, finished.err) == (0, "")
    assert all(line.startswith(("ok  ", "lack", " " * 21)) for line in finished.out.splitlines())
    findings = {finding["what"]: finding for finding in json.loads(command("doctor", "--json").out)}
    assert findings["native kernels"]["ok"]
    assert findings["onnx_ir"]["ok"]
    assert not findings["npu"]["ok"]
    assert findings["npu"]["advice"]


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], *([name, "--help"] for name in COMMANDS)])
def test_help_is_data(command, arguments):
    finished = command(*arguments)
    assert (finished.status, finished.err) == (0, "")
    assert finished.out.startswith("Usage: chunkrt")


def test_version(command):
    finished = command("--version")
    assert finished.out.split()[-1] == chunkrt.__version__
