"""Experiments on a Dask cluster within this process: the rows of this machine, and one clear line for each failure."""

from __future__ import annotations

import sys

import pytest
from small_shape import SMALL_SHAPE as SMALL

import chunkrt
import chunkrt.simulate.dask_cluster
from chunkrt.errors import ConfigError
from chunkrt.simulate.dask_cluster import run_on_dask
from chunkrt.simulate.tune import tune

distributed = pytest.importorskip("distributed", reason='distributed is not installed: pip install "chunkrt[dask]"')

POINTS = {
    "devices": ["sd8gen3"],
    "schemes": ["w8a16"],
    "prompt_lengths": [64, 100],
    "chunk_lengths": [32, 64],
    "policies": ["in_order", "look_ahead"],
}


@pytest.fixture(scope="module")
def cluster():
    with distributed.LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=":0") as found:
        yield found


def test_its_rows_are_those_of_this_process(cluster) -> None:
    told = []
    here = chunkrt.experiment(SMALL, **POINTS, workers=1)
    address = cluster.scheduler_address
    there = chunkrt.experiment(SMALL, **POINTS, dask=address, progress=lambda *news: told.append(news))
    assert there == here
    assert told == [("simulating", done, 8) for done in range(1, 9)]


def test_a_client_is_taken_and_stays_open(cluster) -> None:
    with distributed.Client(cluster) as client:
        assert len(chunkrt.experiment(SMALL, **POINTS, dask=client)) == 8
        assert client.status == "running"


def test_the_search_runs_there(cluster) -> None:
    options = {"prompt_lengths": [64], "chunk_lengths": [32]}
    there = tune(SMALL, "sd8gen3", **options, dask=cluster.scheduler_address)
    assert there == tune(SMALL, "sd8gen3", **options, workers=1)


def test_errors_of_a_worker_are_raised_by_the_caller(cluster) -> None:
    def refuse(held: str, point: int) -> None:
        raise ConfigError(f"{held} {point}")

    with pytest.raises(ConfigError, match=r"^not 1$"):
        run_on_dask(cluster.scheduler_address, refuse, "not", [1], lambda done: None)


def test_a_worker_that_fails_prints_one_line(cluster) -> None:
    def fail(held: None, point: int) -> None:
        raise ImportError("no module named chunkrt")

    with pytest.raises(ConfigError, match=r"ImportError: no module named chunkrt.; its workers need this version"):
        run_on_dask(cluster.scheduler_address, fail, None, [1, 2], lambda done: None)


def test_an_interrupt_ends_it(cluster) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chunkrt.experiment(SMALL, **POINTS, dask=cluster.scheduler_address, progress=interrupt)


def test_a_cluster_without_workers_prints_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunkrt.simulate.dask_cluster, "CONNECT_SECONDS", 0.2)
    with (
        distributed.LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as empty,
        pytest.raises(ConfigError, match="has no workers; start some with `dask worker"),
    ):
        chunkrt.experiment(SMALL, **POINTS, dask=empty.scheduler_address)


@pytest.mark.parametrize("address", ["nonsense", "", "tcp://127.0.0.1:1", "gopher://127.0.0.1:1"])
def test_unreachable_address_prints_one_line(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(chunkrt.simulate.dask_cluster, "CONNECT_SECONDS", 0.2)
    with pytest.raises(ConfigError, match="found no Dask scheduler at"):
        chunkrt.experiment(SMALL, **POINTS, dask=address)


def test_missing_distributed_is_reported_with_an_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ConfigError, match=r'pip install "chunkrt\[dask\]"'):
        chunkrt.experiment(SMALL, **POINTS, dask="tcp://127.0.0.1:8786")
