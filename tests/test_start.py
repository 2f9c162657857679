"""docs/start.md, typed word for word in a shell."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pulled_models import MODELS

import chunkrt

PAGE = Path(__file__).parents[1] / "docs" / "start.md"
STEPS = re.findall(r"^## (\d+)\. |^```sh( slow)?\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
NAME = "smollm2-135m-instruct"
MADE = ("chat.json", "trace.json", "trace.svg", "tuned.toml", "prompts.jsonl")

pytestmark = [
    pytest.mark.skipif(MODELS[NAME] is None, reason="the model is not pulled"),
    pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash"),
]


@pytest.fixture
def typed(home, tmp_path):
    """A function that types lines into a shell, with a home of its own that has the model, and an engine of it."""
    place = tmp_path / "home" / "models" / NAME / MODELS[NAME].name
    place.parent.mkdir(parents=True)
    place.symlink_to(MODELS[NAME])
    chunkrt.load(MODELS[NAME], threads=1).close()  # so that it is compiled, once for all tests
    engines = tmp_path / "home" / "engines"
    engines.mkdir()
    for made in (home / "engines").glob(f"{MODELS[NAME].stem}-*"):
        (engines / made.name).symlink_to(made)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "CHUNKRT_HOME": str(tmp_path / "home")}

    def type_in(lines):
        shell = ["bash", "-euo", "pipefail", "-c", lines]
        done = subprocess.run(shell, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, f"{lines}{done.stderr}"
        return done.stdout

    return type_in


def test_there_are_ten_steps():
    assert [int(number) for number, _, _ in STEPS if number] == list(range(1, 11))


@pytest.mark.first
def test_the_steps_work(typed, tmp_path):
    for _, slow, lines in STEPS:
        if lines and not slow:
            assert typed(lines).strip()
    assert all((tmp_path / name).stat().st_size for name in MADE)


@pytest.mark.exhaustive
def test_the_emulated_npu_answers(typed):
    pytest.importorskip("onnxruntime_qnn", reason="needs onnxruntime-qnn")
    (lines,) = (lines for _, slow, lines in STEPS if slow)
    assert typed(lines).strip()
