"""Tests of `chunkrt bench --parallel`: its measurements and its output."""

import csv
import io
import json
import threading
from dataclasses import fields

import pytest
from fixture_checkpoints import checkpoint
from one_line import expect_one_line

import chunkrt
from chunkrt.cli.bench_tests import ParallelRow, measure_parallel
from chunkrt.runtime.request import Request
from chunkrt.runtime.trace.file import read_trace

GGUF = checkpoint("llama_biased_gguf")
BENCH = ("bench", GGUF, "-p", "9,20", "-n", "3", "-r", "2", "--chunk", "8", "--threads", "2", "--parallel", "1,3")
COLUMNS = [field.name for field in fields(ParallelRow)]


def check_rows(rows):
    assert [(row["pp"], row["tg"], row["pl"]) for row in rows] == [(9, 3, 1), (9, 3, 3), (20, 3, 1), (20, 3, 3)]
    for row in rows:
        assert list(row) == COLUMNS
        assert (row["backend"], row["chunk"], row["threads"]) == ("native", 8, 2)
        assert row["n_kv"] == row["pl"] * (row["pp"] + row["tg"])
        pairs = list(zip(row["samples_pp_ns"], row["samples_tg_ns"], strict=True))
        assert len(pairs) == 2
        for end, count, times in (
            ("_pp", row["pl"] * row["pp"], row["samples_pp_ns"]),
            ("_tg", row["pl"] * row["tg"], row["samples_tg_ns"]),
            ("", row["n_kv"], list(map(sum, pairs))),
        ):
            assert row[f"t{end}"] == pytest.approx(sum(times) / 2e9)
            assert row[f"speed{end}"] == pytest.approx(sum(count / (ns / 1e9) for ns in times) / 2)
            assert row[f"stddev{end}"] >= 0


def test_parallel_rows_in_json_and_json_lines(command):
    finished = command(*BENCH, "-o", "json")
    assert (finished.status, finished.err) == (0, "")
    check_rows(json.loads(finished.out))
    check_rows([json.loads(line) for line in command(*BENCH, "-o", "jsonl").out.splitlines()])


def test_parallel_rows_in_csv(command):
    def value(name, text):
        if name.startswith("samples"):
            return [int(number) for number in text.split()]
        if name in ("model", "backend", "scheme", "attention_math", "policy", "affinity", "origin"):
            return text
        return float(text) if "." in text else int(text)

    rows = csv.DictReader(io.StringIO(command(*BENCH, "-o", "csv").out))
    check_rows([{name: value(name, text) for name, text in row.items()} for row in rows])


def test_parallel_table_has_columns_of_llama_batched_bench(command):
    above, _, *lines = command(*BENCH).out.splitlines()
    assert above.startswith("model model.gguf, backend native, scheme w8a8-dynamic, chunk 8, policy ")
    head, rule, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    assert head == ["PP", "TG", "B", "N_KV", "T_PP s", "S_PP t/s", "T_TG s", "S_TG t/s", "T s", "S t/s"]
    assert all(cell.endswith(":") for cell in rule)
    assert [row[:4] for row in rows] == [
        ["9", "3", "1", "12"],
        ["9", "3", "3", "36"],
        ["20", "3", "1", "23"],
        ["20", "3", "3", "69"],
    ]


def test_parallel_measures_prefill_alone_and_decode_alone(command):
    (row,) = json.loads(command("bench", GGUF, "-p", 8, "-n", 0, "-r", 1, "--parallel", 2, "-o", "json").out)
    assert (row["n_kv"], row["speed_tg"], row["stddev"]) == (16, 0, 0)
    assert row["speed_pp"] > 0
    (row,) = json.loads(command("bench", GGUF, "-p", 0, "-n", 4, "-r", 1, "--parallel", 2, "-o", "json").out)
    assert (row["n_kv"], row["speed_pp"]) == (8, 0)
    assert row["speed_tg"] > 0


def test_parallel_sequences_share_chunks_and_run_all_their_tokens(command, tmp_path):
    path = tmp_path / "out.json"
    finished = command(*BENCH[:3], 20, *BENCH[4:-1], 3, "--trace", path)
    assert finished.status == 0, finished.err
    records = read_trace(path)
    prompts = [record for record in records if record.position < 20]  # one may have begun alone
    steps = [record for record in records if record.position >= 20]
    sequences = {record.sequence for record in records}
    assert [sum(r.num_tokens for r in prompts if r.sequence == one) for one in sequences] == [20] * 3
    assert sorted(record.position for record in steps) == [20] * 3 + [21] * 3 + [22] * 3
    assert all(record.is_decode for record in steps)
    sharing = [{segment.sequence for segment in chunk.segments} for record in records for chunk in record.chunks]
    assert max(map(len, sharing)) > 1


def test_parallel_repetitions_start_with_new_prompts(monkeypatch):
    taken, lock = [], threading.Lock()
    with chunkrt.load(GGUF, npu="native", chunk_length=8) as engine:
        begin = Request.begin

        def noted(request, *arguments):
            with lock:
                taken.append((request.state.position, tuple(request.token_ids.tolist())))
            begin(request, *arguments)

        monkeypatch.setattr(Request, "begin", noted)
        measure_parallel(3, 12, 2, engine, "m", 2, None)
    prompts = [tokens for position, tokens in taken if position == 0]
    assert len(prompts) == 3 * 3
    assert len(set(prompts)) == 3
    assert {len(prompt) for prompt in prompts} == {12}
    assert sorted(position for position, tokens in taken if len(tokens) == 1) == [12] * 9 + [13] * 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--parallel", "many"), "--parallel is 'many', expected whole numbers"),
        (("--parallel", "0"), "--parallel is '0', expected no number below 1"),
        (("--parallel", "2,-1"), "expected no number below 1"),
        (("--parallel", "2", "-p", "0", "-n", "0"), "nothing to measure: both -p and -n are 0"),
        (("--parallel", "2", "-p", "120", "-n", "9"), "129 tokens do not fit the context of 128"),
        (("--parallel", "2", "-p", "8", "-r", "0"), "--repetitions is 0"),
        (
            ("--parallel", "200", "-p", "8", "-n", "1", "--cache-memory", "0.3MB"),
            "4 of 4 places for sequences (--cache-memory)",
        ),
    ],
)
def test_parallel_refuses_wrong_values(command, arguments, message):
    expect_one_line(command("bench", GGUF, *arguments), message)
