"""Execute a notebook, and store its outputs: python docs/site/notebook.py docs/notebooks/partitions.ipynb"""

import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat


def executed(path: Path) -> nbformat.NotebookNode:
    """Return a notebook with the outputs of all cells, without times and other properties of this machine."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        place = {"metadata": {"path": folder}}
        client = nbclient.NotebookClient(
            notebook, timeout=120, kernel_name="python3", resources=place, record_timing=False
        )
        client.execute()
    notebook.metadata.pop("language_info", None)
    return notebook


if __name__ == "__main__":
    nbformat.write(executed(Path(sys.argv[1])), sys.argv[1])
