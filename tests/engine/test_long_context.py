"""Engines of models that claim long contexts: stored and computed tables, which no logit depends on."""

from math import cos, sin

import numpy as np
import pytest
from fixture_checkpoints import checkpoint, input_ids
from random_folders import write_folder

import chunkrt
from chunkrt.errors import ConfigError
from chunkrt.graph.rotary_tables import rotary_table
from chunkrt.testing.random_decoders import CONFIG

A_MILLION = 1_010_000
"""Context length of Qwen2.5-1M."""
LONGROPE = "phi3_longrope_long"
FROM = 64
"""Number of tokens up to which that model uses the short factors of RoPE."""
TOLERANCE = 1e-4
"""Tolerance of test_parity.py."""


def logits_of(engine, tokens):
    return engine.session().prefill(tokens, logits="all").logits


def with_context(name, context_length, **options):
    options = {"scheme": "float", "npu": "reference", **options}
    return chunkrt.load(checkpoint(name), context_length=context_length, **options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same weights under configs that claim 64 tokens, and a million."""
    folder = tmp_path_factory.mktemp("long")
    lengths = (CONFIG["max_position_embeddings"], A_MILLION)
    return [write_folder(folder / str(length), max_position_embeddings=length, head_dim=128) for length in lengths]


@pytest.mark.parametrize("npu", ["reference", "onnxrt", "native"])
def test_claimed_context_takes_no_space_and_changes_no_logit(folders, npu):
    """Tables of a million positions and 64 frequencies would have 517 MB."""
    sizes, logits = [], []
    for folder in folders:
        with chunkrt.load(folder, npu=npu, context_length=64, threads=1) as engine:
            sizes.append(sum(path.stat().st_size for path in engine.folder.iterdir() if path.is_file()))
            logits.append(logits_of(engine, range(61)))
    assert sizes[1] - sizes[0] < 100  # digits of the larger numbers in the plan
    np.testing.assert_array_equal(*logits)


def test_context_beyond_the_claimed_one_is_rejected(folders):
    with pytest.raises(ConfigError, match=f"{A_MILLION + 1}, but the model takes at most {A_MILLION}"):
        chunkrt.load(folders[1], npu="reference", context_length=A_MILLION + 1)


@pytest.mark.parametrize("function", [(np.cos, cos), (np.sin, sin)], ids=["cos", "sin"])
def test_tables_are_rounded_from_float64_at_every_position(function):
    in_numpy, in_libm = function
    frequencies = np.array([1.0, 0.3, 1e-6])
    recipe = np.stack([np.concatenate(([factor], frequencies)) for factor in (1.0, 1.25)])
    table = rotary_table(in_libm.__name__, recipe, num_positions=10_000, num_rows=20_000)
    whole = [(f * in_numpy(np.outer(np.arange(10_000.0), frequencies))).astype(np.float32) for f in (1.0, 1.25)]
    np.testing.assert_array_equal(table, np.concatenate(whole))
    for row in (0, 1, 4095, 4096, 9_999):
        expected = [in_libm(row * frequency) for frequency in frequencies]
        np.testing.assert_allclose(table[row], expected, rtol=0, atol=2.0**-24)
    for rows in (1, 4097, 10_000, 10_001):
        cut = rotary_table(in_libm.__name__, recipe, num_positions=10_000, num_rows=rows)
        np.testing.assert_array_equal(cut, table[:rows])


@pytest.mark.parametrize("num_tokens", [FROM - 1, FROM, FROM + 1])
@pytest.mark.parametrize("context_length", [FROM, FROM + 1, 128])
def test_longrope_uses_the_right_table_on_both_sides_in_every_context(num_tokens, context_length):
    """Compare with the complete tables, whose logits test_parity.py compares with Transformers on both sides."""
    if num_tokens > context_length:
        pytest.skip("so many tokens do not fit")
    tokens = input_ids(LONGROPE)[:num_tokens]
    with with_context(LONGROPE, None) as whole, with_context(LONGROPE, context_length) as cut:
        np.testing.assert_array_equal(logits_of(cut, tokens), logits_of(whole, tokens))


@pytest.mark.parametrize("num_tokens", [FROM - 1, FROM + 1])
def test_longrope_session_moves_to_another_context(num_tokens, tmp_path):
    """The file contains the row at which its tables begin, which is the same in every context."""
    tokens = input_ids(LONGROPE)[: num_tokens + 1]
    with with_context(LONGROPE, FROM + 2) as engine:
        session = engine.session()
        session.prefill(tokens[:-1])
        session.save(tmp_path / "session")
        expected = session.prefill(tokens[-1:]).logits
    with with_context(LONGROPE, 128) as engine:
        session = engine.load_session(tmp_path / "session")
        np.testing.assert_array_equal(session.prefill(tokens[-1:]).logits, expected)
