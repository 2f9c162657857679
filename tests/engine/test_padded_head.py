"""A model's LM head may have more rows than the vocabulary has tokens; the others are padding, which is never drawn."""

import numpy as np
import pytest
from random_folders import write_folder
from small_vocabularies import make_tokenizer

import chunkrt
from chunkrt.engine.sampling import SamplingOptions

TOKENIZER = make_tokenizer("byte_level", pre="smollm")
NUM_TOKENS = TOKENIZER.vocab_size
DRAWN = SamplingOptions(temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Half of the rows are padding, so a sampler that ignores padding would draw such a row at every second token."""
    folder = write_folder(tmp_path_factory.mktemp("padded") / "model", vocab_size=2 * NUM_TOKENS)
    TOKENIZER.save(folder)
    (folder / "text.json").unlink()
    with chunkrt.load(folder, npu="reference", scheme="float", threads=1) as engine:
        yield engine


@pytest.mark.parametrize("sampling", [SamplingOptions(), DRAWN], ids=["greedy", "drawn"])
def test_generate_never_draws_padding(engine, sampling):
    with engine.session() as session:
        session.prefill("hello")
        for piece in session.generate(max_new_tokens=24, sampling=sampling):
            assert piece.token_id < NUM_TOKENS


def test_generate_never_draws_padding_that_is_biased_upwards(engine):
    biased = SamplingOptions(temperature=1.0, seed=5, logit_bias={NUM_TOKENS: 100.0})
    with engine.session() as session:
        session.prefill("hello")
        assert all(piece.token_id < NUM_TOKENS for piece in session.generate(max_new_tokens=8, sampling=biased))


def test_generate_of_many_prompts_never_draws_padding(engine):
    answers = engine.generate(["hello", "one", "two"], max_new_tokens=16, sampling=DRAWN)
    assert len(answers) == 3


def test_log_probabilities_are_those_of_the_complete_head(engine):
    with engine.session() as session:
        logits = session.prefill("hello").logits.astype(np.float64)
        piece = next(session.generate(max_new_tokens=1, log_probabilities=2 * NUM_TOKENS))
    expected = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    told = dict(piece.log_probabilities.top)
    np.testing.assert_allclose([told[row] for row in range(2 * NUM_TOKENS)], expected, rtol=0, atol=1e-9)
