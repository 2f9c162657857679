"""Execute the notebooks of docs/notebooks, and check their tables and texts."""

import json
import re
from pathlib import Path

import pytest
from fixture_checkpoints import checkpoint

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebooks" / "start.ipynb"
STUDY = NOTEBOOK.with_name("partitions.ipynb")
MOST_BYTES = 100_000


def shown(cell):
    """Return the outputs of a cell by MIME type."""
    return {kind: text for output in cell.outputs for kind, text in output.get("data", {}).items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # warnings of the notebook's libraries
def test_notebook_runs_and_shows_tables(monkeypatch, tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="needs nbclient")
    client = pytest.importorskip("nbclient", reason="needs nbclient")
    pytest.importorskip("ipykernel", reason="needs ipykernel")
    monkeypatch.setenv("MODEL", str(checkpoint("llama_biased_gguf")))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}  # the installed package is imported there
    client.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=place).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(output.output_type != "error" for cell in code for output in cell.outputs)
    tables = [shown(cell)["text/html"] for cell in code if "text/html" in shown(cell)]
    assert [table.split("<caption>")[1].split()[0] for table in tables] == ["llama,", "prefill", "simulated"]
    assert shown(code[0])["text/plain"].startswith("Engine(")


@pytest.mark.slow
def test_notebook_is_small_and_has_no_stored_outputs():
    assert NOTEBOOK.stat().st_size < MOST_BYTES
    assert '"outputs": []' in NOTEBOOK.read_text()
    assert "output_type" not in NOTEBOOK.read_text()


def kinds_of(cells):
    """Return the MIME types of the outputs of each cell, with the headings of its tables."""
    return [{kind: re.findall("<th>(.*?)</th>", text) for kind, text in shown(cell).items()} for cell in cells]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # warnings of the notebook's libraries
def test_study_of_partitions_gives_outputs_of_the_stored_kinds(tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="needs nbclient")
    client = pytest.importorskip("nbclient", reason="needs nbclient")
    pytest.importorskip("ipykernel", reason="needs ipykernel")
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    notebook = nbformat.read(STUDY, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    stored = kinds_of(code)
    place = {"metadata": {"path": str(tmp_path)}}
    client.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=place).execute()
    assert kinds_of(code) == stored
    assert (tmp_path / "study.html").stat().st_size > 0


def test_study_of_partitions_is_stored_with_small_outputs_and_no_paths():
    text = STUDY.read_text(encoding="utf-8")
    assert STUDY.stat().st_size < MOST_BYTES
    assert not re.search(r"/(home|work|tmp|root|Users)/", text)
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"execute_result"}
    assert {"text/html", "image/svg+xml"} < {kind for output in outputs for kind in output["data"]}
