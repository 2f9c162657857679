"""Generated requests: distributions, seeds, and malformed input."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import pytest

from chunkrt.errors import ConfigError
from chunkrt.simulate.arrivals import Load, draw


def drawn(arrivals: str = "poisson:2", prompt: str = "10", generate: str = "5", **changes: int) -> Load:
    return draw(arrivals, prompt, generate, **{"requests": 4000, "context_length": 4096} | changes)


def test_arrivals_come_at_their_rate_and_in_order() -> None:
    times = [request.arrival_ns or 0.0 for request in drawn().requests]
    assert times == sorted(times)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert mean(gaps) == pytest.approx(0.5e9, rel=0.05)
    assert median(gaps) == pytest.approx(0.5e9 * 0.693, rel=0.05)  # exponential distribution
    assert {request.arrival_ns for request in drawn("closed").requests} == {None}


def test_lengths_are_as_they_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_text("7\n8\n 9\n")
    load = drawn(prompt="uniform:3:5", generate=str(path))
    assert {request.prompt for request in load.requests} == {3, 4, 5}
    assert [request.generate for request in load.requests[:7]] == [7, 8, 9, 7, 8, 9, 7]
    tokens = [request.prompt for request in drawn(prompt="lognormal:100:0.5").requests]
    assert median(tokens) == pytest.approx(100, rel=0.05)
    assert mean(tokens) == pytest.approx(100 * 2.718281828 ** (0.5**2 / 2), rel=0.05)


def test_another_distribution_of_one_leaves_the_others_as_they_are() -> None:
    one, other = drawn(prompt="uniform:3:50", seed=1), drawn(prompt="lognormal:10:1", seed=1)
    assert [r.arrival_ns for r in one.requests] == [r.arrival_ns for r in other.requests]
    assert drawn(seed=1) == drawn(seed=1) != drawn(seed=2)


def test_lognormal_lengths_are_clipped_to_the_context_and_counted() -> None:
    load = drawn(prompt="lognormal:100:1", generate="30", context_length=200)
    assert max(request.prompt + request.generate for request in load.requests) == 200
    assert min(request.generate for request in load.requests) >= 1
    whole = drawn(prompt="lognormal:100:1", generate="30", context_length=1 << 40)
    assert load.num_cut == sum(request.prompt + request.generate > 200 for request in whole.requests) > 100
    assert drawn().num_cut == 0
    with pytest.raises(
        ConfigError, match="a prompt of 180 and an answer of 30 tokens exceed the model's context of 200"
    ):
        drawn(prompt="180", generate="30", context_length=200)


@pytest.mark.parametrize(
    "arrivals",
    [
        "",
        "2",
        "poisson",
        "poisson:",
        "poisson:0",
        "poisson:-1",
        "poisson:nan",
        "poisson:inf",
        "poisson:1e-308",
        "poisson:x",
        "open",
    ],
)
def test_malformed_arrivals_are_refused(arrivals: str) -> None:
    with pytest.raises(ConfigError, match=r"expected poisson:RATE \(requests per second\) or closed"):
        drawn(arrivals)


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "0",
        "-3",
        "1.5",
        "many",
        "uniform",
        "uniform:5",
        "uniform:5:3",
        "uniform:0:3",
        "uniform:1:2:3",
        "uniform:1:1e3",
        "lognormal:100",
        "lognormal:0:1",
        "lognormal:100:-1",
        "lognormal:100:inf",
        "lognormal:nan:1",
        f"{1 << 40}",
    ],
)
def test_malformed_lengths_are_refused(prompt: str) -> None:
    with pytest.raises(ConfigError, match="expected a number, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA, or a file"):
        drawn(prompt=prompt)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no numbers"),
        (b"3\nfour\n", "number 2 of .* is 'four'"),
        (b"0", "number 1 of .* is '0'"),
        (b"1" * 5000, "number 1 of .* is '1111"),
        (b"\xff\xfe", "cannot read prompt lengths from"),
    ],
)
def test_files_that_hold_no_lengths(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "lengths"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        drawn(prompt=str(path))
    with pytest.raises(ConfigError, match="cannot read prompt lengths from"):
        drawn(prompt=str(tmp_path))


def test_numbers_out_of_range() -> None:
    with pytest.raises(ConfigError, match="0 requests, expected at least 1"):
        drawn(requests=0)
    with pytest.raises(ConfigError, match="the seed is -1"):
        drawn(seed=-1)


def test_a_missing_file_of_lengths_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere.txt")
    with pytest.raises(ConfigError, match=r"prompt is '.*nowhere\.txt', expected a number, .*; there is no such file"):
        draw("closed", missing, "1", requests=1, context_length=100)
