"""Dual chunk attention, against a decoder in float64 that is written from the definition."""

import json
import shutil

import numpy as np
import pytest
from fixture_checkpoints import checkpoint
from float64_dual_chunks import logits as true_logits

import chunkrt

SIZES = {"chunk_size": 24, "local_size": 8, "original_max_position_embeddings": 40}
"""Chunks of 16 positions; the factor of queries and keys exceeds 1 in contexts of more than 40 tokens."""
CONTEXT = 100
TOKENS = np.random.default_rng(7).integers(3, 48, CONTEXT).tolist()
LENGTHS = (16, 17, 24, 33, 40, 41, 64, 95)
TOLERANCE = 1e-4


def write(folder, **changes):
    """Write the toy Qwen2 with the config of dual chunk attention, and other fields of the config."""
    shutil.copytree(checkpoint("qwen2"), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"max_position_embeddings": CONTEXT, "dual_chunk_attention_config": SIZES, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("dual") / "m")


@pytest.fixture(scope="module")
def truth(folder):
    """Return a function that returns the logits of a prompt of the first tokens, and of the tokens behind it."""
    found = {}

    def logits(num_prompt, tokens=None):
        key = (num_prompt, tuple(TOKENS[:num_prompt] if tokens is None else tokens))
        if key not in found:
            found[key] = true_logits(folder, key[1], num_prompt)
        return found[key]

    return logits


def load(folder, **options):
    return chunkrt.load(folder, **{"npu": "reference", "scheme": "float", "cache_dtype": "float32"} | options)


def all_logits(session, tokens):
    return session.prefill(tokens, logits="all").logits


@pytest.mark.parametrize("npu", ["reference", "onnxrt"])
@pytest.mark.parametrize("chunk_length", [1, 7, 32])
def test_prompts_across_all_ranges_equal_the_definition(folder, truth, chunk_length, npu):
    with load(folder, npu=npu, chunk_length=chunk_length) as engine:
        assert engine.context_length == CONTEXT
        for length in LENGTHS:
            found = all_logits(engine.session(), TOKENS[:length])
            np.testing.assert_allclose(found, truth(length), rtol=0, atol=TOLERANCE)
    plain = true_logits(folder, TOKENS[:95], 1)
    assert np.abs(truth(95) - plain).max() > 0.01  # the factor matters
