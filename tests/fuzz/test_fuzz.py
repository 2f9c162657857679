"""A short run of the fuzz campaign (`make fuzz` makes a long one), and failures found by longer ones."""

import shutil
from random import Random

import pytest
from fuzz import targets
from fuzz.campaign import execute
from fuzz.targets import TARGETS

EXECUTIONS = {"onnx": 4, "template": 6, "plan": 40, "manifest": 40, "weights": 40}
"""Slow formats."""


@pytest.fixture(scope="module")
def seeds():
    """First seeds: the same files every time."""
    return {format: Random(format).randrange(2**32) for format in TARGETS}


@pytest.mark.parametrize("part", [1 / 8, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("format", TARGETS)
def test_mutated_files_are_taken_or_refused(format, part, seeds, tmp_path):
    for seed in range(seeds[format], seeds[format] + int(part * EXECUTIONS.get(format, 100))):
        folder = tmp_path / "case"
        folder.mkdir()
        outcome, report = execute(format, seed, folder)
        assert outcome in ("accepted", "refused"), f"seed {seed}: {report}"
        shutil.rmtree(folder)


@pytest.mark.parametrize("format", TARGETS)
def test_fuzz_targets_start_from_valid_files(format, tmp_path, monkeypatch):
    """Otherwise only the first check would be fuzzed."""
    for mutator in [name for name in vars(targets) if name.startswith("mutate_")]:
        monkeypatch.setattr(targets, mutator, lambda random, content, *more: content)
    target = TARGETS[format]
    for seed in target.seeds:
        folder = tmp_path / seed.replace("/", "-")
        folder.mkdir()
        target.use(target.make(Always(), seed, folder))


class Always(Random):
    """A random source that always decides against an optional change."""

    def random(self):
        return 0.99
