"""The evidence of docs/mechanisms.md exists, and its counts are those of its tables."""

import re
from collections import Counter
from pathlib import Path

import pytest

from chunkrt.cli import COMMANDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "mechanisms.md").read_text(encoding="utf-8")
ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith(("| mechanism", "| ---"))
]
NAMES = sorted(set(re.findall(r"`([^`]+)`", " ".join(evidence for _, _, evidence in ROWS))))
TYPED = [name for name in NAMES if name.startswith("chunkrt ")]
FILES = [name for name in NAMES if name.startswith(("tests/", "docs/", "bench/"))]


def test_counts_are_those_of_the_tables():
    states = Counter(state for _, state, _ in ROWS)
    text = " ".join(PAGE.split())
    counts = f"works {states['works']}, in part {states['in part']}, missing {states['missing']}"
    assert f"States of the {len(ROWS)} mechanisms: {counts}, outside of chunkrt's task {states['outside']}." in text
    assert states.keys() <= {"works", "in part", "missing", "outside"}
    named = {*TYPED, *FILES}
    assert all(named.intersection(re.findall(r"`([^`]+)`", row[2])) for row in ROWS if row[1] == "works")


@pytest.mark.parametrize("name", FILES)
def test_named_test_exists(name):
    file, _, function = name.partition("::")
    path = ROOT / file
    assert path.exists()
    if function:
        assert re.search(rf"^(async )?def test_{re.escape(function)}\(", path.read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize("command", TYPED)
def test_named_command_exists(command):
    assert command.split()[1] in COMMANDS
