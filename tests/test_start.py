"""docs/start.md, word for word: typed in a shell; or called in this process, which has imported it all already."""

import os
import re
import shlex
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
def typed(home, tmp_path, monkeypatch):
    """A function that types lines into a shell, with a home of its own that has the model, and an engine of it."""
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "home" / "models" / NAME / MODELS[NAME].name
    place.parent.mkdir(parents=True)
    place.symlink_to(MODELS[NAME])
    chunkrt.load(MODELS[NAME], threads=1).close()  # so that it is compiled, once for all tests
    engines = tmp_path / "home" / "engines"
    engines.mkdir()
    for made in (home / "engines").glob(f"{MODELS[NAME].stem}-*"):
        (engines / made.name).symlink_to(made)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))

    def type_in(lines):
        shell = ["bash", "-euo", "pipefail", "-c", lines]
        done = subprocess.run(shell, capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, f"{lines}{done.stderr}"
        return done.stdout

    return type_in


def test_there_are_ten_steps():
    assert [int(number) for number, _, _ in STEPS if number] == list(range(1, 11))


@pytest.mark.exhaustive
def test_the_steps_work(typed, tmp_path):
    for _, slow, lines in STEPS:
        if lines and not slow:
            assert typed(lines).strip()
    assert all((tmp_path / name).stat().st_size for name in MADE)


@pytest.mark.first
def test_their_commands_work(typed, command, tmp_path):
    for line in "".join(lines for _, slow, lines in STEPS if not slow).splitlines():
        program, *arguments = shlex.split(line)
        if program != "chunkrt" or {"|", ">"} & set(arguments):
            typed(line)
            continue
        done = command(*arguments)
        assert done.status == 0, f"{line}\n{done.err}"
        assert done.out.strip()
    assert all((tmp_path / name).stat().st_size for name in MADE)


@pytest.mark.exhaustive
def test_the_emulated_npu_answers(typed):
    pytest.importorskip("onnxruntime_qnn", reason="needs onnxruntime-qnn")
    (lines,) = (lines for _, slow, lines in STEPS if slow)
    assert typed(lines).strip()
