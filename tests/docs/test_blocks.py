"""Tests of the code blocks in documents: each is executed, and its output is the text block that follows it.

Blocks of Python and shell commands are executed in the order of the page, in a new folder. A comment
`<!-- not run: REASON -->` before a block excludes it, `<!-- excerpt of FILE -->` marks a part of a file, and
`<!-- slow -->` leaves a block to the slow tests. In the expected output, "..." stands for any text, and
differences in white space are ignored.

A page may write a package: `<!-- file PATH -->` marks a file, each block is executed in a process of its own, and `pip
install` installs into a folder of the test. `<!-- with torch, else FOLDER -->` replaces a block by files of the
repository, which the block has made, unless torch is installed.
"""

import doctest
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest
from pulled_models import MODELS

import chunkrt

ROOT = Path(__file__).parents[2]
NAME = "smollm2-135m-instruct"
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/*.md"), *ROOT.glob("examples/**/*.md")]
FENCE = re.compile(r"(?:^<!-- (?P<note>.*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "sh", "cpp", "text", "json", "toml", "yaml", "mermaid"}
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass
class Block:
    """A code block of a page, with the comment before it and the expected output after it, if any."""

    line: int
    language: str
    text: str
    note: str
    expected: str | None = None

    @property
    def is_executed(self) -> bool:
        """True for Python and shell commands, unless the comment excludes them."""
        return self.language in ("python", "sh") and not self.note.startswith(("not run: ", "excerpt of ", "file "))


def blocks_of(page: Path) -> list[Block]:
    """Return the code blocks of a page."""
    source = page.read_text(encoding="utf-8")
    blocks: list[Block] = []
    end = 0
    for found in FENCE.finditer(source):
        block = Block(source.count("\n", 0, found.start()) + 1, found["language"], found["text"], found["note"] or "")
        is_output = block.language == "text" and blocks and not source[end : found.start()].strip()
        if is_output and blocks[-1].is_executed:
            blocks[-1].expected = block.text
        blocks.append(block)
        end = found.end()
    return blocks


PACKAGE_PAGES = [page for page in PAGES if any(block.note.startswith("file ") for block in blocks_of(page))]


def executed(is_slow: bool):
    """Return parameters for all pages with blocks to execute; slow pages have at least one slow block."""
    found = []
    for page in sorted(PAGES):
        notes = [block.note for block in blocks_of(page) if block.is_executed]
        if page not in PACKAGE_PAGES and notes and is_slow == ("slow" in notes):
            found.append(pytest.param(page, id=str(page.relative_to(ROOT))))
    return found


@pytest.fixture
def home_with_model(home, tmp_path):
    """Return a home that holds the model and the engines that other tests compiled."""
    if MODELS[NAME] is None:
        pytest.skip("the model is not pulled")
    place = tmp_path / "home" / "models" / NAME / MODELS[NAME].name
    place.parent.mkdir(parents=True)
    place.symlink_to(MODELS[NAME])
    chunkrt.load(MODELS[NAME], threads=1).close()
    engines = tmp_path / "home" / "engines"
    engines.mkdir()
    for made in (home / "engines").glob(f"{MODELS[NAME].stem}-*"):
        (engines / made.name).symlink_to(made)
    return tmp_path / "home"


@pytest.fixture
def home_of_reader(home_with_model, tmp_path, monkeypatch):
    """Enter an empty folder, with a home that holds the model."""
    if shutil.which("bash") is None:
        pytest.skip("bash is missing")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))
    return tmp_path


def run_shell(lines: str, command) -> str:
    """Run lines of a shell and return their output; plain chunkrt commands run in this process, to save its start."""
    out = ""
    for line in re.sub(r"\\\n\s*", "", lines).splitlines():
        program, *arguments = shlex.split(line, comments=True) or [""]
        if program == "chunkrt" and not {"|", ">", "&"} & set(arguments):
            done = command(*arguments)
            assert done.status == 0, f"{line}\n{done.err}"
            out += done.out
        elif program:
            shell = ["bash", "-euo", "pipefail", "-c", line]
            ran = subprocess.run(shell, capture_output=True, text=True, timeout=1500)
            assert ran.returncode == 0, f"{line}\n{ran.stderr}"
            out += ran.stdout
    return out


def run_page(page: Path, command, *, with_slow: bool) -> None:
    """Execute the blocks of a page in order, and compare the output of each with the expected one."""
    names = {"__name__": "__main__"}
    for block in blocks_of(page):
        if not block.is_executed or (block.note == "slow" and not with_slow):
            continue
        if block.language == "sh":
            out = run_shell(block.text, command)
        else:
            with redirect_stdout(StringIO()) as shown:
                exec(compile("\n" * block.line + block.text, page, "exec"), names)
            out = shown.getvalue()
        where = f"{page}, line {block.line}"
        if block.expected is None:
            assert not out.strip(), f"{where}: output without a text block that shows it:\n{out}"
        else:
            checks = doctest.OutputChecker().check_output(block.expected, out, OPTIONS)
            assert checks, f"{where}: expected\n{block.expected}\nfound\n{out}"


@pytest.fixture
def run_alone(tmp_path, monkeypatch):
    """Return a function that runs a program in an empty folder, into which pip installs packages."""
    environment = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "installed"), str(Path(chunkrt.__file__).parents[1])]),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "CHUNKRT_HOME": str(tmp_path / "home"),
        "PIP_TARGET": str(tmp_path / "installed"),
        "PIP_UPGRADE": "1",  # replaces files of an earlier installation
        "COLUMNS": "200",
        **dict.fromkeys(("PIP_NO_DEPS", "PIP_NO_INDEX", "PIP_QUIET", "PIP_DISABLE_PIP_VERSION_CHECK"), "1"),
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads this value as "no isolation"
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        ran = subprocess.run(arguments, capture_output=True, text=True, encoding="utf-8", timeout=600)
        assert ran.returncode == 0, f"{arguments}\n{ran.stdout}{ran.stderr}"
        return ran.stdout

    return run


def run_package_page(page: Path, run, *, with_slow: bool) -> None:
    """Write the files of a page and execute its blocks, in order, and compare the output of each."""
    for block in blocks_of(page):
        where = f"{page}, line {block.line}"
        kind, _, place = block.note.partition(" ")
        if kind == "file":
            Path(place).parent.mkdir(parents=True, exist_ok=True)
            Path(place).write_text(block.text, encoding="utf-8")
        if not block.is_executed or (block.note == "slow" and not with_slow):
            continue
        if kind == "with" and importlib.util.find_spec("torch") is None:
            shutil.copytree(ROOT / block.note.partition(", else ")[2], ".", dirs_exist_ok=True)
            continue
        start = ["bash", "-euo", "pipefail", "-c"] if block.language == "sh" else [sys.executable, "-P", "-c"]
        out = run(*start, block.text)
        expected = "" if block.expected is None else block.expected
        checks = doctest.OutputChecker().check_output(expected, out, OPTIONS) or not (expected or out.strip())
        assert checks, f"{where}: expected\n{expected}\nfound\n{out}"


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is missing")
@pytest.mark.parametrize("page", PACKAGE_PAGES, ids=lambda page: page.stem)
def test_package_page_blocks_print_the_shown_output(page, request):
    if any(NAME in block.text for block in blocks_of(page)):
        request.getfixturevalue("home_with_model")
    run_package_page(page, request.getfixturevalue("run_alone"), with_slow=False)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is missing")
@pytest.mark.parametrize("page", PACKAGE_PAGES, ids=lambda page: page.stem)
def test_slow_package_page_blocks_print_the_shown_output(page, request):
    if "slow" not in [block.note for block in blocks_of(page)]:
        pytest.skip("the page has no slow blocks")
    pytest.importorskip("onnxruntime_qnn", reason="needs onnxruntime-qnn")
    if any(NAME in block.text for block in blocks_of(page)):
        request.getfixturevalue("home_with_model")
    run_package_page(page, request.getfixturevalue("run_alone"), with_slow=True)


@pytest.mark.parametrize("page", executed(is_slow=False))
def test_page_blocks_print_the_shown_output(page, command, home_of_reader):
    run_page(page, command, with_slow=False)


@pytest.mark.parametrize("page", executed(is_slow=True))
def test_page_blocks_without_slow_ones_print_the_shown_output(page, command, home_of_reader):
    run_page(page, command, with_slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", executed(is_slow=True))
def test_slow_page_blocks_print_the_shown_output(page, command, home_of_reader):
    pytest.importorskip("onnxruntime_qnn", reason="needs onnxruntime-qnn")
    run_page(page, command, with_slow=True)


@pytest.mark.parametrize("page", sorted(PAGES), ids=lambda page: str(page.relative_to(ROOT)))
def test_page_blocks_name_a_language_and_parse(page):
    for block in blocks_of(page):
        assert block.language in LANGUAGES, f"{page}, line {block.line}: {block.language!r}"
        assert not block.note.startswith("not run:") or len(block.note) > len("not run: "), f"{page}, line {block.line}"
        if block.note.startswith("excerpt of "):
            assert block.text.strip() in (ROOT / block.note.removeprefix("excerpt of ")).read_text(encoding="utf-8")
        if block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "python" and not block.note.startswith("excerpt of "):
            compile(block.text, page, "exec")
