"""Experiments: rows in the grid's order, each equal to one simulation, on any workers."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from small_shape import SMALL_SHAPE as SMALL

import chunkrt
from chunkrt.errors import ConfigError
from chunkrt.quant.scheme import SCHEMES
from chunkrt.simulate import find_device, simulate
from chunkrt.simulate.experiments import GridRow, Rows, near_plans_of, placement_text

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
        names = {"model": "made up", "placement_name": placement_text(placement), "attention": "cpu"}
        assert vars(row) == alone | names | {"placement": placement}


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
        ({"placements": {"lm_head": "npu"}}, "expected a list of placements; put it in brackets"),
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


def test_named_placements_attentions_and_shadows_are_axes() -> None:
    placements = {"natural": {}, "norm on cpu": NORM_ON_CPU}
    options = {"schemes": ["w8a8"], "shadow": "*.down_proj.weight", "attentions": ["cpu", "npu:64"]}
    rows = chunkrt.experiment(SMALL, **POINT | options, placements=placements, workers=1)
    assert [(row.placement_name, row.attention) for row in rows] == list(product(placements, ["cpu", "npu:64"]))
    shadowed = replace(SCHEMES["w8a8"], shadowed=("*.down_proj.weight",))
    for row in rows:
        plan = SMALL.plan(placements[row.placement_name], is_shadowed=shadowed.is_shadowed)
        near = near_plans_of(plan, row.placement, row.attention, 32) if row.attention != "cpu" else {}
        alone = simulate(
            plan,
            find_device("sd8gen3"),
            prompt_length=64,
            chunk_length=32,
            policy="in_order",
            scheme=shadowed,
            near=near,
        )
        assert row.time_to_first_token_ms == alone.time_to_first_token_ms
        assert row.peak_memory_bytes == alone.peak_memory_bytes
    assert len({row.time_to_first_token_ms for row in rows}) == 4


def test_best_and_pareto_rows_are_those_of_a_comparison_of_all_pairs(rows: Rows) -> None:
    assert rows.best().time_to_first_token_ms == min(row.time_to_first_token_ms for row in rows)
    assert rows.best("tokens_per_s").tokens_per_s == max(row.tokens_per_s for row in rows)
    front = rows.pareto("tokens_per_s", "energy_joules")

    def exceeds(a: GridRow, b: GridRow) -> bool:
        pairs = [(a.tokens_per_s, b.tokens_per_s), (-(a.energy_joules or 0), -(b.energy_joules or 0))]
        return all(x >= y for x, y in pairs) and any(x > y for x, y in pairs)

    assert front == [row for row in rows if not any(exceeds(other, row) for other in rows)]
    assert 0 < len(front) < len(rows)
    with pytest.raises(ConfigError, match="did you mean 'tokens_per_s'"):
        rows.best("tokens_per_se")
    with pytest.raises(ConfigError, match="policy is not a number"):
        rows.pareto("policy")


def test_plot_draws_a_line_for_each_combination(rows: Rows, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    rows.plot(tmp_path / "study.svg")
    text = (tmp_path / "study.svg").read_text()
    assert "look_ahead" in text
    assert "prompt length" in text
    with pytest.raises(ConfigError, match="there are no rows to draw"):
        Rows().plot(tmp_path / "none.svg")


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
