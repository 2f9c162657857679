"""Experiments: rows in the grid's order, each equal to one simulation, on any workers."""

from __future__ import annotations

import csv
import json
import multiprocessing
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import pytest
from one_line import expect_one_line
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
        for name in ("processors", "link", "interval", "joules", "ms_by_parameter", "contexts", "padding"):
            del alone[name]
        assert alone.pop("graph_lengths") == []
        names = {
            "graphs": "",
            "model": "made up",
            "placement_name": placement_text(placement),
            "attention": "cpu",
            "device": device,
        }
        assert vars(row) == alone | names | {"placement": placement, "origin": "predicted"}


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
        ({"policies": [3]}, "the policy 3 is not a policy"),
        ({"schemes": [["w8a8"]]}, "schemes: ['w8a8'], expected a name"),
        ({"devices": [3]}, "devices: 3, expected a profile"),
        ({"prompt_lengths": [64, 513]}, "prompt_lengths: 513, expected a whole number of 1 to 512"),
        ({"chunk_lengths": [0]}, "chunk_lengths: 0, expected"),
        ({"chunk_lengths": 32}, "chunk_lengths is 32, expected a list"),
        ({"chunk_lengths": [32.5]}, "chunk_lengths: 32.5, expected a whole number"),
        ({"chunk_lengths": [True]}, "chunk_lengths: True, expected a whole number"),
        ({"chunks_in_flight": [0]}, "chunks_in_flight: 0, expected a whole number of 1 to 256"),
        ({"chunks_in_flight": [257]}, "chunks_in_flight: 257, expected a whole number of 1 to 256"),
        ({"workers": 0}, "workers: 0, expected"),
        ({"placements": {"lm_head": "npu"}}, "expected a list of placements; put it in brackets"),
        ({"placements": ["layers=x"]}, "the placement is 'layers=x', expected numbers of layers"),
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
        near = near_plans_of(plan, row.placement, row.attention) if row.attention != "cpu" else {}
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


def test_a_list_of_layers_is_the_placement_of_its_modules() -> None:
    mapping = {"model.layers.*": "cpu", "model.layers.1": "npu"}
    listed, mapped = (
        chunkrt.experiment(SMALL, **POINT, placements={"mine": value}, workers=1) for value in ("layers=1", mapping)
    )
    assert listed == mapped
    assert listed[0].placement == mapping


def test_best_and_pareto_rows_are_those_of_a_comparison_of_all_pairs(rows: Rows) -> None:
    assert rows.best().time_to_first_token_ms == min(row.time_to_first_token_ms for row in rows)
    assert rows.best("tokens_per_s").tokens_per_s == max(row.tokens_per_s for row in rows)
    front = rows.pareto("tokens_per_s", "energy_joules")

    def exceeds(a: GridRow, b: GridRow) -> bool:
        pairs = [(a.tokens_per_s, b.tokens_per_s), (-(a.energy_joules or 0), -(b.energy_joules or 0))]
        is_comparable = (a.device, a.prompt_length) == (b.device, b.prompt_length)
        return is_comparable and all(x >= y for x, y in pairs) and any(x > y for x, y in pairs)

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


def test_interrupted_experiment_continues_from_its_file(rows: Rows, tmp_path: Path) -> None:
    path, told = tmp_path / "rows.jsonl", []

    def interrupt(what: str, done: int, total: int) -> None:
        if done == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chunkrt.experiment(SMALL, **GRID, workers=1, output=path, progress=interrupt)
    assert Rows.read(path) == rows_without_duplicates(rows)[:10]
    with path.open("a") as file:
        file.write('{"key": "a half of a li')
    renamed = {**GRID, "placements": {"natural": {}, "norms": NORM_ON_CPU}}
    found = chunkrt.experiment(
        SMALL, **renamed, workers=1, output=path, progress=lambda what, done, total: told.append(done)
    )
    assert told == list(range(11, len(rows_without_duplicates(rows)) + 1))
    names = {"": "natural", placement_text(NORM_ON_CPU): "norms"}
    assert found == [replace(row, placement_name=names[row.placement_name]) for row in rows]
    assert len(Rows.read(path)) == len(rows_without_duplicates(rows))


def test_reading_rows_changes_no_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    chunkrt.experiment(SMALL, **POINT, workers=1, output=path)
    content = path.read_bytes()
    path.write_bytes(content[:-20])  # as while a row is written
    assert Rows.read(path) == []
    assert path.read_bytes() == content[:-20]
    path.write_bytes(b"")
    assert Rows.read(path) == []
    assert path.read_bytes() == b""


def test_experiments_take_turns_with_a_file(rows: Rows, tmp_path: Path) -> None:
    path, told, others = tmp_path / "rows.jsonl", [], []
    grid = GRID | {"devices": ["sd8gen3"]}

    def run_again() -> None:
        chunkrt.experiment(SMALL, **grid, workers=1, output=path, progress=lambda *state: told.append(state))

    def start_another(what: str, done: int, total: int) -> None:
        if done == 1:
            others.append(threading.Thread(target=run_again))
            others[0].start()

    found = chunkrt.experiment(SMALL, **grid, workers=1, output=path, progress=start_another)
    others[0].join()
    assert told == []
    assert len(path.read_text().splitlines()) == 1 + len(rows_without_duplicates(found))
    assert [each.name for each in tmp_path.iterdir()] == ["rows.jsonl"]


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
from chunkrt.cli import main
sys.argv[0] = "chunkrt"
main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit of the size of files")
def test_full_disk_is_one_line_and_the_rows_remain(tmp_path: Path) -> None:
    grid, path = tmp_path / "grid.toml", tmp_path / "rows.jsonl"
    grid.write_text(GRID_FILE)
    command = [sys.executable, "-B", "-P", "-c", LIMITED, "experiment", str(grid), "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, f"chunkrt: cannot write {path}: File too large\n")
    assert len(Rows.read(path)) == 1


def rows_without_duplicates(rows: Rows) -> list[GridRow]:
    """Return the rows of different points: a number of chunks in flight beyond the prompt's chunks changes nothing."""
    return [row for index, row in enumerate(rows) if row not in rows[:index]]


def test_file_of_rows_of_another_version_or_content_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"chunkrt": "0.0.1", "format": 1}\n')
    with pytest.raises(ConfigError, match=r"contains rows of chunkrt 0\.0\.1; name another file"):
        chunkrt.experiment(SMALL, **POINT, workers=1, output=path)
    path.write_text("device,policy\n")
    with pytest.raises(ConfigError, match="is not a file of rows of an experiment"):
        Rows.read(path)
    with pytest.raises(ConfigError, match="cannot write"):
        chunkrt.experiment(SMALL, **POINT, workers=1, output=tmp_path / "none" / "rows.jsonl")


GRID_FILE = """\
model = "gemma-2b"
devices = ["sd8gen3"]
schemes = ["w8a16"]
prompt_lengths = [64]
chunk_lengths = [32]
policies = ["in_order"]
chunks_in_flight = ["auto", 1]
"""


def test_command_prints_and_writes_the_rows_of_a_file(command, tmp_path: Path) -> None:
    grid, table = tmp_path / "grid.toml", tmp_path / "rows.csv"
    grid.write_text(GRID_FILE + '[placements]\nnatural = {}\n"norm" = { "model.norm" = "cpu" }\n')
    finished = command("experiment", grid, "-o", tmp_path / "rows.jsonl", "--csv", table, "--json")
    assert (finished.status, finished.err) == (0, "")
    placements = {"natural": {}, "norm": {"model.norm": "cpu"}}
    options = {**POINT, "placements": placements, "chunks_in_flight": [None, 1]}
    expected = chunkrt.experiment("gemma-2b", **options, workers=1)
    assert json.loads(finished.out) == [asdict(row) for row in expected]
    with table.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [float(line["tokens_per_s"]) for line in written] == [row.tokens_per_s for row in expected]
    assert [line["placement"] for line in written] == ["", "", "model.norm=cpu", "model.norm=cpu"]
    shown = command("experiment", grid).out.splitlines()
    assert shown[0].startswith("gemma-2b: 4 rows, predicted by simulation")
    assert shown[1].split()[0] == "placement"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model = ", "cannot read"),
        (GRID_FILE + "polices = []\n", "unknown key 'polices'; did you mean 'policies'"),
        (GRID_FILE + "workers = 2\n", "unknown key 'workers'"),
        (GRID_FILE.replace('devices = ["sd8gen3"]\n', ""), "the key 'devices' is missing"),
        (GRID_FILE.replace('["auto", 1]', '["aut"]'), "chunks_in_flight: 'aut', expected a whole number"),
    ],
)
def test_wrong_file_of_a_grid_prints_one_line(command, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "grid.toml").write_text(text)
    expect_one_line(command("experiment", tmp_path / "grid.toml"), message, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--csv", "grid.toml"], "--csv grid.toml would overwrite the grid; name another file"),
        (["-o", "./grid.toml"], "-o grid.toml would overwrite the grid"),
        (["-o", "rows", "--csv", "rows"], "would overwrite the file of --csv"),
    ],
)
def test_outputs_never_overwrite_the_grid_or_each_other(
    command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("grid.toml").write_text(GRID_FILE)
    expect_one_line(command("experiment", "grid.toml", *options), message, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["grid.toml"]
    assert Path("grid.toml").read_text() == GRID_FILE


def test_file_of_rows_with_a_header_alone_has_no_rows_yet(command, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    chunkrt.experiment(SMALL, **POINT, workers=1, output=path)
    path.write_text(path.read_text().splitlines()[0] + "\n")
    finished = command("report", path, "-o", tmp_path / "report.html")
    assert (finished.status, finished.out) == (1, "")
    assert finished.err == f"chunkrt: {path} has no rows yet; run its experiment\n"
    with pytest.raises(ConfigError, match="there are no rows; an experiment has to finish one first"):
        Rows.read(path).best()


def test_unknown_model_is_refused_with_the_shapes() -> None:
    with pytest.raises(ConfigError, match=r"available shapes: allam-7b, .*gemma-2b, "):
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
