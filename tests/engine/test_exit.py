"""A process with unfinished generators ends, with the same status as without them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fixture_checkpoints import checkpoint

NAME = "llama_gqa"

PROGRAM = """
import atexit, signal, sys
import chunkrt

signal.signal(signal.SIGINT, signal.default_int_handler)
prompts = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]


def begin(engine):
    pieces = {pieces}
    next(iter(pieces))
    return pieces


def main():
    pieces = begin(engine)
    {inside}


engine = chunkrt.load(sys.argv[1], npu="reference", scheme="float", prefix_cache=sys.argv[2])
{end}
"""
STREAM = "engine.stream(prompts, max_new_tokens=30)"
SCORES = "engine.scores([([1, i], [3, 4]) for i in range(20)])"
WAITS = "another process is compiling a model; waiting for it\n"
ENDS = {
    "held": ("pass", "pieces = begin(engine)", 0),
    "engine closed": ("pass", "pieces = begin(engine); engine.close()", 0),
    "exception in a function": ("raise ValueError('made to fail')", "main()", 1),
    "interrupt in a function": ("signal.raise_signal(signal.SIGINT)", "main()", -2),
    "exit with a status": ("pass", "pieces = begin(engine); sys.exit(3)", 3),
    "held by an exit handler": ("pass", "pieces = begin(engine); atexit.register(lambda: pieces.close())", 0),
}


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("pieces", [STREAM, SCORES], ids=["stream", "scores"])
@pytest.mark.parametrize("end", ENDS)
def test_process_with_an_unfinished_generator_ends(pieces: str, end: str, tmp_path: Path) -> None:
    inside, last, status = ENDS[end]
    cache = str(tmp_path / "prefixes")
    program = PROGRAM.format(pieces=pieces, inside=inside, end=last)
    command = [sys.executable, "-P", "-c", program, str(checkpoint(NAME)), cache]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert finished.returncode == status, finished.stderr
    assert "Exception ignored" not in finished.stderr
    errors = finished.stderr.replace(WAITS, "")  # other tests may compile at the same time
    assert bool(errors) == (status not in (0, 3)), errors
