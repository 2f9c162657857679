"""Execute docs/notebooks/start.ipynb, and check its tables and texts."""

from pathlib import Path

import pytest
from fixture_checkpoints import checkpoint

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebooks" / "start.ipynb"
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
