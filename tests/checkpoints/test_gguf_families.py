"""Metadata of GGUF architectures other than llama: values without keys, tensors in place of keys, and missing keys."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from chunkrt.checkpoints.gguf_header import GgufTensor
from chunkrt.checkpoints.gguf_keys import Keys
from chunkrt.checkpoints.gguf_names import ARCHITECTURES, find_architecture, translate_config, translate_name
from chunkrt.errors import ModelError, UnsupportedModelError

COMMON = {
    "context_length": 4096,
    "embedding_length": 5376,
    "feed_forward_length": 64,
    "attention.head_count": 32,
    "attention.head_count_kv": 16,
    "attention.key_length": 128,
    "attention.layer_norm_rms_epsilon": 1e-6,
}
FACTORS = {f"rope_factors_{length}.weight": (48,) for length in ("long", "short")}


def config_of(architecture, num_layers=4, tensors=None, **changes):
    """Return the config of a header alone; the values of tensors are 2."""
    keys = {**COMMON, "block_count": num_layers, **changes}
    metadata = {f"{architecture}.{key}": value for key, value in keys.items() if value is not None}
    metadata["general.architecture"] = architecture
    norms = {f"blk.{layer}.attn_norm.weight": (5376,) for layer in range(min(num_layers, 99))}
    shapes = {"token_embd.weight": (99, 5376), **norms, **(tensors or {})}
    read = Keys(metadata, shapes, lambda name: np.full(shapes[name], 2, np.float32))
    return translate_config(find_architecture(architecture), read)


@pytest.mark.parametrize(
    ("architecture", "num_layers", "scalar"),
    [("gemma2", 26, 128), ("gemma2", 46, 168), ("gemma3", 26, 128), ("gemma3", 62, 168)],
)
def test_scale_of_gemma_follows_from_its_size(architecture, num_layers, scalar):
    """27B has a different one: hidden_size / num_attention_heads."""
    assert config_of(architecture, num_layers)["query_pre_attn_scalar"] == scalar


def test_caps_and_window_of_gemma_2_have_defaults():
    """The defaults are those of llama.cpp's `llama_hparams`."""
    names = ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window")
    assert [config_of("gemma2")[name] for name in names] == [50.0, 30.0, 4096]
    given = {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0, "attention.sliding_window": 512}
    assert [config_of("gemma2", **given)[name] for name in names] == [20.0, 10.0, 512]


def test_keys_of_gpt_oss():
    given = YARN | {"expert_count": 32, "expert_used_count": 4, "expert_feed_forward_length": 2880}
    found = config_of("gpt-oss", **given, **{"attention.sliding_window": 128, "expert_gating_func": 3})
    assert [found[key] for key in ("num_local_experts", "num_experts_per_tok", "intermediate_size")] == [32, 4, 2880]
    assert found["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "truncate": False,
    }
    with pytest.raises(UnsupportedModelError, match=r"gpt-oss.expert_gating_func = 2 is not implemented"):
        config_of("gpt-oss", **given, expert_gating_func=2)


def test_gemma_3_without_a_window_has_only_global_layers():
    assert config_of("gemma3")["layer_types"] == ["full_attention"] * 4
    windowed = config_of("gemma3", **{"attention.sliding_window": 512, "rope.freq_base_swa": 5e3})
    assert "layer_types" not in windowed
    found = [windowed[key] for key in ("sliding_window", "sliding_window_pattern", "rope_local_base_freq")]
    assert found == [512, 6, 5e3]


def test_factors_of_phi_3_are_tensors():
    changes = {"rope.dimension_count": 96, "rope.scaling.original_context_length": 1024}
    found = config_of("phi3", tensors=FACTORS, **changes, **{"rope.scaling.attn_factor": 1.25})
    assert found["original_max_position_embeddings"] == 1024
    expected = {"rope_type": "longrope", "long_factor": [2.0] * 48, "short_factor": [2.0] * 48}
    assert found["rope_scaling"] == expected | {"attention_factor": 1.25}
    assert config_of("phi3", **changes)["rope_scaling"] is None


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 1024}


def test_numbers_of_yarn_are_those_of_hugging_face():
    given = YARN | {"rope.scaling.yarn_attn_factor": 1.5, "rope.scaling.yarn_beta_fast": 16.0}
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert config_of("qwen2", **YARN)["rope_scaling"] == expected
    assert config_of("qwen2", **given)["rope_scaling"] == expected | {"attention_factor": 1.5, "beta_fast": 16.0}


@pytest.mark.parametrize("key", ["attn_factor", "yarn_ext_factor", "yarn_log_multiplier"])
def test_variant_of_yarn_is_refused_by_name(key):
    with pytest.raises(UnsupportedModelError, match=rf"qwen2.rope.scaling.{key} = 0.5 is not implemented with YaRN"):
        config_of("qwen2", **YARN, **{f"rope.scaling.{key}": 0.5})


def test_factors_of_granite_have_defaults_and_those_of_minicpm_are_required():
    assert config_of("granite")["attention_multiplier"] == 128**-0.5
    assert config_of("minicpm", **SCALES)["dim_model_base"] == 5376 / 4
    with pytest.raises(ModelError, match=r"minicpm.embedding_scale must be a positive number, found None"):
        config_of("minicpm")
    with pytest.raises(UnsupportedModelError, match=r"granite.rope.scaling.finetuned = False, attention without RoPE"):
        config_of("granite", **{"rope.scaling.finetuned": False})


@pytest.mark.parametrize(
    ("pattern", "expected"), [(None, "sssf"), (2, "sfsf"), ([True, False, False, True], "sffs"), ([1, 0, 0, 0], "sfff")]
)
def test_olmo_3_is_olmo_2_with_windows(pattern, expected):
    assert config_of("olmo2")["model_type"] == "olmo2"
    windowed = config_of(
        "olmo2", **{"attention.sliding_window": 512, "attention.sliding_window_pattern": pattern, "rope.freq_base": 7e5}
    )
    assert windowed["model_type"] == "olmo3"
    assert windowed["rope_parameters"] == {"sliding_attention": {"rope_theta": 7e5}}
    assert [kind[0] for kind in windowed["layer_types"]] == list(expected)


GEMMA4 = {
    "attention.head_count_kv": [16, 16, 4, 16],
    "attention.key_length": 12,
    "attention.key_length_swa": 8,
    "attention.sliding_window": 5,
    "attention.sliding_window_pattern": [True, True, False, True],
}


def test_kinds_of_layers_of_gemma_4_have_heads_of_their_own():
    found = config_of("gemma4", **GEMMA4)
    heads = [tuple(found["per_layer_config"][str(layer)].values()) for layer in range(4)]
    assert heads == [(8, 16), (8, 16), (12, 4), (8, 16)]
    assert found["rope_parameters"]["full_attention"]["partial_rotary_factor"] == 1  # without divisors
    wide = config_of("gemma4", **GEMMA4, **{"attention.shared_kv_layers": 1, "feed_forward_length": [64, 64, 64, 128]})
    assert [wide[key] for key in ("num_kv_shared_layers", "use_double_wide_mlp", "intermediate_size")] == [1, True, 64]


@pytest.mark.parametrize(
    ("changes", "tensors", "message"),
    [
        (
            {"feed_forward_length": [64, 128, 64, 64]},
            {},
            r"gemma4.feed_forward_length = \[64, 128, 64, 64\] is not imple",
        ),
        ({"rope.dimension_count": 6}, {}, "gemma4.rope.dimension_count differs from the head length 12"),
        ({"rope.dimension_count_swa": 6}, {}, "gemma4.rope.dimension_count_swa differs from the head length 8"),
        ({}, {"rope_freqs.weight": (6,)}, "rope_freqs.weight has values other than 1 and at least"),
        ({"expert_count": 4, "expert_gating_func": 2}, {}, "gemma4.expert_gating_func = 2 is not implemented"),
    ],
)
def test_unsupported_keys_of_gemma_4_are_refused_by_name(changes, tensors, message):
    with pytest.raises(UnsupportedModelError, match=message):
        config_of("gemma4", tensors=tensors, **GEMMA4 | changes)


def test_pattern_of_windows_must_cover_all_layers():
    with pytest.raises(ModelError, match=r"exaone4.attention.sliding_window_pattern must be a flag for each of 4 l"):
        config_of("exaone4", **{"attention.sliding_window": 5, "attention.sliding_window_pattern": [True]})


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"rope_factors_long.weight": (48,)}, r"rope_factors_short.weight is missing, expected \[48\]"),
        (FACTORS | {"rope_factors_long.weight": (47,)}, r"rope_factors_long.weight is \[47\], expected \[48\]"),
    ],
)
def test_factors_come_in_pairs(tensors, message):
    with pytest.raises(ModelError, match=message):
        config_of("phi3", tensors=tensors, **{"rope.dimension_count": 96})


@pytest.mark.parametrize(
    ("architecture", "key"),
    [
        ("gemma3", "attn_logit_softcapping"),
        ("gemma3", "rope.dimension_count"),
        ("phi3", "expert_count"),
        ("qwen2", "attention.sliding_window"),
        ("qwen3", "final_logit_softcapping"),
    ],
)
def test_unsupported_feature_is_refused_by_name(architecture, key):
    with pytest.raises(UnsupportedModelError, match=rf"{architecture}.{key} = 8 is not implemented"):
        config_of(architecture, **{key: 8})


LINEAR = {
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
    "ssm.group_count": 2,
    "ssm.state_size": 16,
    "ssm.conv_kernel": 4,
}


SCALES = {"embedding_scale": 12.0, "residual_scale": 0.2, "logit_scale": 4.0}


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_header_that_claims_more_layers_than_tensors_is_refused(architecture):
    changes = LINEAR | {"shortconv.l_cache": 3}
    if architecture in ("granite", "minicpm"):
        changes |= SCALES
    with pytest.raises(ModelError, match=r"block_count = 4000000, but the file has \d+ tensors"):
        config_of(architecture, 4_000_000, **changes)
    with pytest.raises(ModelError, match="expected at most 16777216"):
        config_of(architecture, 4_000_000_000, **changes)


@pytest.mark.parametrize("changes", [{"ssm.state_size": 2**24}, {"ssm.inner_size": 2**24, "ssm.group_count": 4}])
def test_linear_attention_that_is_too_wide_is_refused_before_arrays_are_made(changes):
    architecture = find_architecture("qwen35")
    config = config_of("qwen35", **LINEAR | changes)
    with pytest.raises(ModelError, match="columns; expected at most 16777216"):
        architecture.layouts(config)


def name_of(architecture, name, *shape):
    """Return a tensor's name in Hugging Face's vocabulary."""
    tensor = GgufTensor(name=name, shape=shape, type=GGMLQuantizationType.F32, start=0, num_bytes=0)
    return translate_name(find_architecture(architecture), config_of(architecture), tensor)[0]


def test_names_are_those_of_the_family():
    assert name_of("gemma3", "blk.3.ffn_norm.weight", 5376) == "model.layers.3.pre_feedforward_layernorm.weight"
    assert name_of("phi3", "blk.3.ffn_up.weight", 128, 5376) == "model.layers.3.mlp.gate_up_proj.weight"
    assert name_of("phi3", "rope_factors_long.weight", 48) == ""
    with pytest.raises(UnsupportedModelError, match=r"'blk.0.attn_q_norm.weight', which phi3 as implemented lacks"):
        name_of("phi3", "blk.0.attn_q_norm.weight", 128)
