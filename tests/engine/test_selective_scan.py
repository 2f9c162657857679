"""Mamba's recurrence in sessions: chunk lengths change no bit of native results, and rewinds are exact."""

import numpy as np
import pytest
from fixture_checkpoints import checkpoint, input_ids

import chunkrt

NAMES = ("mamba", "mamba_biased", "falcon_mamba")
OPTIONS = {"npu": "native", "scheme": "w8a8-dynamic"}


def logits(name, chunk_length, threads=1):
    with chunkrt.load(checkpoint(name), chunk_length=chunk_length, threads=threads, **OPTIONS) as engine:
        return engine.session().prefill(input_ids(name), logits="all").logits


@pytest.mark.parametrize("name", NAMES)
def test_chunk_lengths_and_threads_change_no_bit(name):
    expected = logits(name, 32)
    for chunk_length, threads in ((1, 1), (7, 2), (95, 2)):
        np.testing.assert_array_equal(logits(name, chunk_length, threads), expected)


@pytest.mark.parametrize("position", [0, 1, 40, 64])
@pytest.mark.parametrize("name", NAMES)
def test_session_has_the_same_bits_after_a_rewind(name, position):
    tokens = input_ids(name)
    with chunkrt.load(checkpoint(name), chunk_length=8, **OPTIONS) as engine:
        session = engine.session()
        expected = session.prefill(tokens, logits="all").logits
        session.rewind(position)
        session.prefill([5, 6, 7])
        session.rewind(position)
        fork = session.fork()
        for each in (session, fork):
            np.testing.assert_array_equal(each.prefill(tokens[position:], logits="all").logits, expected[position:])
