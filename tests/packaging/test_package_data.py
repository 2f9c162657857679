"""Check that a wheel contains all data files of the package, such as the page of `chunkrt report`."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json
import setuptools
from distutils.core import run_setup

command = run_setup("setup.py", stop_after="init").get_command_obj("build_py")
command.ensure_finalized()
print(json.dumps([f"{folder}/{name}" for _, folder, _, names in command.data_files for name in names]))
"""
"""setuptools replaces distutils in a process that has not imported it yet."""


@pytest.mark.skipif(find_spec("setuptools") is None, reason="needs setuptools")
def test_wheel_has_every_data_file():
    finished = subprocess.run([sys.executable, "-P", "-c", PROGRAM], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    packed = {(ROOT / path).resolve() for path in json.loads(finished.stdout.splitlines()[-1])}
    code = {".py", ".so", ".pyd", ".pyc"}
    data = {path.resolve() for path in (ROOT / "chunkrt").rglob("*") if path.is_file() and path.suffix not in code}
    assert ROOT / "chunkrt" / "reports" / "page.js" in data
    assert data <= packed, data - packed
