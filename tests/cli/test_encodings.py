"""Pipes are UTF-8 under every code page of Windows' consoles."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MODEL = Path(__file__).resolve().parents[1] / "parity" / "fixtures" / "llama_biased_gguf" / "model.gguf"
TEXT = "Gr\u00f6\u00dfe \u20ac \u65e5\u672c \U0001f600"


def run(*arguments, encoding="utf-8", text=b""):
    command = [sys.executable, "-P", "-m", "chunkrt", *map(str, arguments)]
    environment = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    return subprocess.run(command, input=text, capture_output=True, env=environment, timeout=300)


@pytest.mark.parametrize("encoding", ["cp437", "cp1252", "cp932"])
def test_piped_prompt_is_utf_8_under_any_code_page(tmp_path, encoding):
    file = tmp_path / "prompt.txt"
    file.write_text(TEXT, "utf-8")
    asked = ("run", MODEL, "-n", "8", "--json")
    piped, read = run(*asked, encoding=encoding, text=TEXT.encode()), run(*asked, "-f", file)
    assert piped.returncode == 0, piped.stderr
    assert json.loads(piped.stdout)["prompt_tokens"] == json.loads(read.stdout)["prompt_tokens"]


@pytest.mark.parametrize("encoding", ["cp437", "cp1252", "cp932"])
def test_piped_prompt_in_a_code_page_is_refused(encoding):
    """Its characters would be others on a machine with another code page."""
    refused = run("run", MODEL, "-n", "1", encoding=encoding, text=TEXT[:5].encode("cp1252"))
    assert refused.returncode == 1
    assert b"the prompt in - is not UTF-8 text: 'utf-8' codec" in refused.stderr


@pytest.mark.parametrize("encoding", ["cp437", "cp1252", "cp932"])
def test_names_of_files_are_printed_under_any_code_page(encoding):
    refused = run("run", f"{TEXT}.gguf", "-p", "Hello", encoding=encoding)
    assert refused.returncode == 1
    assert f"{TEXT}.gguf" in refused.stderr.decode("utf-8")
