"""Tests of `chunkrt simulate --arrivals`: tables, JSON, traces and contradicting options."""

from __future__ import annotations

import json

import pytest
from one_line import expect_one_line
from trace_checker import CheckedTrace

from chunkrt.runtime.trace.file import read_trace

SERVER = ("simulate", "qwen2.5-0.5b", "--device", "sd8gen3")
ASKED = ("--arrivals", "poisson:4", "--prompt", "uniform:10:60", "--generate", "3", "--requests", 6)


def test_simulated_server_as_table_json_and_trace(command, tmp_path):
    path = tmp_path / "out.json"
    finished = command(*SERVER, *ASKED, "--chunk", 32, "--trace", path)
    assert (finished.status, finished.err) == (0, "")
    first, second, head, row, _, origin = finished.out.splitlines()
    assert first == (
        "qwen2.5-0.5b on Snapdragon 8 Gen 3, scheme w8a16, batcher packed: 6 requests, poisson:4, at most 8 at once"
    )
    assert second.endswith("answers of 3: 18 tokens")
    assert head.split()[:2] == ["chunk", "policy"]
    assert row.split()[:2] == ["32", "look_ahead"]
    assert origin.startswith("predicted from the profile of Snapdragon 8 Gen 3")
    CheckedTrace(path)
    records = read_trace(path)
    assert sum(record.num_tokens for record in records) == int(second.split()[3]) + 6 * 2
    (found,) = json.loads(command(*SERVER, *ASKED, "--chunk", 32, "--json").out)
    assert (found["requests"], found["generated_tokens"], found["seed"]) == (6, 18, 0)
    assert f"{found['generated_tokens_per_s']:.1f}" == row.split()[3]
    assert set(found["time_to_first_token_ms"]) == {"mean", "p50", "p95"}
    (other,) = json.loads(command(*SERVER, *ASKED, "--chunk", 32, "--json", "--seed", 1).out)
    assert other["prompt_tokens"] != found["prompt_tokens"]
    told = command("trace", path)
    assert "of the chunks held more than one of 6 sequences" in told.out


def test_simulated_server_has_a_row_per_chunk_length_and_policy(command):
    finished = command(
        *SERVER, *ASKED, "--chunk", 32, "--chunk", 64, "--policy", "in_order,look_ahead", "--sessions", 2
    )
    assert [line.split()[:2] for line in finished.out.splitlines()[3:-2]] == [
        ["32", "in_order"],
        ["32", "look_ahead"],
        ["64", "in_order"],
        ["64", "look_ahead"],
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--sessions", 3), "--sessions is for a simulated server; give --arrivals, e.g. poisson:1"),
        (("--decode-on", "cpu"), "--decode-on is for a simulated server"),
        (("--arrivals", "closed"), "--arrivals needs --prompt"),
        (("--arrivals", "closed", "--prompt", 8), "--arrivals needs --generate"),
        ((*ASKED, "-p", 64), "use --prompt with --arrivals"),
        ((*ASKED, "--ranks", 2, "--link", "1GbE"), "a server with several ranks cannot be simulated"),
        ((*ASKED, "--arrivals", "now"), "arrivals are 'now', expected poisson:RATE"),
        ((*ASKED, "--generate", "x"), "generate is 'x', expected a number"),
        ((*ASKED, "--prompt", 10**6), "exceed the model's context of 32768"),
        ((*ASKED, "--sessions", 0), "0 sessions, expected at least 1"),
        ((*ASKED, "--requests", 0), "0 requests, expected at least 1"),
        ((*ASKED, "--seed", -1), "the seed is -1"),
        ((*ASKED, "--batcher", "paked"), "packed"),
        ((*ASKED, "--in-flight", 0), "0 chunks in flight, expected 1 to 256"),
        ((*ASKED, "--threads", 2), "omit the number of threads"),
        ((*ASKED, "--trace", "."), "it is a folder; name a file"),
        ((*ASKED, "--trace", "a.json", "--chunk", 32, "--chunk", 64), "--trace needs one chunk length and one policy"),
    ],
)
def test_simulated_server_refuses_contradicting_options(command, options, message):
    chunk = () if "--chunk" in options else ("--chunk", 32)
    expect_one_line(command(*SERVER, *chunk, *options), message)
