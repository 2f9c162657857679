"""Tests of the types of the Python interface, as mypy sees them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import chunkrt

ROOT = Path(__file__).parents[2]

PROGRAM = """
import chunkrt

engine = chunkrt.load("model", cache_memory="2GB", placement="places.toml", chunk_length=32)
chat = [{"role": "user", "content": "hi"}]
reveal_type(engine.generate("a", temperature=0.5, max_tokens=3))
reveal_type(engine.generate(["a"]))
reveal_type(engine.generate([[1, 2], [3]]))
reveal_type(engine.chat(chat))
reveal_type(engine.chat([chat]))
reveal_type(engine.chat(chat, stream=True))
reveal_type(engine.chat([chat], stream=True))
reveal_type(engine.tokenizer.encode("a"))
reveal_type(chunkrt.EngineOptions(cache_memory="2GB").cache_memory)
engine.generate("a", temprature=0.5)
"""
REVEALED = [
    "str",
    "list[str]",
    "list[str]",
    "str",
    "list[str]",
    "Iterator[Piece]",
    "Iterator[tuple[int, Piece]]",
    "list[int]",
    "int | None",
]


def test_interface_has_the_types_of_its_documentation(tmp_path):
    """The code of docs/python.md has no errors, and calls return the documented types."""
    pytest.importorskip("mypy", reason="needs mypy")
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    assert "chunkrt.load" in code
    (tmp_path / "page.py").write_text(code, encoding="utf-8")
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    environment, package = dict(os.environ), Path(chunkrt.__file__).parents[1]
    if "site-packages" not in package.parts:
        environment["MYPYPATH"] = str(package)
    options = ["--strict", "--config-file=", "--cache-dir=cache", "--follow-imports=silent", "--hide-error-context"]
    command = [sys.executable, "-P", "-m", "mypy", *options, "page.py", "program.py"]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600).stdout

    revealed = [re.sub(r"\b(?:\w+\.)+(?=\w)", "", kind) for kind in re.findall(r'Revealed type is "(.*?)"', found)]
    assert revealed == REVEALED, found
    errors = [line for line in found.splitlines() if ": error: " in line]
    last = len(PROGRAM.splitlines())
    assert errors, "a misspelled keyword is an error"
    assert all(error.startswith(f"program.py:{last}:") for error in errors), found
