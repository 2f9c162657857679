"""Foldings keep a decoder's logits, and have the intended effect on its weights and activations."""

import numpy as np
import pytest
from fixture_checkpoints import NAMES, checkpoint, expected_logits, input_ids
from folding_models import (
    DOWN,
    GATE_UP,
    LAYER,
    O_PROJ,
    QKV,
    Model,
    assert_same,
    both,
    equalised,
    random_model,
    rotated,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chunkrt.checkpoints.checkpoint import open_checkpoint
from chunkrt.errors import ConfigError, ModelError, QuantizationError
from chunkrt.graph.decoders import build_decoder
from chunkrt.graph.plan import linear_nodes
from chunkrt.quant.equalisation import equalise
from chunkrt.quant.folding import Folding, rotate
from chunkrt.quant.rotation import can_rotate, rotation

SHAPES = {
    "grouped heads, biases of attention": {},
    "all biases": {"mlp_bias": True},
    "no biases": {"attention_bias": False},
    "tied embedding": {"tie_word_embeddings": True},
    "one kv head": {"num_key_value_heads": 1},
    "own kv heads": {"num_key_value_heads": 4},
    "odd width": {"hidden_size": 37},
    "width of 64": {"hidden_size": 64},
}


@pytest.mark.parametrize("fold", [equalised, rotated, both])
@pytest.mark.parametrize("shape", SHAPES)
def test_foldings_keep_logits(shape, fold):
    model = random_model(**SHAPES[shape])
    folding = fold(model)
    assert_same(model.run(model.folded(folding))[0], model.run()[0])
    touched = folding.rows.keys() | folding.rotated_rows | folding.rotated_columns
    assert touched >= linear_nodes(model.plan).keys()


BEHIND, EXPERTS = "has norms behind linears", "has experts, which are no linears"
POSITIONS = "adds positions to the embeddings, and its norms subtract the mean"
NOT_ROTATED = {
    **dict.fromkeys(("gemma2", "gemma3", "gemma4", "glm4", "olmo2", "olmo3", "exaone4", "lfm3"), BEHIND),
    **dict.fromkeys(("qwen3_next_experts", "qwen2_moe", "qwen3_moe", "qwen3_5_moe", "olmoe", "lfm2_moe"), EXPERTS),
    **dict.fromkeys(("granitemoe", "granite_hybrid_experts", "ernie4_5_moe", "gpt_oss"), EXPERTS),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "opt"), POSITIONS),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe"), EXPERTS),
    **dict.fromkeys(("granite_hybrid_mamba_experts", "granite_hybrid_mamba_unrotated"), EXPERTS),
}
"""By prefixes of fixtures' names: the obstacle, norms whose weights no linear can absorb."""
ROTATED = ("lfm3_bare", "opt_norms_behind")
"""Exceptions; linears separate OPT's narrow embeddings, which are rotated, from the residual stream."""


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("fold", [equalised, rotated, both])
@pytest.mark.parametrize("name", NAMES)
def test_folded_logits_equal_those_of_transformers(name, fold):
    source = open_checkpoint(checkpoint(name))
    for kind, reason in NOT_ROTATED.items():
        if name.startswith(kind) and name not in ROTATED and fold is not equalised:
            model = Model(build_decoder(source), source)
            assert not can_rotate(model.plan)
            pytest.skip(f"{name} cannot be rotated: it {reason}")
    model = Model(build_decoder(source), source)
    logits, _ = model.run(model.folded(fold(model)), np.array(input_ids(name)))
    assert_same(logits, expected_logits(name))


@pytest.mark.parametrize("alpha", [0, 0.3, 0.5, 1])
def test_factors_are_those_of_smoothquant(alpha):
    model = random_model()
    _, peaks = model.run()
    folding = equalised(model, alpha)

    def factors(channel_peaks, row_peaks):
        found = channel_peaks**alpha / row_peaks ** (1 - alpha)
        return found / np.exp(np.log(found).mean())

    norm = f"{LAYER}.input_layernorm"
    weight = folding.columns[QKV] * model.load(QKV)  # o_proj's factors have left its columns before
    expected = factors(peaks[f"{norm}.output"], np.abs(weight).max(axis=1))
    np.testing.assert_allclose(folding.rows[QKV], expected, rtol=1e-4)
    np.testing.assert_allclose(folding.columns[f"{norm}.weight"], 1 / expected, rtol=1e-4)

    expected = factors(peaks[f"{LAYER}.mlp.gated"], np.abs(model.load(DOWN)).max(axis=1))
    np.testing.assert_allclose(folding.rows[DOWN], expected, rtol=1e-4)
    inner = len(expected)
    np.testing.assert_array_equal(folding.columns[GATE_UP][:inner], 1)
    np.testing.assert_allclose(folding.columns[GATE_UP][inner:], 1 / expected, rtol=1e-4)

    grouped = (2, 2, 10)  # kv heads, query heads of each, dimensions
    by_group = peaks[f"{LAYER}.self_attn.attention"].reshape(grouped).max(axis=1)
    rows_by_group = np.abs(model.load(O_PROJ)).max(axis=1).reshape(grouped).max(axis=1)
    expected = factors(by_group, rows_by_group)
    np.testing.assert_allclose(folding.rows[O_PROJ].reshape(grouped), expected[:, None].repeat(2, 1), rtol=1e-4)
    for name in (QKV, QKV.replace("weight", "bias")):
        np.testing.assert_array_equal(folding.columns[name][:-20], 1)
        np.testing.assert_allclose(folding.columns[name][-20:], 1 / expected.ravel(), rtol=1e-4)


def test_strength_1_equalises_channels_and_strength_0_rows():
    model = random_model()
    linears = linear_nodes(model.plan).items()
    even = equalised(model, 1)
    _, peaks = model.run(model.folded(even))
    for weight, node in linears:
        if not weight.endswith("o_proj.weight"):  # a group's heads share factors, not peaks
            np.testing.assert_allclose(peaks[node.inputs[0]], peaks[node.inputs[0]][0], rtol=1e-3)
    load = model.folded(equalised(model, 0))
    for weight, _ in linears:
        rows = np.abs(load(weight)).max(axis=1)
        if not weight.endswith("o_proj.weight"):
            np.testing.assert_allclose(rows, rows[0], rtol=1e-3)


def test_rotation_evens_out_a_channel_that_all_tokens_share():
    model = random_model(hidden_size=64)

    def with_outlier(name):
        weight = model.load(name).copy()
        if name == "model.embed_tokens.weight":
            weight[:, 5] += 1000
        return weight

    folding = rotation(model.plan, with_outlier)
    logits, before = model.run(with_outlier)
    found, after = model.run(lambda name: folding.apply(name, with_outlier(name)))
    assert_same(found, logits)
    peaks = [peaks[f"{LAYER}.output"] for peaks in (before, after)]
    assert peaks[0].max() > 20 * np.median(peaks[0])
    assert peaks[1].max() < 2 * np.median(peaks[1])


def test_norms_become_1_when_the_stream_is_rotated():
    model = random_model()
    load = model.folded(rotated(model))
    norms = [name for name in model.parameters if "norm" in name]
    assert len(norms) == 5
    for name in norms:
        np.testing.assert_array_equal(load(name), 1)
    matrix = rotate(np.eye(36, dtype=np.float32))
    gain = model.load(f"{LAYER}.post_attention_layernorm.weight")
    np.testing.assert_allclose(load(GATE_UP), matrix.T @ (gain[:, None] * model.load(GATE_UP)), atol=1e-5)
    np.testing.assert_allclose(load(DOWN), model.load(DOWN) @ matrix, atol=1e-5)
    bias = O_PROJ.replace("weight", "bias")
    np.testing.assert_allclose(load(bias), model.load(bias) @ matrix, atol=1e-5)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.sampled_from([0, 1e-45, 1e-30, 0.01, 1, 100, 1e30, 3e38]), min_size=1, max_size=9),
    st.sampled_from([0, 0.5, 1]),
)
def test_zeros_and_huge_values_keep_weights_finite(values, alpha):
    model = random_model(num_hidden_layers=1)

    def with_zeros(name):
        weight = model.load(name).copy()
        if "rope" not in name:
            weight[::3] = 0
        return weight

    inputs = (node.inputs[0] for node in linear_nodes(model.plan).values())
    peaks = {name: np.resize(np.float32(values), model.plan.tensors[name].shape[-1]) for name in inputs}
    folding = equalise(model.plan, with_zeros, peaks, alpha)
    for factors in (*folding.rows.values(), *folding.columns.values()):
        assert factors.dtype == np.float32
        assert factors.min() >= 2.0**-10
        assert factors.max() <= 2.0**10
    for weight in (QKV, GATE_UP, DOWN):
        np.testing.assert_array_equal(folding.rows[weight][::3], 1)
    assert_same(model.run(lambda name: folding.apply(name, with_zeros(name)))[0], model.run(with_zeros)[0])


def test_unaffected_weight_is_returned_itself():
    model = random_model()
    weight = model.load(DOWN)
    assert Folding().apply(DOWN, weight) is weight
    assert equalised(model).apply("model.embed_tokens.weight", weight) is weight


@pytest.mark.parametrize("fold", [equalised, rotated, both])
def test_loaded_weight_is_not_modified(fold):
    model = random_model()
    folding = fold(model)
    for name in model.parameters:
        weight = model.load(name)
        weight.flags.writeable = False
        folded = folding.apply(name, weight)
        assert (folded.shape, folded.dtype) == (weight.shape, np.float32)


@pytest.mark.parametrize("fold", [lambda model: Folding(), equalised, rotated, both])
def test_arrays_hold_the_complete_folding(fold, tmp_path):
    model = random_model()
    folding = fold(model)
    np.savez_compressed(tmp_path / "folding.npz", **folding.arrays())
    with np.load(tmp_path / "folding.npz", allow_pickle=False) as archive:
        again = Folding.from_arrays(dict(archive))
    assert again.has_rotation == folding.has_rotation
    for name in model.parameters:
        np.testing.assert_array_equal(again.apply(name, model.load(name)), folding.apply(name, model.load(name)))


@pytest.mark.parametrize(
    ("key", "array"),
    [
        ("rows/a", np.ones(3)),
        ("rows/a", np.ones((3, 1), np.float32)),
        ("rows/a", np.array([np.inf], np.float32)),
        ("rows", np.ones(3, np.float32)),
        ("ones", np.ones(3, np.float32)),
        ("other/a", np.ones(3, np.float32)),
    ],
)
def test_other_arrays_are_refused(key, array):
    with pytest.raises(ModelError, match=f"'{key}', {array.dtype} .* is not part of a folding"):
        Folding.from_arrays({key: array})


def test_weights_of_another_model_are_refused():
    model, other = random_model(), random_model(hidden_size=64, head_dim=12)
    with pytest.raises(
        QuantizationError, match=rf"of another model: it has .*36 rows.* for {QKV}, which is \[64, 96\]"
    ):
        equalised(model).apply(QKV, other.load(QKV))
    with pytest.raises(QuantizationError, match=r"it has a rotation for .*, which is \[3\]"):
        Folding(rotated_rows=frozenset({"a"})).apply("a", np.ones(3, np.float32))
    with pytest.raises(QuantizationError, match=r"it has \d+ channels of .*, the model has \d+"):
        equalise(other.plan, other.load, model.run()[1], 0.5)
    with pytest.raises(QuantizationError, match="has no entry for the channels of last_hidden"):
        equalise(model.plan, model.load, {}, 0.5)


def test_non_finite_values_are_refused():
    model = random_model()
    _, peaks = model.run()
    with pytest.raises(QuantizationError, match=f"channels of {LAYER}.mlp.gated that are not finite"):
        equalise(model.plan, model.load, peaks | {f"{LAYER}.mlp.gated": np.full(52, np.nan, np.float32)}, 0.5)
    with pytest.raises(QuantizationError, match=f"{DOWN} holds values that are not finite"):
        equalise(model.plan, lambda n: model.load(n) * np.float32(np.nan if n == DOWN else 1), peaks, 0.5)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_strength_is_between_0_and_1(alpha):
    model = random_model()
    with pytest.raises(ConfigError, match=f"is {alpha}, expected a number from 0 to 1"):
        equalise(model.plan, model.load, {}, alpha)


def test_rotation_must_come_first():
    model = random_model()
    with pytest.raises(QuantizationError, match="cannot rotate weights that are already transformed; rotate first"):
        equalised(model).then(rotated(model))
    assert Folding().then(rotated(model)).has_rotation
