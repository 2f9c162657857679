"""The version and the dependencies are the same in all files of a release."""

import re
import tomllib
from pathlib import Path

import pytest

import chunkrt

ROOT = Path(__file__).resolve().parents[2]
RENAMED = {"xxhash": "python-xxhash"}
"""Names of packages on conda-forge that differ from those on PyPI."""


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("CITATION.cff", r"(?m)^version: (\S+)$"),
        ("packaging/recipe.yaml", r'(?m)^  version: "(\S+)"$'),
        ("CHANGELOG.md", r"(?m)^## (\d\S*) \(\d{4}-\d\d-\d\d\)$"),
    ],
)
def test_file_has_the_version_of_the_package(path, pattern):
    first = re.search(pattern, (ROOT / path).read_text(encoding="utf-8"))
    assert first
    assert first[1] == chunkrt.__version__


def test_conda_recipe_has_the_requirements_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    expected = {}
    for requirement in [*project["dependencies"], *project["optional-dependencies"]["compile"]]:
        name, minimum = re.fullmatch(r"([\w-]+)>=([\d.]+)", requirement).groups()
        expected[RENAMED.get(name, name)] = minimum
    recipe = (ROOT / "packaging" / "recipe.yaml").read_text(encoding="utf-8")
    run = recipe.partition("  run:\n")[2].partition("\n\n")[0]
    found = dict(re.findall(r"- (\S+) >=(\S+)", run))
    assert found.pop("python") == project["requires-python"].removeprefix(">=")
    assert found == expected


def test_wheels_are_for_the_declared_pythons():
    root = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    declared = re.findall(r"Programming Language :: Python :: (3)\.(\d+)", "\n".join(root["project"]["classifiers"]))
    tags = {major + minor for major, minor in declared}
    assert set(root["tool"]["cibuildwheel"]["build"].split()) == {f"cp{tag}-*" for tag in tags}
    windows = (ROOT / "tests" / "packaging" / "windows_python.py").read_text(encoding="utf-8")
    tables = re.findall(r"(?m)^(?:RELEASES|DEBIAN_SUITES) = (\{.*\})$", windows)
    assert set(re.findall(r'"(3\d+)":', "".join(tables))) == tags
