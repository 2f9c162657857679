"""An installation of the runtime alone runs engine directories, and reports missing parts in one line."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests" / "parity" / "fixtures" / "llama_biased_gguf" / "model.gguf"
PROGRAM = """
import importlib.metadata, json, sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in blocked else self.finder.find_spec(name, path, target)
blocked = set(json.loads(sys.argv.pop(1)))
sys.meta_path[:] = map(Without, sys.meta_path)
find = importlib.metadata.Distribution.from_name.__func__
def from_name(cls, name):
    if name in blocked:
        raise importlib.metadata.PackageNotFoundError(name)
    return find(cls, name)
importlib.metadata.Distribution.from_name = classmethod(from_name)
from chunkrt.__main__ import main
main()
"""


def required(names):
    """Return the distributions that an installation of these requirements brings, by their normalised names."""
    found, left = set(), [re.match(r"[\w.-]+", name)[0] for name in names]
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in found:
            continue
        found.add(name)
        try:
            lines = requires(name) or []
        except PackageNotFoundError:  # for another platform
            continue
        left += [re.match(r"[\w.-]+", line)[0] for line in lines if "extra ==" not in line]
    return found


@pytest.fixture(scope="module")
def blocked():
    """Names of all installed modules that the runtime's requirements do not bring."""
    runtime = required(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]) | {"chunkrt"}
    return [
        module
        for module, distributions in packages_distributions().items()
        if not runtime & {re.sub(r"[-_.]+", "-", name).lower() for name in distributions}
    ]


@pytest.fixture
def chunkrt(blocked):
    def call(*arguments, blocked=blocked, **environment):
        command = [sys.executable, "-P", "-c", PROGRAM, json.dumps(blocked), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=300)

    return call


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runtime") / "engine"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "chunkrt", "compile", MODEL, "-o", folder], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_runtime_needs_no_parts_of_the_compiler(blocked):
    assert {"gguf", "onnx", "onnx_ir", "onnxruntime", "sympy"} <= set(blocked)


def test_engine_directory_runs_with_the_runtime_alone(chunkrt, compiled):
    asked = ("run", compiled, "-p", "Hello, world", "-n", "8")
    alone, complete = chunkrt(*asked), chunkrt(*asked, blocked=[])
    assert alone.returncode == 0, alone.stderr
    assert alone.stdout == complete.stdout != ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "{engine}"),
        ("ops", "{engine}"),
        ("compile", "{engine}", "-o", "{folder}/copy"),
        ("simulate", "{engine}", "--device", "SM8650", "-p", "16", "--chunk", "8"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_commands_read_engine_directories_with_the_runtime_alone(chunkrt, compiled, tmp_path, arguments):
    alone = chunkrt(*(str(word).format(engine=compiled, folder=tmp_path) for word in arguments))
    assert alone.returncode == 0, alone.stderr


def test_bench_measures_and_report_shows_it_with_the_runtime_alone(chunkrt, compiled, tmp_path):
    rows, page = tmp_path / "rows.json", tmp_path / "page.html"
    for arguments in (("bench", compiled, "-p", "8", "-n", "2", "-r", "1", "-o", rows), ("report", rows, "-o", page)):
        alone = chunkrt(*arguments)
        assert alone.returncode == 0, alone.stderr
    assert "pp8" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", MODEL, "-p", "Hello"),
        ("compile", MODEL, "-o", "{folder}/engine"),
        ("support", MODEL),
        ("plan", MODEL),
        ("ops", MODEL),
        ("export", MODEL, "-o", "{folder}/model.onnx"),
        ("bench", MODEL),
    ],
    ids=lambda arguments: arguments[0],
)
def test_commands_name_the_extra_that_they_lack(chunkrt, tmp_path, arguments):
    refused = chunkrt(*(str(word).format(folder=tmp_path) for word in arguments), CHUNKRT_HOME=str(tmp_path / "home"))
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert re.search(
        r'needs (gguf|onnx|onnx_ir), which is not installed; run pip install "chunkrt.compile."', refused.stderr
    )


def test_nothing_is_downloaded_that_cannot_be_compiled(chunkrt, tmp_path):
    refused = chunkrt("run", "smollm2-135m-instruct", "-p", "Hello", CHUNKRT_HOME=str(tmp_path))
    assert refused.returncode == 1
    assert re.fullmatch(r"chunkrt: compiling a model needs onnx_ir, .*\n", refused.stderr)
    assert not (tmp_path / "models").exists()


def test_onnxrt_names_the_extra_that_it_lacks(chunkrt, compiled):
    refused = chunkrt("run", compiled, "-p", "Hello", "--npu", "onnxrt")
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert 'run pip install "chunkrt[compile]"' in refused.stderr


def test_doctor_lists_the_parts_that_are_lacking(chunkrt):
    done = chunkrt("doctor", "--json")
    assert done.returncode == 0, done.stderr
    lacking = {finding["what"]: finding["advice"] for finding in json.loads(done.stdout) if not finding["ok"]}
    for part in ("gguf", "onnx", "onnx_ir", "onnxruntime"):
        assert lacking[part].endswith('pip install "chunkrt[compile]"')


def test_package_runs_without_metadata(compiled, tmp_path):
    """A folder on PYTHONPATH has no .dist-info. The prefix cache and new engine directories record the version."""
    lookup = PROGRAM.replace('name.partition(".")[0] in blocked', "False", 1)
    for arguments in (["--version"], ["run", MODEL, "-p", "Hello", "-n", "2"], ["run", compiled, "-p", "Hello"]):
        command = [sys.executable, "-P", "-c", lookup, '["chunkrt"]', *map(str, arguments)]
        environment = os.environ | {"CHUNKRT_HOME": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr
