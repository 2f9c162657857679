"""Tests of the page that `chunkrt report` writes: its content, labels and errors."""

import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

import pytest
from fixture_checkpoints import checkpoint
from one_line import expect_one_line

import chunkrt
from chunkrt.reports import timelines

GGUF = checkpoint("llama_biased_gguf")
HOSTILE = "<script>alert('a & b')</script>"
GRID = f"""
model = "gemma-2b"
devices = ["sd8gen3"]
schemes = ["w8a16"]
prompt_lengths = [256]
chunk_lengths = [64, 128]
policies = ["in_order", "look_ahead"]
[placements]
natural = {{}}
"{HOSTILE}" = {{"model.layers.*.mlp.down_proj" = "cpu"}}
"""


@dataclass
class Cell:
    """Text of a cell without its mark, the key by which the script sorts it, and its mark."""

    text: str = ""
    key: str | None = None
    mark: str = ""


@dataclass
class Table:
    """A table of the page."""

    caption: str = ""
    heads: list[str] = field(default_factory=list)
    rows: list[list[Cell]] = field(default_factory=list)

    def column(self, head):
        return [row[self.heads.index(head)] for row in self.rows]


class Page(HTMLParser):
    """The parts of a page: tables, scripts, data of timelines, and addresses of other resources."""

    def __init__(self, path):
        super().__init__()
        self.tables, self.scripts, self.data, self.addresses, self.text = [], [], [], [], ""
        self._open = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.addresses += [found[name] for name in ("src", "href") if name in found]
        assert not any(name.startswith("on") for name in found), found
        if tag == "table":
            self.tables.append(Table())
        elif tag == "tr":
            self.tables[-1].rows.append([])
        elif tag == "th":
            self.tables[-1].heads.append("")
        elif tag == "td":
            self.tables[-1].rows[-1].append(Cell(key=found.get("data-k")))
        if tag not in ("meta", "link"):
            self._open.append(tag + ("json" if found.get("type") == "application/json" else ""))

    def handle_endtag(self, tag):
        assert self._open.pop().removesuffix("json") == tag
        if tag == "table":
            self.tables[-1].rows = [row for row in self.tables[-1].rows if row]

    def handle_data(self, data):
        inner = self._open[-1] if self._open else ""
        if inner == "script":
            self.scripts.append(data)
        elif inner == "scriptjson":
            self.data.append(json.loads(data))
        elif inner == "caption":
            self.tables[-1].caption += data
        elif "th" in self._open:
            self.tables[-1].heads[-1] += data
        elif inner == "abbr" and "td" in self._open:
            self.tables[-1].rows[-1][-1].mark += data
        elif inner == "td":
            self.tables[-1].rows[-1][-1].text += data
        if inner not in ("script", "scriptjson", "style"):
            self.text += data

    def table(self, caption):
        (found,) = (table for table in self.tables if table.caption.startswith(caption))
        return found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def made(command, folder):
    """Return a function that runs a command with --json, and writes its output to a file."""

    def make(name, *arguments):
        finished = command(*arguments, "--json")
        assert finished.status == 0, finished.err
        (folder / name).write_text(finished.out)
        return name

    return make


@pytest.fixture
def report(command, folder):
    """Return a function that writes a report, and returns its parts."""

    def write(*runs, title="chunkrt report"):
        finished = command("report", *runs, "-o", "report.html", "--title", title)
        assert finished.status == 0, finished.err
        return Page(folder / "report.html")

    return write


def simulate(made, *more):
    return made("sim.json", "simulate", "qwen2.5-0.5b", "--device", "sd8gen3", "-p", 64, "--chunk", 32, *more)


def test_report_shows_figures_of_every_kind_of_file_with_their_origin(made, report, folder):
    (folder / "grid.toml").write_text(GRID)
    (folder / "text.txt").write_text("one two three four five six seven eight nine ten " * 20)
    bench = made("bench.json", "bench", GGUF, "-p", 16, "-n", 4, "-r", 2, "--trace", "trace.json")
    both = made("parallel.json", "bench", GGUF, "-p", 8, "-n", 2, "-r", 1, "--parallel", 2)
    predicted = simulate(made, "--trace", "predicted.json")
    grid = made("grid.json", "experiment", "grid.toml", "-o", "rows.jsonl", "--workers", 1)
    of_text = ("--text", "text.txt", "--window", 16, "--windows", 2)
    quality = made("eval.json", "eval", GGUF, *of_text, "--scheme", "w8a8", "--per-layer")
    tuned = made("tune.json", "tune", GGUF, "--device", "8gen3", "-o", "tuned.toml", "-p", 16, "--chunk", 32)
    served = made(
        *("served.json", "simulate", "qwen2.5-0.5b", "--device", "8gen3", "--chunk", 32, "--arrivals", "poisson:1"),
        *("--prompt", 32, "--generate", 4, "--requests", 4),
    )
    runs = (bench, both, predicted, grid, quality, tuned, served, "trace.json", "predicted.json", "rows.jsonl")
    page = report(*runs)
    overview = page.table("Sources")
    assert [cell.text for cell in overview.column("source")] == list(runs)
    measured = {"bench.json", "parallel.json", "eval.json", "trace.json"}
    assert {row[0].text for row in overview.rows if row[-1].text == "measured"} == measured
    assert {row[-1].text for row in overview.rows} == {"measured", "predicted"}

    prefills = page.table("Prefills")
    (row,) = json.loads((folder / "sim.json").read_text())
    for name, key in (("time to first token, ms", "time_to_first_token_ms"), ("tokens/s", "tokens_per_s")):
        cells = dict(zip([cell.text for cell in prefills.column("source")], prefills.column(name), strict=True))
        assert float(cells["sim.json"].key) == row[key]
        assert (cells["sim.json"].mark, cells["bench.json"].mark) == ("P", "M")
    assert len(prefills.rows) == 1 + 1 + 8 + len(json.loads((folder / "tune.json").read_text())["choices"]) + 1 + 1 + 8
    tests = {row["test"]: row for row in json.loads((folder / "bench.json").read_text())}
    shown = page.table("Tests")
    rates = zip([cell.text for cell in shown.column("test")], shown.column("tokens/s"), strict=True)
    assert {name: float(cell.key) for name, cell in rates} == {name: row["avg_ts"] for name, row in tests.items()}
    (perplexity,) = page.table("Evaluations").column("perplexity")
    assert float(perplexity.key) == json.loads((folder / "eval.json").read_text())["text"]["figures"]["perplexity"]


def test_every_figure_has_a_mark_and_other_cells_have_none(made, report, folder):
    made("bench.json", "bench", GGUF, "-p", 16, "-n", 0, "-r", 1, "--trace", "trace.json")
    page = report("bench.json", "trace.json", simulate(made))
    settings = {
        "prompt tokens",
        "chunk",
        "in flight",
        "threads",
        "runs",
        "runs or rows",
        "tasks",
        "workers",
        "number of runs",
    }
    for table in page.tables:
        for row in table.rows:
            for head, cell in zip(table.heads, row, strict=True):
                is_figure = cell.key not in (None, "") and head not in settings
                assert bool(cell.mark) == is_figure, (table.caption, head, cell)


def test_report_escapes_foreign_names(made, report, folder):
    (folder / "grid.toml").write_text(GRID)
    made("grid.json", "experiment", "grid.toml", "--workers", 1)
    row = json.loads((folder / "grid.json").read_text())[0]
    (folder / "other.json").write_text(json.dumps([row | {"model": HOSTILE, "device": HOSTILE, "policy": HOSTILE}] * 2))
    made("bench.json", "bench", GGUF, "-p", 16, "-n", 0, "-r", 1, "--trace", "trace.json")
    trace = json.loads((folder / "trace.json").read_text())
    trace["otherData"]["title"] = HOSTILE
    for stage in trace["otherData"]["pipelines"][0]["stages"]:
        stage[0] = HOSTILE
    (folder / "trace.json").write_text(json.dumps(trace))
    page = report("grid.json", "other.json", "trace.json", title=HOSTILE)
    assert len(page.scripts) == 1
    assert "alert" not in page.scripts[0]
    assert f"{HOSTILE} chunk 0" in page.data[0]["texts"]
    prefills = page.table("Prefills")
    assert {HOSTILE, "natural"} < {cell.text for cell in prefills.column("partition")}
    assert HOSTILE in {cell.text for cell in prefills.column("device")}
    assert page.text.strip().startswith(HOSTILE)


def test_report_needs_no_other_resource(made, report, folder):
    page = report(simulate(made, "--trace", "trace.json"), "trace.json")
    assert {address.partition(":")[0].partition("-")[0] for address in page.addresses} == {
        *("data", "#sources", "#rates", "#prefills", "#part"),
    }
    text = (folder / "report.html").read_text()
    assert not re.search(r"@import|url\(|https?:", text.replace("http://www.w3.org/2000/svg", ""))


def test_timeline_joins_bars_beyond_its_limit_and_states_it(made, report, monkeypatch):
    simulate(made, "--trace", "trace.json")
    (every,) = report("trace.json").data
    monkeypatch.setattr(timelines, "MOST_BARS", 60)
    page = report("trace.json")
    (data,) = page.data
    num_bars = [sum(len(row["bars"]) for row in each["rows"]) for each in (every, data)]
    assert num_bars[1] <= 60 < num_bars[0]
    assert sum(bar[6] for row in data["rows"] for bar in row["bars"]) == num_bars[0]
    assert f"The run has {num_bars[0]} bars" in page.text


def test_timeline_has_the_tasks_of_the_trace(made, report, folder):
    simulate(made, "--trace", "trace.json")
    (data,) = report("trace.json").data
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    tasks = [e for e in events if e["ph"] == "X" and "chunk" in e["args"] and e["cat"] != "span"]
    expected = sorted((e["name"], round(1000 * e["ts"]), round(1000 * e["dur"])) for e in tasks)
    bars = [bar for row in data["rows"] if row["panel"] == "workers" for bar in row["bars"]]
    found = sorted((data["texts"][bar[3]], *bar[:2]) for bar in bars if " chunk " in data["texts"][bar[3]])
    assert [name for name, _, _ in found] == [name for name, _, _ in expected]
    assert all(
        abs(a - b) <= 2
        for (_, *one), (_, *other) in zip(found, expected, strict=True)
        for a, b in zip(one, other, strict=True)
    )


def test_pareto_front_contains_the_rows_that_none_exceeds(made, report, folder):
    (folder / "grid.toml").write_text(GRID)
    made("grid.json", "experiment", "grid.toml", "--workers", 1)
    rows = json.loads((folder / "grid.json").read_text())
    points = [(r["time_to_first_token_ms"], r["peak_memory_bytes"], r["energy_joules"]) for r in rows]
    best = [
        "yes" if not any(o != p and all(map(float.__le__, map(float, o), map(float, p))) for o in points) else ""
        for p in points
    ]
    page = report("grid.json")
    assert [cell.text for cell in page.table("Prefills").column("Pareto front")] == best
    assert 0 < best.count("yes") < len(best)
    assert "on the front of time to first token and memory" in (folder / "report.html").read_text()


def test_report_labels_files_without_an_origin_as_unknown(made, report, folder):
    made("bench.json", "bench", GGUF, "-p", 16, "-n", 0, "-r", 1, "--trace", "trace.json")
    rows = json.loads((folder / "bench.json").read_text())
    trace = json.loads((folder / "trace.json").read_text())
    for each in (*rows, *trace["otherData"]["pipelines"]):
        assert each.pop("origin") == "measured"
    (folder / "bench.json").write_text(json.dumps(rows))
    (folder / "trace.json").write_text(json.dumps(trace))
    page = report("bench.json", "trace.json")
    assert {cell.mark for table in page.tables for row in table.rows for cell in row} == {"?", ""}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "run.json is empty; a report takes traces"),
        (b"\xff\xfe", "run.json is not UTF-8"),
        (b"{", "run.json is not JSON"),
        (b"[1, 2]", "run.json is JSON of an unknown kind; a report takes traces"),
        (b"[]", "run.json is JSON of an unknown kind"),
        (b'{"model": "a"}', "run.json is JSON of an unknown kind"),
        (b'{"traceEvents": []}', "not in the format 'chunkrt trace 2'"),
        (b'{"traceEvents": [], "otherData": {"format": "chunkrt trace 2"}}', "is damaged"),
        (b'[{"test": "pp8", "avg_ts": 1.0}]', "run.json is damaged: Object missing required field `model`"),
        (b'{"chunkrt": "0.0.1", "format": 1}\n{"a": 1}\n', "contains rows of chunkrt 0.0.1"),
        (b'{"choices": [], "best": 1, "default": 1}', "run.json is damaged"),
    ],
)
def test_report_refuses_other_files_in_one_line(command, folder, content, message):
    (folder / "run.json").write_bytes(content)
    (folder / "report.html").write_text("earlier")
    expect_one_line(command("report", "run.json", "-o", "report.html"), message, 1)
    assert (folder / "report.html").read_text() == "earlier"
    assert {path.name for path in folder.iterdir()} == {"run.json", "report.html"}


def test_report_refuses_figures_that_are_not_finite(command, made, folder):
    made("bench.json", "bench", GGUF, "-p", 16, "-n", 0, "-r", 1)
    text = re.sub(r'"avg_ts": [^,]*', '"avg_ts": 1e999', (folder / "bench.json").read_text())
    (folder / "bench.json").write_text(text)
    expect_one_line(
        command("report", "bench.json", "-o", "report.html"), "bench.json is damaged: Expected `float` <=", 1
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing.json", "-o", "a.html"), "cannot read missing.json: No such file"),
        ((".", "-o", "a.html"), "cannot read .: "),
        (("run.json", "-o", "a.txt"), "its name must end in .html"),
        (("run.json", "-o", "none/a.html"), "there is no folder none"),
        (("run.json",), "Missing option '-o' / '--output'"),
        (("-o", "a.html"), "Missing argument 'RUN...'"),
    ],
)
def test_report_refuses_wrong_paths_in_one_line(command, folder, arguments, message):
    expect_one_line(command("report", *arguments), message)


def test_report_takes_objects_and_names_them(folder):
    rows = chunkrt.experiment(
        "qwen2.5-0.5b",
        devices=["sd8gen3"],
        chunk_lengths=[32],
        policies=["in_order", "look_ahead"],
        schemes=["w8a16"],
        prompt_lengths=[64],
        workers=1,
    )
    records = []
    with chunkrt.load(GGUF, threads=1) as engine, engine.session() as session:
        session.on_run = records.append
        session.prefill([1, 2, 3])
    chunkrt.report({"predicted": rows, "this machine": records}, folder / "report.html")
    page = Page(folder / "report.html")
    assert [cell.text for cell in page.table("Prefills").column("source")] == ["predicted"] * 2 + ["this machine"]
    assert [cell.mark for cell in page.table("Prefills").column("tokens/s")] == ["P", "P", "M"]
    for wrong in ([], [3], [[]], "run.json", [[3, 4]]):
        with pytest.raises(chunkrt.ChunkrtError, match="source"):
            chunkrt.report(wrong, folder / "report.html")
    for sources, output, title in [
        (None, "a.html", "t"),
        ({5: rows}, "a.html", "t"),
        ([rows], None, "t"),
        ([rows], "a.html", None),
    ]:
        with pytest.raises(chunkrt.ChunkrtError, match="expected"):
            chunkrt.report(sources, output, title=title)


def test_equal_files_give_identical_reports(made, report, folder):
    simulate(made, "--trace", "trace.json")
    pages = []
    for _ in range(2):
        report("sim.json", "trace.json")
        pages.append((folder / "report.html").read_bytes())
    assert pages[0] == pages[1]


def test_files_of_an_emulated_npu_say_so(made, report):
    qnn = pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn, which emulates the NPU, is not installed")
    assert qnn
    if not chunkrt.backends.qnn.is_emulating():
        pytest.skip("this machine has an NPU, which is not emulated")
    emulated = ("--npu", "qnn", "--scheme", "w8a16", "--chunk", 8)
    made("bench.json", "bench", GGUF, "-p", 8, "-n", 1, "-r", 1, *emulated, "--trace", "trace.json")
    page = report("bench.json", "trace.json")
    tests = page.table("Tests")
    marks = dict(zip([c.text for c in tests.column("test")], [c.mark for c in tests.column("tokens/s")], strict=True))
    assert marks == {"pp8": "E", "tg1": "M"}  # single tokens run on the CPU
    assert {cell.mark for cell in page.table("Prefills").column("tokens/s")} == {"E"}


def test_report_combines_the_workers_of_the_link_as_trace_does(command, made, report):
    ranks = ("--ranks", 2, "--link", "1GbE", "--trace", "trace.json")
    made("sim.json", "simulate", "qwen2.5-0.5b", "--device", "sdxelite", "-p", 64, "--chunk", 32, *ranks)
    (group,) = json.loads(command("trace", "trace.json", "--json").out)["groups"]
    page = report("sim.json", "trace.json")
    times = page.table("Time of each processor")
    cells = dict(zip(times.heads, times.rows[[row[0].text for row in times.rows].index("LINK")], strict=True))
    busy = 100 * group["link"]["busy_ns"] / group["wall_ns"]
    assert float(cells["busy"].key) == pytest.approx(busy)
    assert float(cells["sums hidden by other work"].key) == pytest.approx(busy * group["link"]["hidden"])
