"""Decoder families other than Llama: defaults of their configs, refused features, and the parts of each layer."""

import json

import numpy as np
import pytest
from fixture_checkpoints import checkpoint

from chunkrt.checkpoints.checkpoint import open_checkpoint
from chunkrt.errors import ModelError, UnsupportedModelError
from chunkrt.graph.decoders import build_decoder
from chunkrt.graph.decoders.config import read_config
from chunkrt.graph.ops import trace
from chunkrt.graph.partition import partition
from chunkrt.graph.rope import longrope_tables
from chunkrt.testing.random_decoders import CONFIG, RandomCheckpoint

LONGROPE = {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}


def changed(name, **changes):
    """Return a fixture with a changed config; ... removes a key."""
    source = open_checkpoint(checkpoint(name))
    source.config = {key: value for key, value in {**source.config, **changes}.items() if value is not ...}
    return source


def plan_of(source):
    return partition(trace(build_decoder(source)), family=source.architecture)


def attention_nodes(plan):
    return [node for s in plan.subgraphs for node in s.nodes if node.op == "CachedAttention"]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma3_scaled", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not supported"),
        ("gemma3_scaled", {"hidden_activation": "mish"}, "hidden_act 'mish' is not supported"),
        ("gemma4_experts", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu' is not supported"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention = True is not supported"),
        ("gpt_bigcode", {"multi_query": False}, "multi_query = False is not supported"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine = False is not supported"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm = True is not supported"),
        ("gemma3_scaled", {"rope_parameters": {"rope_theta": 5.0}}, "expected a section for .*'full_attention'"),
        ("gemma3_scaled", {"layer_types": ["chunked_attention"] * 6}, "a layer is 'chunked_attention'"),
        ("phi3_window_5", {"rope_scaling": {"type": "longrope"}}, "rope scaling 'longrope' without 'short_factor'"),
        ("phi3_window_5", {"rope_scaling": {"type": "su", "short_factor": [1.0] * 4}}, "'su' without 'long_factor'"),
        ("phi3_window_5", {"rope_scaling": {"type": "dynamic"}}, "rope scaling 'dynamic' is not supported"),
        ("qwen2", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope scaling 'dynamic' is not supported"),
        (
            "qwen3",
            {"rope_scaling": {"type": "linear", "factor": 4.0, "attention_factor": 1.2}},
            "attention_factor = 1.2",
        ),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0 is not supported in this family"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias = True is not supported in this family"),
        ("ernie4_5_moe", {"moe_norm_min": 0.1}, "moe_norm_min = 0.1 is not supported in this family"),
        ("qwen3_moe", {"hidden_act": "gelu_new"}, "hidden_act = 'gelu_new' is not supported in this family"),
        ("granite_hybrid", {"layer_types": ["conv", "attention"]}, "a layer is 'conv'; supported: attention, full"),
        ("mamba2", {"hidden_act": "gelu_new"}, "hidden_act = 'gelu_new' is not supported in this family"),
        ("nemotron_h", {"hybrid_override_pattern": "M-M*-E"}, "a layer is 'moe'; supported: mamba, linear_attention"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act = 'silu' is not supported in this family"),
        ("falcon_h1", {"mamba_proj_bias": True}, "mamba_proj_bias = True is not supported in this family"),
        ("falcon_h1", {"attention_bias": True}, "attention_bias = True is not supported in this family"),
        ("minicpm", {"sparse_config": {"topk": 64}}, "sparse_config = {'topk': 64} is not supported in this family"),
        ("minicpm", {"num_experts": 8}, "num_experts = 8 is not supported in this family"),
        (
            "olmo2",
            {"num_key_value_heads": 2},
            "num_key_value_heads = 2 is not supported in this family; its norms",
        ),
        ("olmo3", {"rope_parameters": {"rope_theta": 5.0}}, "expected a section for .*'full_attention'"),
        ("lfm3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling = .* is not supported"),
        ("lfm3", {"layer_types": ["mamba"] * 5}, "a layer is 'mamba'; supported: conv, full_attention, sliding_att"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not supported"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not supported"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all' is not supported"),
        ("gemma4", {"attention_bias": True}, "attention_bias = True is not supported"),
        ("gemma4_alike", {"per_layer_config": {"1": {"head_dim": 10}}}, "layers of the kind full_attention differ"),
        ("gemma4_alike", {"per_layer_config": {"0": {"sliding_window": 3}}}, "per_layer_config has keys other than"),
        ("helium", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is ignored by Transformers"),
        ("deepseek_v2_groups", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc' is not supported"),
    ],
)
def test_unsupported_feature_is_refused_by_name(name, changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        build_decoder(changed(name, **changes))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma3_scaled", {"layer_types": ["full_attention"]}, "expected a word for each of 6 layers"),
        ("gemma3_scaled", {"final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0, expected a positive"),
        ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping is 0.0, expected a positive"),
        ("gemma3_scaled", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0, expected a positive"),
        ("qwen2_window", {"max_window_layers": -1}, "max_window_layers is -1, expected a whole number"),
        (
            "phi3_longrope_short",
            {"rope_scaling": LONGROPE},
            r"short_factor of RoPE is \[1.0, 2.0\], expected 3 numbers",
        ),
        ("phi3_longrope_short", {"original_max_position_embeddings": 0.5}, "original_max_position_embeddings is 0.5"),
        ("smollm3_window", {"no_rope_layers": [1, 0]}, r"no_rope_layers is \[1, 0\], expected 0 or 1 for each of 3"),
        ("smollm3_window", {"no_rope_layers": [1, 2, 0]}, r"no_rope_layers is \[1, 2, 0\], expected 0 or 1"),
        (
            "smollm3_window",
            {"rope_scaling": {"type": "yarn", "factor": -1.0}},
            "factor of RoPE is -1.0, expected a pos",
        ),
        ("gpt_oss", {"rope_scaling": {"type": "yarn", "truncate": 1}}, "truncate of RoPE is 1, expected true or false"),
        ("gpt_oss", {"swiglu_limit": 0.0}, "swiglu_limit is 0.0, expected a positive number"),
        ("smollm3_window", {"rope_theta": 1.0}, "rope_theta of RoPE is 1.0; 'yarn' needs more than 1"),
        ("lfm2_moe", {"layer_types": ...}, "expected a word for each of 4 layers"),
        ("lfm2_moe", {"num_experts_per_tok": 7}, "cannot pick 7 of 6 experts"),
        ("mamba2", {"time_step_limit": [1.0, 0.5]}, r"time_step_limit is \[1.0, 0.5\], expected two numbers in asc"),
        ("mamba2", {"num_heads": 11}, "11 heads of 4 columns in Mamba-2, expected 48 columns"),
        ("mamba2", {"n_groups": 5}, "12 heads of Mamba-2 cannot share 5 groups evenly"),
        ("falcon_h1", {"mlp_multipliers": [1.0]}, r"mlp_multipliers is \[1.0\], expected 2 positive numbers"),
        ("nemotron_h", {"hybrid_override_pattern": "M-X"}, "hybrid_override_pattern is 'M-X', expected letters of M"),
        ("granite", {"logits_scaling": 0}, "logits_scaling is 0, expected a positive number"),
        ("gemma4", {"num_kv_shared_layers": 5}, "num_kv_shared_layers is 5, so no layer fills the caches"),
        ("gemma4", {"num_kv_shared_layers": 7}, "num_kv_shared_layers is 7, so no layer fills the caches"),
        ("gemma4", {"vocab_size_per_layer_input": 52}, "vocab_size_per_layer_input is 52, but vocab_size is 53"),
        ("gemma4", {"global_head_dim": 9}, "4 heads cannot share 1 KV heads of 9"),
        ("gemma4_alike", {"per_layer_config": [1]}, r"per_layer_config is \[1\], expected tables"),
        ("gemma4_experts", {"top_k_experts": 6}, "cannot pick 6 of 5 experts"),
        ("glm4_moe", {"n_group": 4}, "6 experts cannot form n_group = 4 groups of at least 2"),
        ("glm4_moe", {"n_group": 6}, "6 experts cannot form n_group = 6 groups of at least 2"),
        ("deepseek_v2_groups", {"topk_group": 1, "num_experts_per_tok": 4}, "cannot pick 4 of the 3 experts of topk_g"),
        ("deepseek_v3_groups", {"topk_group": 0}, "topk_group is 0, expected a positive whole number"),
    ],
)
def test_invalid_config_is_refused(name, changes, message):
    with pytest.raises(ModelError, match=message):
        build_decoder(changed(name, **changes))


def test_infinite_limit_of_steps_may_be_saved_as_a_table():
    """Transformers writes an infinity so, because JSON has none."""
    plan = plan_of(changed("mamba2", time_step_limit=[0.0, {"__float__": "Infinity"}]))
    assert not any(node.op == "Relu" for subgraph in plan.subgraphs for node in subgraph.nodes)


@pytest.mark.parametrize(
    ("name", "changes", "windows"),
    [
        ("gemma3_scaled", {}, [6, 6, 6, 6, 6, 0]),
        ("gemma3_scaled", {"sliding_window_pattern": 3}, [6, 6, 0, 6, 6, 0]),
        ("gemma3_scaled", {"sliding_window": 128}, [0] * 6),
        ("gemma3_rope_parameters", {}, [0, 9]),
        ("qwen2", {}, [0, 0]),
        ("qwen2_window", {}, [0, 32]),
        ("qwen2_window", {"max_window_layers": 0}, [32, 32]),
        ("qwen2_window", {"max_window_layers": ...}, [0, 0]),
        ("qwen3_layer_types", {}, [7, 0]),
        ("olmo3", {}, [11, 11, 11, 0]),
        ("exaone4", {}, [0, 0, 0]),
        ("exaone4_hybrid", {}, [10, 10, 10, 0]),
        ("exaone4_hybrid", {"sliding_window_pattern": 2}, [10, 0, 10, 0]),
        ("lfm3", {}, [0, 7]),
        ("gemma4", {}, [9, 9, 0] * 2),
        ("gemma4_unified", {}, [11, 11, 11, 11, 11, 0]),
        ("gemma4_unified", {"layer_types": ["sliding_attention"] * 6}, [11, 11, 11, 11, 11, 0]),
        ("qwen2_moe", {}, [8, 0, 8]),
        ("qwen2_moe", {"max_window_layers": 0}, [0, 0, 0]),
        ("qwen3_moe", {}, [0, 0, 0]),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 9}, [9, 9, 9]),
        ("smollm3", {}, [0, 0, 0, 0]),
        ("smollm3_window", {}, [0, 9, 0]),
        ("phi3_window_5", {}, [5, 5]),
        ("mistral_window_5", {}, [5, 5]),
        ("mistral_window_5", {"sliding_window": ..., "max_position_embeddings": 8192}, [4096, 4096]),
    ],
)
def test_layers_with_a_window(name, changes, windows):
    nodes = attention_nodes(plan_of(changed(name, **changes)))
    assert [node.attributes["window"] for node in nodes] == windows


def test_gemma_layers_use_the_tables_of_their_kind_even_if_the_window_covers_the_context():
    nodes = attention_nodes(plan_of(changed("gemma3_scaled", sliding_window=128)))
    assert [node.inputs[3] for node in nodes] == ["model.local_rope.cos"] * 5 + ["model.rope.cos"]


def test_gemma_config_may_omit_transformers_defaults():
    left_out = ("tie_word_embeddings", "hidden_activation", "rope_local_base_freq", "rope_theta", "attention_bias")
    complete = build_decoder(changed("gemma3_scaled"))
    sparse = build_decoder(changed("gemma3_scaled", **dict.fromkeys(left_out, ...)))
    for left, right in zip(complete.parameters(), sparse.parameters(), strict=True):
        assert (left.name, left.checkpoint_tensors) == (right.name, right.checkpoint_tensors)
        if "rope" in left.name:
            np.testing.assert_array_equal(left.combine(), right.combine())


def test_gguf_norms_already_include_the_offset():
    """Both files yield the same values."""
    (of_folder, of_gguf) = (
        {p.name: p.load(source) for p in build_decoder(source).parameters() if "norm" in p.name}
        for source in (open_checkpoint(checkpoint(name)) for name in ("gemma3_scaled", "gemma3_gguf"))
    )
    assert len(of_folder) == 6 * 5 + 1
    for name, weight in of_folder.items():
        np.testing.assert_allclose(of_gguf[name], weight, rtol=1e-6)
        assert 0.5 < weight.mean() < 1.5


def test_longrope_has_two_tables_and_a_factor():
    """The formula is the authors': cos(position / (factor * theta^(2i/d))) * sqrt(1 + ln(s) / ln(L))."""
    config = {"rope_theta": 100.0, "rope_scaling": LONGROPE, "original_max_position_embeddings": 8}
    tables = longrope_tables(config, 4, 32).named("rope")
    cos, sin = tables.cos.combine(), tables.sin.combine()
    assert (cos.shape, tables.cos.shape, tables.long_context_from) == ((64, 2), (64, 2), 8)
    factor = (1 + np.log(4) / np.log(8)) ** 0.5
    for position in (0, 1, 31):
        for i in range(2):
            short = position / ([1.0, 2.0][i] * 100.0 ** (i / 2))
            long = position / ([3.0, 4.0][i] * 100.0 ** (i / 2))
            np.testing.assert_allclose(cos[position, i], factor * np.cos(short), rtol=1e-6)
            np.testing.assert_allclose(sin[32 + position, i], factor * np.sin(long), rtol=1e-6)


def test_attention_factor_of_longrope_may_be_given():
    config = {"rope_scaling": LONGROPE | {"attention_factor": 2.0}, "original_max_position_embeddings": 8}
    assert longrope_tables(config, 4, 32).named("rope").cos.combine().max() == 2


@pytest.mark.parametrize("original", [4_194_304, 2**24])
def test_original_context_of_longrope_may_be_long(original):
    config = {"rope_scaling": LONGROPE, "original_max_position_embeddings": original}
    assert longrope_tables(config, 4, 2**24).long_context_from == original
    with pytest.raises(ModelError, match="original_max_position_embeddings is 16777217; expected at most 16777216"):
        longrope_tables(config | {"original_max_position_embeddings": 2**24 + 1}, 4, 2**24)


@pytest.mark.parametrize(
    ("gguf", "folder"),
    [
        ("qwen2_gguf", "qwen2"),
        ("qwen3_gguf", "qwen3"),
        ("gemma3_gguf", "gemma3_scaled"),
        ("phi3_gguf", "phi3_window_5"),
        ("phi3_longrope_gguf", "phi3_longrope_long"),
    ],
)
def test_gguf_yields_the_plan_of_the_folder(gguf, folder):
    plans = [json.loads(plan_of(open_checkpoint(checkpoint(name))).to_json()) for name in (gguf, folder)]
    epsilons = [
        [node["attributes"].pop("epsilon", 0) for subgraph in plan["subgraphs"] for node in subgraph["nodes"]]
        for plan in plans
    ]
    assert plans[0] == plans[1]
    np.testing.assert_allclose(*epsilons, rtol=1e-6)  # a GGUF's are float32


@pytest.mark.parametrize("name", ["gelu_new", "gelu_fast", "gelu_accurate"])
def test_read_config_takes_other_names_of_gelu_with_tanh(name):
    """Transformers' NewGELUActivation, FastGELUActivation and AccurateGELUActivation compute the same function."""
    assert read_config(RandomCheckpoint({**CONFIG, "hidden_act": name})).activation == "gelu_tanh"
