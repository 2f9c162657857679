"""Inverse frequencies against independently written formulas, dimension by dimension, and against Transformers'
logits if a fixture has the rule (tests/engine/test_parity.py)."""

import json
import shutil
from fractions import Fraction
from math import cos, isclose, pi, sin

import numpy as np
import pytest
from fixture_checkpoints import checkpoint

from chunkrt.checkpoints.checkpoint import open_checkpoint
from chunkrt.errors import ModelError, UnsupportedModelError
from chunkrt.graph.decoders import build_decoder
from chunkrt.graph.rope import RotaryTables, inverse_frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def plain(theta, rotary_dim):
    return [1 / theta ** (2 * i / rotary_dim) for i in range(rotary_dim // 2)]


def llama3(theta, rotary_dim, rule):
    """Scale as Meta's release of Llama 3.1 does (models/llama3/reference_impl/model.py, apply_scaling)."""
    old = rule["original_max_position_embeddings"]
    longest_kept, shortest_scaled = old / rule["high_freq_factor"], old / rule["low_freq_factor"]
    scaled = []
    for frequency in plain(theta, rotary_dim):
        wavelength = 2 * pi / frequency
        if wavelength < longest_kept:
            scaled.append(frequency)
        elif wavelength > shortest_scaled:
            scaled.append(frequency / rule["factor"])
        else:
            smooth = (old / wavelength - rule["low_freq_factor"]) / (rule["high_freq_factor"] - rule["low_freq_factor"])
            scaled.append((1 - smooth) * frequency / rule["factor"] + smooth * frequency)
    return scaled


@pytest.mark.parametrize("head_dim", [2, 10, 64])
@pytest.mark.parametrize("theta", [500.0, 10000.0, 500000])
def test_without_scaling(theta, head_dim):
    np.testing.assert_allclose(inverse_frequencies({"rope_theta": theta}, head_dim), plain(theta, head_dim), rtol=1e-12)


@pytest.mark.parametrize("theta", [10_000, 500_000, 10_000_000])
def test_frequencies_are_correctly_rounded(theta):
    """The correct value x of index i has x ** 32 = theta ** -i, and lies within half a unit of the last place."""
    for index, found in enumerate(inverse_frequencies({"rope_theta": theta}, 64)):
        low, high = (Fraction(float(np.nextafter(found, limit))) for limit in (0.0, 1.0))
        middle, exact = Fraction(float(found)), Fraction(1, theta**index)
        assert ((middle + low) / 2) ** 32 <= exact
        assert index == 0 or exact <= ((middle + high) / 2) ** 32


def test_theta_is_10000_by_default():
    np.testing.assert_allclose(inverse_frequencies({}, 8), plain(10000, 8), rtol=1e-12)


def test_linear_scaling_divides_by_the_factor():
    found = inverse_frequencies({"rope_theta": 100.0, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16)
    np.testing.assert_allclose(found, np.array(plain(100, 16)) / 4, rtol=1e-12)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5e-324},
        {"rope_scaling": {"type": "linear", "factor": 1e-320}},
        {"rope_scaling": LLAMA3 | {"factor": 5e-324}},
    ],
)
def test_invalid_divisors_are_refused(config):
    with pytest.raises(ModelError, match="RoPE"):
        inverse_frequencies(config, 64)


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_checkpoints_divisor_without_a_number_is_refused(value):
    tables = RotaryTables(inverse_frequencies({}, 4), 8, divisor="rope_freqs.weight")
    tables.declare()
    with pytest.raises(ModelError, match=r"rope_freqs\.weight.* holds a zero or a value that is not a number"):
        tables.cos.combine(np.array([1.0, value], np.float32))


def test_llama3_scaling_keeps_short_wavelengths_and_stretches_long_ones():
    expected = llama3(10000.0, 64, LLAMA3)
    kept = sum(map(isclose, expected, plain(10000.0, 64)))
    stretched = sum(map(isclose, expected, (f / 8 for f in plain(10000.0, 64))))
    assert kept > 5
    assert stretched > 5
    assert kept + stretched < 32
    found = inverse_frequencies({"rope_theta": 10000.0, "rope_scaling": LLAMA3}, 64)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_newer_section_holds_everything():
    config = {"rope_theta": 1.5, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0}}
    np.testing.assert_allclose(inverse_frequencies(config, 8), np.array(plain(300, 8)) / 2, rtol=1e-12)


def test_part_of_the_dimensions_may_rotate():
    found = inverse_frequencies({"partial_rotary_factor": 0.5}, 16)
    np.testing.assert_allclose(found, plain(10000.0, 8), rtol=1e-12)


@pytest.mark.parametrize(
    "name", ["llama_gqa", "mistral_window_5", "qwen2", "qwen3_layer_types", "lfm2", "gemma3_window_5"]
)
@pytest.mark.parametrize("where", ["top", "rope_parameters"])
def test_partial_rotary_factor_is_refused_in_families_that_ignore_it(tmp_path, name, where):
    """Transformers 5.23 reads the key only in families with partial rotation; other runtimes apply it everywhere."""
    folder = shutil.copytree(checkpoint(name), tmp_path / name)
    config = json.loads((folder / "config.json").read_text())
    rope = {"rope_theta": 10000.0}
    if where == "top":
        section = config
    elif name.startswith("gemma3"):
        section = config.setdefault("rope_parameters", {}).setdefault("full_attention", rope)
    else:
        section = config.setdefault("rope_parameters", rope)
    for factor in (1.0, 0.5):
        section["partial_rotary_factor"] = factor
        (folder / "config.json").write_text(json.dumps(config))
        if factor == 1:
            build_decoder(open_checkpoint(folder))
        else:
            with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor = 0.5 is ignored by Transformers"):
                build_decoder(open_checkpoint(folder))


@pytest.mark.parametrize("rule", ["yarn", "dynamic", "longrope"])
def test_unknown_rule_is_refused_by_name(rule):
    with pytest.raises(UnsupportedModelError, match=f"rope scaling '{rule}' is not supported; supported: default, lin"):
        inverse_frequencies({"rope_scaling": {"rope_type": rule, "factor": 2.0}}, 8)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("given", [{"factor": 2.0}, {"type": None, "short_factor": [1.0]}])
def test_factor_without_a_rule_is_refused_by_name(key, given):
    with pytest.raises(UnsupportedModelError, match=r"rope_scaling gives \w+ = \S+ without a rope_type") as raised:
        inverse_frequencies({key: given}, 8)
    assert raised.value.feature == "rope_scaling"


@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"])
def test_missing_number_is_named(key):
    rule = {name: value for name, value in LLAMA3.items() if name != key}
    with pytest.raises(ModelError, match=f"rope scaling 'llama3' needs '{key}'"):
        inverse_frequencies({"rope_scaling": rule}, 8)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_theta": 0}, "rope_theta of RoPE is 0, expected a positive"),
        ({"rope_theta": float("nan")}, "rope_theta of RoPE is nan"),
        ({"rope_theta": "10000"}, "rope_theta of RoPE is '10000'"),
        ({"rope_scaling": {"type": "linear", "factor": -2}}, "factor of RoPE is -2"),
        ({"rope_scaling": ["linear", 2]}, "rope_scaling is"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor 4.0, expected less"),
        ({"partial_rotary_factor": 0.4}, "rotate 3 of 8 dimensions"),
        ({"partial_rotary_factor": 2}, "rotate 16 of 8 dimensions"),
        ({"partial_rotary_factor": 1e308}, "rotate 16 of 8 dimensions"),
        ({"rope_theta": 10**400}, "rope_theta of RoPE is 1000\\d+, expected a positive"),
    ],
)
def test_invalid_numbers_are_refused(config, message):
    with pytest.raises(ModelError, match=message):
        inverse_frequencies(config, 8)


def test_tables_hold_cosines_and_sines_of_position_times_frequency():
    tables = RotaryTables(np.array([1.0, 0.25]), 5, divisor=None).named("rope")
    expected = [[cos(position * f) for f in (1.0, 0.25)] for position in range(5)]
    np.testing.assert_allclose(tables.cos.combine(), expected, rtol=2**-23)
    expected = [[sin(position * f) for f in (1.0, 0.25)] for position in range(5)]
    np.testing.assert_allclose(tables.sin.combine(), expected, rtol=2**-23)
    assert tables.cos.combine().dtype == np.float32


def test_tensor_of_the_checkpoint_may_divide_the_frequencies():
    tables = RotaryTables(np.array([1.0, 0.25]), 5, divisor="rope_freqs.weight").named("rope")
    assert tables.cos.checkpoint_tensors == {"rope_freqs.weight": (2,)}
    divided = tables.cos.combine(np.array([1, 4], np.float32))
    plain_tables = RotaryTables(np.array([1.0, 0.0625]), 5, divisor=None).named("rope")
    np.testing.assert_array_equal(divided, plain_tables.cos.combine())
