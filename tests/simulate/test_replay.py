"""Replays of published figures that did not enter the profiles."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
REPLAY = Path(__file__).parents[2] / "bench" / "replay_llm_npu.py"


def test_held_out_figures_are_predicted() -> None:
    finished = subprocess.run([sys.executable, REPLAY], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    rows = [line for line in finished.stdout.splitlines() if line.endswith(("fit", "held out", "set aside"))]
    assert len(rows) == 3 * 4 + 5
    held_out = [float(row.split()[-3].rstrip("%")) for row in rows if row.endswith("held out")]
    assert len(held_out) == 8
    assert max(map(abs, held_out)) <= 25
    assert "stages ranked as published: 3 of 3 models" in finished.stdout
    assert "the paper contradicts itself" in finished.stdout


@pytest.mark.slow
def test_powerserve_is_predicted_without_its_figures() -> None:
    finished = subprocess.run(
        [sys.executable, BENCH / "replay.py", "--only", "PowerServe"], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    (prefill,) = [line for line in finished.stdout.splitlines() if line.startswith("| PowerServe | prefill |")]
    middle, worst = (float(cell.strip().rstrip("%")) for cell in prefill.split("|")[4:6])
    assert middle <= 15
    assert worst <= 35
