"""Tests of `chunkrt profile`: it measures a small model, and the simulator reads the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fixture_checkpoints import checkpoint
from one_line import expect_one_line

from chunkrt.simulate import MeasuredProfile, read_profile

GGUF = str(checkpoint("llama_biased_gguf"))


def test_profile_is_written_and_simulated(command, tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    finished = command("profile", GGUF, "-o", str(path), "-r", "1", "--chunk", "8", "--threads", "2")
    assert (finished.status, finished.out) == (0, "")
    profile = read_profile(path)
    assert isinstance(profile, MeasuredProfile)
    assert (profile.chunk_length, profile.has_npu, set(profile.budgets)) == (8, False, {1, 2})
    assert {cost.speeds for cost in profile.budgets[1].subgraphs.values()} == {(1.0,)}
    assert all(len(cost.speeds) == 2 for cost in profile.budgets[2].subgraphs.values())
    assert all(cost.fixed_us + cost.row_us + cost.pair_us > 0 for cost in profile.budgets[1].subgraphs.values())
    assert all(
        len(budget.decode) == 2 and all(cost.fixed_us + cost.row_us > 0 for cost in budget.decode.values())
        for budget in profile.budgets.values()
    )
    load = ("--arrivals", "closed", "--prompt", "4", "--generate", "9", "--sessions", "2", "--requests", "2")
    served = command("simulate", GGUF, "--device", str(path), *load, "--json")
    [row] = json.loads(served.out)
    layers, head = profile.budgets[2].decode.values()
    step_us = sum(cost.fixed_us + 2 * cost.row_us for cost in (layers, head)) + layers.pair_us * 2 * 8.5
    step_us += profile.budgets[2].step_us + 2 * profile.budgets[2].token_us + 2 * profile.budgets[2].task_us
    assert row["gap_ms"]["mean"] == pytest.approx(step_us / 1000, rel=1e-3)
    simulated = command("simulate", GGUF, "--device", str(path), "-p", "20", "--threads", "1", "--json")
    assert simulated.status == 0
    [row] = json.loads(simulated.out)
    assert (row["scheme"], row["chunk_length"]) == ("w8a8-dynamic", 8)
    assert row["processors"]["cpu"]["busy"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-o", "here.json"], "expected a name that ends in .toml"),
        (["-o", "here.toml", "-r", "0"], "--repetitions is 0, expected at least 1"),
        (["-o", "here.toml", "--budgets", "1,x"], "--budgets is '1,x', expected numbers"),
        (["-o", "here.toml", "--budgets", "0"], "--budgets is '0', expected numbers of at least 1"),
    ],
)
def test_profile_errors_print_one_line(command, tmp_path: Path, options: list[str], message: str) -> None:
    expect_one_line(
        command("profile", GGUF, *(str(tmp_path / o) if o.startswith("here") else o for o in options)), message, 1
    )
    assert not list(tmp_path.iterdir())


def test_profile_refuses_chunks_as_long_as_the_prompt(command, tmp_path: Path) -> None:
    finished = command("profile", GGUF, "-o", str(tmp_path / "here.toml"), "-r", "1", "--chunk", "128")
    assert finished.status == 1
    assert "chunks of 128 in 128 tokens" in finished.err
    assert "use shorter chunks" in finished.err


def test_profile_refuses_a_context_without_room_for_decode(command, tmp_path: Path) -> None:
    context = ("--chunk", "4", "--context", "17")
    finished = command("profile", GGUF, "-o", str(tmp_path / "here.toml"), "-r", "1", *context)
    assert finished.status == 1
    assert "the context has 17 tokens; expected at least 18, to measure decode" in finished.err
    context = ("--chunk", "4", "--context", "18")
    assert command("profile", GGUF, "-o", str(tmp_path / "here.toml"), "-r", "1", *context).status == 0
