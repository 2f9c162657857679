"""Names of classes."""

import ast
from collections import Counter
from pathlib import Path

import chunkrt

PUBLIC_TWICE = {"State"}
"""The state of a session, and that of a decoder that runs in eager mode, which users import from its module."""


def test_every_class_name_stands_once_in_the_package():
    counts = Counter[str]()
    for path in Path(chunkrt.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        counts.update(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert len(counts) > 500
    assert {name for name, count in counts.items() if count > 1} == PUBLIC_TWICE
