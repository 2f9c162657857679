"""The sampler agrees with Hugging Face Transformers, and draws tokens with their probabilities."""

import json
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from chunkrt.engine.sampling import EXCLUDED, GREEDY, Sampler, SamplingOptions
from chunkrt.errors import BackendError, ConfigError

REFERENCE = Path(__file__).parents[1] / "data" / "sampling_reference.npz"
FLOAT32_STEPS = 64 * 2.0**-23
"""Tolerance: Transformers computes in float32: 64 probabilities, each sum and quotient within a step or so."""


def test_distribution_equals_that_of_transformers():
    reference = np.load(REFERENCE)
    for case, (options, logits, history, expected) in enumerate(
        zip(*(reference[name] for name in ("options", "logits", "history", "probabilities")), strict=True)
    ):
        sampler = Sampler(SamplingOptions(**json.loads(str(options)), seed=0))
        token_ids, probabilities = sampler.distribution(logits, history.tolist())
        found = np.zeros_like(expected, np.float64)
        found[token_ids] = probabilities
        np.testing.assert_array_equal(found > 0, expected > 0, err_msg=f"case {case}: {options}")
        np.testing.assert_allclose(found, expected, rtol=0, atol=FLOAT32_STEPS, err_msg=f"case {case}: {options}")


def test_frequencies_of_drawn_tokens_match_their_probabilities():
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    sampler = Sampler(SamplingOptions(temperature=1.0, seed=1))
    draws = 20_000
    counts = np.bincount([sampler.next(logits) for _ in range(draws)], minlength=4)
    expected = draws * np.array([0.5, 0.25, 0.125, 0.125])
    deviations = np.abs(counts - expected) / np.sqrt(expected)
    assert deviations.max() < 4, counts


def test_one_seed_gives_one_sequence():
    logits = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    first, again, other = (
        [sampler.next(logits) for _ in range(50)]
        for sampler in (Sampler(SamplingOptions(temperature=1.0, seed=seed)) for seed in (7, 7, 8))
    )
    assert first == again
    assert first != other


def test_greedy_takes_the_first_of_the_largest_logits():
    assert Sampler(GREEDY).next(np.array([1, 3, 3, 2], np.float32)) == 1


def test_greedy_applies_the_repetition_penalty():
    logits = np.array([1.0, 3.0, 2.9], np.float32)
    assert Sampler(SamplingOptions(repetition_penalty=1.1)).next(logits, [1]) == 2
    np.testing.assert_array_equal(logits, np.array([1.0, 3.0, 2.9], np.float32))


def test_tiny_temperature_is_greedy():
    logits = np.array([-3e38, 3e38, 0], np.float32)
    assert Sampler(SamplingOptions(temperature=1e-300, seed=0)).next(logits) == 1


@given(
    logits=arrays(np.float32, st.integers(1, 50), elements=st.floats(-100, 100, width=32)),
    temperature=st.floats(0, 10),
    top_k=st.none() | st.integers(1, 60),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    penalty=st.floats(0.5, 2),
    data=st.data(),
)
def test_distribution_adds_up_to_1_and_holds_the_likeliest(logits, temperature, top_k, top_p, min_p, penalty, data):
    history = data.draw(st.lists(st.integers(0, len(logits) - 1), max_size=5))
    options = SamplingOptions(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty, seed=0
    )
    sampler = Sampler(options)
    token_ids, probabilities = sampler.distribution(logits, history)
    assert len(set(token_ids.tolist())) == len(token_ids) == len(probabilities)
    assert abs(probabilities.sum() - 1) < 1e-9
    assert (probabilities >= 0).all()
    likeliest = Sampler(SamplingOptions(repetition_penalty=penalty)).next(logits, history)
    assert likeliest in token_ids
    assert sampler.next(logits, history) in token_ids


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", -0.1, "at least 0"),
        ("temperature", nan, "at least 0"),
        ("temperature", inf, "finite"),
        ("temperature", 10**400, "finite"),
        ("temperature", "1", "a finite number"),
        ("temperature", True, "a finite number"),
        ("top_k", 0, "at least 1, or None"),
        ("top_k", 2.0, "an integer"),
        ("top_p", -0.01, "[0, 1]"),
        ("top_p", 1.01, "[0, 1]"),
        ("top_p", nan, "[0, 1]"),
        ("min_p", -0.5, "[0, 1]"),
        ("min_p", nan, "[0, 1]"),
        ("repetition_penalty", 0, "[0.01, 100]"),
        ("repetition_penalty", inf, "[0.01, 100]"),
        ("seed", -1, "at least 0, or None"),
        ("min_new_tokens", None, "at least 0"),
    ],
)
def test_option_out_of_range_is_named(name, value, expected):
    with pytest.raises(ConfigError) as caught:
        SamplingOptions(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}: found {value!r}, expected ")
    assert expected in message


@pytest.mark.parametrize("token_id", [-1, "5", None])
def test_token_id_of_a_bias_is_a_whole_number(token_id):
    with pytest.raises(ConfigError) as caught:
        SamplingOptions(logit_bias={token_id: 1})
    assert str(caught.value) == f"logit_bias, a token id: found {token_id!r}, expected an integer, at least 0"


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_logits_that_are_not_finite_are_an_error(value):
    logits = np.array([1, value, 2], np.float32)
    with pytest.raises(BackendError, match="1 of 3 logits are not finite"):
        Sampler(GREEDY).next(logits)


@pytest.mark.parametrize("shape", [(0,), (2, 3), ()])
def test_logits_of_another_shape_are_an_error(shape):
    with pytest.raises(ConfigError, match=r"expected \[V\]"):
        Sampler(GREEDY).next(np.zeros(shape, np.float32))


@pytest.mark.parametrize("history", [[3], [-1]])
def test_history_outside_the_vocabulary_is_an_error(history):
    with pytest.raises(ConfigError, match="expected 0 to 2"):
        Sampler(SamplingOptions(repetition_penalty=1.5)).next(np.zeros(3, np.float32), history)


def test_top_p_of_zero_keeps_only_the_likeliest():
    """Transformers' `TopPLogitsWarper(0.0)` keeps at least one token."""
    options = SamplingOptions(temperature=1, top_p=0)
    token_ids, probabilities = Sampler(options).distribution(np.array([1, 3, 2], np.float32))
    assert (token_ids.tolist(), probabilities.tolist()) == ([1], [1.0])


def test_excluded_tokens_have_probability_zero_at_any_temperature():
    logits = np.array([1, EXCLUDED, 2], np.float32)
    for temperature in (1.0, 1e38, 1e300):
        token_ids, _ = Sampler(SamplingOptions(temperature=temperature)).distribution(logits)
        assert token_ids.tolist() == [0, 2]


def test_likelier_of_tokens_with_equal_probabilities_is_kept():
    """Their logits differ by less than the resolution of an exponential."""
    token_ids, _ = Sampler(SamplingOptions(temperature=1, top_p=0.5)).distribution(np.array([0, 1e-29], np.float32))
    assert token_ids.tolist() == [1]
