"""Experiments: rows in the grid's order, each equal to one simulation, on any workers."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from itertools import product

import pytest
from small_shape import SMALL_SHAPE as SMALL

import chunkrt
from chunkrt.errors import ConfigError
from chunkrt.simulate import find_device, simulate
from chunkrt.simulate.experiments import Rows

NORM_ON_CPU = {"model.layers.*.input_layernorm": "cpu"}
GRID = {
    "devices": ["sd8gen3", "sd8elite"],
    "placements": [{}, NORM_ON_CPU],
    "schemes": ["w8a16", "w8a8"],
    "prompt_lengths": [200, 64],
    "chunk_lengths": [32],
    "policies": ["in_order", "look_ahead"],
    "chunks_in_flight": [None, 1],
}
POINT = {
    "devices": ["sd8gen3"],
    "schemes": ["w8a16"],
    "prompt_lengths": [64],
    "chunk_lengths": [32],
    "policies": ["in_order"],
}


@pytest.fixture(scope="module")
def rows() -> Rows:
    return chunkrt.experiment(SMALL, **GRID, workers=1)


def test_rows_are_those_of_single_simulations_in_the_order_of_the_grid(rows: Rows) -> None:
    assert len(rows) == 64
    for row, point in zip(rows, product(*GRID.values()), strict=True):
        device, placement, scheme, prompt_length, chunk_length, policy, in_flight = point
        alone = simulate(
            SMALL.plan(placement),
            find_device(device),
            prompt_length=prompt_length,
            chunk_length=chunk_length,
            policy=policy,
            scheme=scheme,
            chunks_in_flight=in_flight,
        ).to_dict()
        del alone["processors"], alone["link"]
        assert vars(row) == alone | {"model": "made up", "placement": placement}


def test_many_workers_give_the_rows_of_one_and_report_progress(rows: Rows) -> None:
    told = []
    found = chunkrt.experiment(SMALL, **GRID, workers=2, progress=lambda *news: told.append(news))
    assert found == rows
    assert told == [("simulating", done, 64) for done in range(1, 65)]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupt_ends_the_experiment_and_its_workers(workers: int) -> None:
    told = []

    def interrupt(what: str, done: int, total: int) -> None:
        told.append(done)
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chunkrt.experiment(SMALL, **GRID, workers=workers, progress=interrupt)
    assert told == [1, 2, 3]
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"devices": ["sd8gen"]}, "unknown device 'sd8gen'"),
        ({"devices": "sd8gen3"}, "devices is 'sd8gen3', expected a list"),
        ({"schemes": ["w8a17"]}, "unknown scheme 'w8a17'"),
        ({"policies": ["in_oder"]}, "did you mean 'in_order'"),
        ({"policies": []}, "policies is empty"),
        ({"prompt_lengths": [64, 513]}, "prompt_lengths: 513, expected a whole number of 1 to 512"),
        ({"chunk_lengths": [0]}, "chunk_lengths: 0, expected"),
        ({"chunk_lengths": 32}, "chunk_lengths is 32, expected a list"),
        ({"chunk_lengths": [32.5]}, "chunk_lengths: 32.5, expected a whole number"),
        ({"chunks_in_flight": [0]}, "chunks_in_flight: 0, expected a whole number of at least 1"),
        ({"workers": 0}, "workers: 0, expected"),
        ({"placements": {"lm_head": "npu"}}, "expected a list; put it in brackets"),
        ({"placements": ["lm_head"]}, "placements holds 'lm_head', expected a mapping"),
        ({"placements": [{"lm_head": "gpu"}]}, "'lm_head' is placed on 'gpu', expected 'npu' or 'cpu'"),
        ({"placements": [{"lm_haed": "npu"}]}, "did you mean 'lm_head'"),
    ],
)
def test_bad_input_is_one_clear_line(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        chunkrt.experiment(SMALL, **POINT | change)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_model_is_refused_with_the_shapes() -> None:
    with pytest.raises(ConfigError, match="available shapes: gemma-2b"):
        chunkrt.experiment("gemma-3b", **POINT)


def test_a_frame_has_a_row_for_each_point(rows: Rows) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed")
    frame = rows.to_pandas()
    assert list(frame["tokens_per_s"]) == [row.tokens_per_s for row in rows]
    assert set(frame["placement"]) == {"", "model.layers.*.input_layernorm=cpu"}
    assert len(frame.groupby(["device", "placement", "scheme"])) == 8


def test_missing_pandas_is_reported_with_an_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="pip install pandas"):
        Rows().to_pandas()


def test_importing_chunkrt_does_not_import_the_simulator() -> None:
    code = "import sys, chunkrt; print([m for m in sys.modules if m.startswith('chunkrt.simulate')])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
