"""Tests of the scripts in examples/, which run on a model of the catalogue by default."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fixture_checkpoints import checkpoint
from pulled_models import MODELS

SCRIPTS = Path(__file__).parents[2] / "examples"
MODEL = MODELS["smollm2-135m-instruct"]


@pytest.mark.skipif(MODEL is None, reason="the model is not pulled")
@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("stream_chat.py", ["The capital of France is Paris.", "tokens prefilled"]),
        ("score_endings.py", ["waited until it was baked."]),
        pytest.param("openai_client.py", ["The capital of France is Paris."], marks=pytest.mark.slow),
        pytest.param("partition_study.py", ["chunk 128: "], marks=pytest.mark.slow),
    ],
)
def test_example_runs_and_prints_its_result(script, expected, tmp_path):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        [sys.executable, SCRIPTS / script, str(MODEL)],
        env=os.environ | {"PATH": path, "MPLBACKEND": "agg"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr
    assert all(text in ran.stdout for text in expected), ran.stdout


def test_examples_have_at_most_40_lines():
    scripts = sorted(SCRIPTS.glob("*.py"))
    assert len(scripts) == 5
    assert all(len(script.read_text(encoding="utf-8").splitlines()) <= 40 for script in scripts)


def test_day_of_a_researcher_ends_with_a_picture_and_a_report(tmp_path):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn, which emulates the NPU, is not installed")
    script = SCRIPTS / "partition_report.py"
    assert [line for line in script.read_text(encoding="utf-8").splitlines() if "import" in line] == [
        "import sys",
        "import chunkrt",
    ]
    assert len(script.read_text(encoding="utf-8").splitlines()) < 40
    ran = subprocess.run(
        [sys.executable, "-P", script, str(checkpoint("llama_biased_gguf"))],
        cwd=tmp_path,
        env=os.environ | {"MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("gate and up on the NPU") == 4
    page = (tmp_path / "partitions.html").read_text(encoding="utf-8")
    assert all(f'<li><abbr class="o {origin}"' in page for origin in ("measured", "emulated", "predicted"))
    assert (tmp_path / "partitions.png").read_bytes().startswith(b"\x89PNG")
