"""`bench/serving.py --url`: figures from the times of tokens, and a server that is measured over HTTP."""

import json

import numpy as np
import pytest
from bench_modules import peers
from chat_model import write_chat_model
from click.testing import CliRunner
from server_of_tests import serving

import chunkrt


@pytest.fixture(scope="module")
def remote():
    return peers("remote")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = write_chat_model(tmp_path_factory.mktemp("remote") / "engine")
    with chunkrt.load(folder, npu="native", chunk_length=8, threads=2) as engine:
        yield engine


def test_figures_of_known_times(remote):
    bounds = remote.Bounds(first_s=1.0, gap_s=0.5)
    good = remote.Asked(0.0, [1.0, 1.5, 2.0])
    late = remote.Asked(1.0, [2.25, 2.5])
    slow = remote.Asked(2.0, [2.5, 4.0])
    cut = remote.Asked(3.0, [3.25], error="it went")
    refused = remote.Asked(3.0, error="status 503")
    assert [bounds.hold(one) for one in (good, late, slow, cut, refused)] == [True, False, False, False, False]
    found = remote.figures([good, late, slow, cut, refused], bounds)
    assert (found["requests"], found["answered"], found["errors"]) == (5, 3, ["it went", "status 503"])
    assert found["tokens/s"] == 7 / 4
    assert found["requests/s"] == 3 / 4
    assert found["goodput, requests/s"] == 1 / 4
    assert found["first token p50, s"] == 1.0
    assert found["gap p50, s"] == np.median([0.5, 0.5, 0.25, 1.5])
    assert remote.figures([refused], bounds) == {"requests": 1, "answered": 0, "errors": ["status 503"]}


def test_arrivals_are_those_of_a_poisson_process(remote):
    times = np.array(remote.poisson_arrivals(np.random.default_rng(1), 4.0, 4000))
    gaps = np.diff(times)
    assert times[0] == 0
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)


def test_a_server_is_measured(remote, engine, tmp_path):
    with serving(engine) as (_, url):
        file = tmp_path / "figures.json"
        options = ["--requests", "5", "--rate", "50", "--rate", "100", "-p", "4", "-n", "3", "--json", str(file)]
        done = CliRunner().invoke(remote.remote, ["--url", f"{url}/v1", "--first-bound", "60", *options])
    assert done.exit_code == 0, done.output
    rows = json.loads(file.read_text())
    assert [row["rate, requests/s"] for row in rows] == [50, 100]
    for row in rows:
        assert (row["requests"], row["answered"], row["errors"]) == (5, 5, [])
        assert 0 < row["first token p50, s"] <= row["first token p99, s"]
        assert row["tokens/s"] > row["requests/s"] >= row["goodput, requests/s"] > 0
    assert done.output.count(f"| {url}/v1 | ") == 2


def test_remote_reports_refused_requests(remote, engine):
    with serving(engine) as (_, url):
        options = ["--requests", "2", "--rate", "50", "-p", "400", "-n", "3"]
        done = CliRunner().invoke(remote.remote, ["--url", f"{url}/v1", *options])
        assert done.exit_code == 0, done.output
        assert "status 400" in done.output
        done = CliRunner().invoke(remote.remote, ["--url", f"{url}/v2", *options])
    assert done.exit_code == 1
    assert "up to and including /v1" in done.output
