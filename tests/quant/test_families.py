"""Every decoder family under quantisation: schemes stay near float; foldings keep logits or are refused."""

import re

import numpy as np
import pytest
from fixture_checkpoints import checkpoint, input_ids
from folding_models import Model, assert_same, equalised, rotated
from relative_error import relative_error

import chunkrt
from chunkrt.checkpoints.checkpoint import open_checkpoint
from chunkrt.checkpoints.source import weights_digest
from chunkrt.compile.calibrate import calibrate
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.errors import QuantizationError
from chunkrt.graph.decoders import build_decoder
from chunkrt.graph.plan import linear_nodes
from chunkrt.quant.scheme import find_scheme

FAMILIES = (
    "gemma3_rope_parameters",
    "gemma3_scaled",
    "mistral_window_5",
    "phi3_longrope_short",
    "phi3_window_5",
    "qwen2",
    "qwen3",
    "ernie4_5_biased",
    "gemma",
    "gemma2",
    "glm",
    "glm4",
    "granite",
    "granite_hybrid",
    "helium",
    "minicpm",
    "smollm3_window",
)
NORMS_BEHIND = ("exaone4_hybrid", "olmo2", "olmo3")
"""Families in which no weight makes the inputs of q, k, v, gate and up, so that equalisation cannot scale them."""
NORMED_VALUES = ("gemma4", "gemma4_alike", "gemma4_unified", "minicpm3")
"""Families in which v is normed, or joined from two parts, so that equalisation cannot scale the inputs of o_proj."""
RECURRENT = ("lfm2", "lfm3", "qwen3_5", "qwen3_next", "qwen3_next_experts")
RECURRENT += ("bamba", "falcon_h1", "granite_hybrid_mamba", "mamba2", "nemotron_h")
EXPERTS = (
    "deepseek_v3_groups",
    "ernie4_5_moe",
    "glm4_moe",
    "granitemoeshared",
    "lfm2_moe",
    "olmoe",
    "qwen2_moe",
    "qwen3_5_moe",
    "qwen3_moe",
)
EXPERTS += ("deepseek_v2", "gpt_oss", "granite_hybrid_mamba_experts", "gemma4_experts")
"""Families whose foldings are tested in test_quant_folding_recurrent.py."""
MOST_ERROR = {"w8a8-dynamic": 0.08, "w8a16": 0.04}
"""Tolerance of logits against float (root mean square); random 8-bit weights alone contribute 0.02."""
MOST_DIFFERENCE = 0.01
"""Tolerance between two backends that compute the same integers: a few values move to another step."""


def logits_of(name, **options):
    with chunkrt.load(checkpoint(name), chunk_length=32, **({"npu": "reference"} | options)) as engine:
        return engine.session().prefill(input_ids(name)[:64], logits="all").logits


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("scheme", MOST_ERROR)
@pytest.mark.parametrize("name", FAMILIES + NORMS_BEHIND + NORMED_VALUES + RECURRENT)
def test_quantised_logits_are_near_those_in_float(name, scheme, tmp_path, monkeypatch):
    found = quantised_logits(name, scheme, tmp_path, monkeypatch)
    assert 0 < relative_error(found, logits_of(name, scheme="float")) < MOST_ERROR[scheme]


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("scheme", MOST_ERROR)
@pytest.mark.parametrize("name", EXPERTS)
def test_quantised_logits_of_most_rows_are_near_those_in_float(name, scheme, tmp_path, monkeypatch):
    """A few rows, whose routers have almost equal scores, get another expert."""
    found, expected = quantised_logits(name, scheme, tmp_path, monkeypatch), logits_of(name, scheme="float")
    of_rows = [relative_error(*rows) for rows in zip(found, expected, strict=True)]
    assert 0 < np.median(of_rows) < MOST_ERROR[scheme]


def quantised_logits(name, scheme, tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path))
    options = {"scheme": scheme}
    if find_scheme(scheme).is_static:
        planned = plan_checkpoint(checkpoint(name), {})
        weights = weights_digest(planned.source)
        found = calibrate(planned.plan, planned.load, np.array(input_ids(name)), model=name, weights=weights)
        found.save(tmp_path / "found.npz")
        options["calibration"] = tmp_path / "found.npz"
    return logits_of(name, **options)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", FAMILIES + NORMS_BEHIND + NORMED_VALUES + RECURRENT + EXPERTS)
def test_native_equals_the_reference(name, tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path))
    found = logits_of(name, npu="native", scheme="w8a8-dynamic", cache_dtype="float32")
    assert relative_error(found, logits_of(name, scheme="w8a8-dynamic")) < MOST_DIFFERENCE


def model_of(name):
    source = open_checkpoint(checkpoint(name))
    return Model(build_decoder(source), source)


@pytest.mark.parametrize("name", FAMILIES)
def test_equalisation_reaches_every_linear_and_keeps_logits(name):
    """It includes v's channels, which the norm of heads lets pass."""
    model = model_of(name)
    folding = equalised(model)
    assert folding.rows.keys() == linear_nodes(model.plan).keys()
    assert all(np.ptp(factors) > 0.1 for factors in folding.rows.values())
    assert_same(model.run(model.folded(folding))[0], model.run()[0])


@pytest.mark.parametrize("name", NORMS_BEHIND)
def test_equalisation_without_norms_before_linears_reaches_the_others_and_keeps_logits(name):
    model = model_of(name)
    folding = equalised(model)
    others = {name for name in linear_nodes(model.plan) if name.split(".")[-2] in ("o_proj", "down_proj", "lm_head")}
    assert folding.rows.keys() == others
    assert_same(model.run(model.folded(folding))[0], model.run()[0])


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        ("gemma3_scaled", "post_attention_layernorm"),
        ("glm4", "post_self_attn_layernorm"),
        ("lfm3", "post_operator_norm"),
        ("olmo2", "post_attention_layernorm"),
    ],
)
def test_norms_after_linears_are_not_rotated(name, norm):
    node = f"model.layers.0.{norm}.output"
    message = f"the residual stream cannot be rotated: node '{node}' (RMSNormalization) makes a part of it from values"
    with pytest.raises(QuantizationError, match="^" + re.escape(message)):
        rotated(model_of(name))


@pytest.mark.parametrize("name", ["gemma", "granite", "mamba2", "minicpm", "nemotron_h", "smollm3_window"])
def test_rotation_keeps_logits_of_families_with_factors_and_layers_without_rope(name):
    model = model_of(name)
    assert_same(model.run(model.folded(rotated(model)))[0], model.run()[0])
