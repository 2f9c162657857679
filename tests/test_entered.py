"""Bound the Python files and calls between a request and its kernels, because a reader and every token pass them."""

import gc
import sys
from collections import Counter
from pathlib import Path

import pytest
from fixture_checkpoints import checkpoint

import chunkrt

PACKAGE = str(Path(chunkrt.__file__).parent)
CHUNK = 8


def entered(call):
    """Return the number of calls in each file of the package, in this thread, without finalizers."""
    found = Counter()

    def enter(frame, event, argument):
        if event == "call" and (name := frame.f_code.co_filename).startswith(PACKAGE):
            found[name] += 1

    gc.collect()
    gc.disable()
    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


@pytest.fixture(scope="module")
def session():
    with chunkrt.load(checkpoint("llama_gqa"), npu="native", chunk_length=CHUNK, threads=2) as engine:
        yield engine.session()


def test_decoded_token_enters_few_files_and_calls(session):
    session.prefill([1, 2, 3])
    pieces = session.generate(max_new_tokens=5)
    next(pieces)
    found = entered(lambda: next(pieces))
    assert len(found) <= 15, sorted(found)
    assert found.total() <= 90


def test_prefill_of_three_chunks_enters_few_files(session):
    found = entered(lambda: session.prefill(range(1, 1 + 3 * CHUNK)))
    assert len(found) <= 18, sorted(found)
