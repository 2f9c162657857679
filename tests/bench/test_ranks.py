"""`bench/ranks.py`: one rank and two on a tiny model."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from bench_modules import BENCH
from fixture_checkpoints import checkpoint

SEARCHED = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


@pytest.mark.skipif(
    shutil.which("mpiexec", path=SEARCHED) is None or find_spec("mpi4py") is None,
    reason="mpiexec or mpi4py is not installed: chunkrt[mpi]",
)
def test_sums_of_two_ranks_are_reported(tmp_path):
    found = tmp_path / "ranks.json"
    options = ("--rounds", "1", "-p", "64", "--chunk", "16", "--no-random", "--json", found)
    command = [sys.executable, f"{BENCH}/ranks.py", checkpoint("llama_biased_gguf"), *options]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    ((alone,), _, (shared,)) = json.loads(found.read_text())["measured"]["model"].values()
    assert alone["num_sums"] == 0
    assert shared["num_sums"] > 0
    assert 0 <= shared["link_hidden_ns"] <= shared["link_busy_ns"]
    assert shared["link_busy_ns"] > 0
