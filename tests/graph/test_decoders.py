"""From a checkpoint to a decoder: every tensor is accounted for, and unsupported features are refused by name."""

import shutil

import numpy as np
import pytest
from fixture_checkpoints import checkpoint as checkpoint_path
from safetensors.numpy import load_file, save_file

from chunkrt.checkpoints.safetensors import SafetensorsSource
from chunkrt.errors import ModelError, UnsupportedModelError
from chunkrt.graph.decoders import FAMILIES, build_decoder, lfm2, make_decoder
from chunkrt.graph.decoders.config import read_config
from chunkrt.testing.random_decoders import CONFIG, RandomCheckpoint


def checkpoint(**changes):
    """Return the random checkpoint with a changed config, and the usual tensors."""
    source = RandomCheckpoint()
    source.config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not ...}
    return source


def test_every_tensor_is_read_by_exactly_one_parameter():
    source = RandomCheckpoint()
    decoder = build_decoder(source)
    read = [tensor for parameter in decoder.parameters() for tensor in parameter.checkpoint_tensors]
    assert sorted(read) == sorted(source.names())
    assert len({parameter.name for parameter in decoder.parameters()}) == len(list(decoder.parameters()))


def test_tied_head_reads_the_embedding_again():
    decoder = build_decoder(RandomCheckpoint({**CONFIG, "tie_word_embeddings": True}))
    (head,) = (p for p in decoder.parameters() if p.name == "lm_head.weight")
    assert list(head.checkpoint_tensors) == ["model.embed_tokens.weight"]


def test_packed_linears_are_the_concatenated_parts():
    source = RandomCheckpoint()
    weights = {p.name: p.load(source) for p in build_decoder(source).parameters()}
    parts = [source.read(f"model.layers.1.self_attn.{n}_proj.weight") for n in "qkv"]
    np.testing.assert_array_equal(weights["model.layers.1.self_attn.qkv_proj.weight"], np.vstack(parts).T)
    parts = [source.read(f"model.layers.1.self_attn.{n}_proj.bias") for n in "qkv"]
    np.testing.assert_array_equal(weights["model.layers.1.self_attn.qkv_proj.bias"], np.concatenate(parts))
    gate, up = (source.read(f"model.layers.0.mlp.{n}_proj.weight") for n in ("gate", "up"))
    np.testing.assert_array_equal(weights["model.layers.0.mlp.gate_up_proj.weight"], np.vstack([gate, up]).T)


@pytest.mark.parametrize("name", RandomCheckpoint().names())
def test_missing_tensor_is_named(name):
    source = RandomCheckpoint()
    del source.shapes[name]
    with pytest.raises(ModelError, match=rf"random: tensor {name} is missing, needed by \S+"):
        build_decoder(source)


def test_sizes_that_contradict_the_tensors_are_refused_before_tables_are_made():
    with pytest.raises(ModelError, match=r"tensor \S+ is \[\d+, \d+\], expected \[\d+, \d+\] by \S+$"):
        build_decoder(checkpoint(head_dim=2**14, max_position_embeddings=2**20))


def test_unread_tensor_is_named():
    source = RandomCheckpoint()
    source.shapes["model.layers.0.self_attn.q_norm.weight"] = (10,)
    source.shapes["model.layers.1.self_attn.q_norm.weight"] = (10,)
    with pytest.raises(ModelError, match=r"q_norm.weight is in the checkpoint, but no part of the llama .*and 1 more"):
        build_decoder(source)


def test_layer_beyond_the_config_is_unread():
    with pytest.raises(ModelError, match=r"tensor model.layers.1\S+ is in the checkpoint, but no part"):
        build_decoder(checkpoint(num_hidden_layers=1))


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq"])
def test_buffers_determined_by_the_config_are_ignored(name):
    source = RandomCheckpoint()
    source.shapes[name] = (5,)
    build_decoder(source)


def folder_of(tmp_path, name, change):
    """Return a fixture's folder whose tensors `change` has altered."""
    folder = tmp_path / name
    shutil.copytree(checkpoint_path(name), folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return SafetensorsSource(folder)


def head_tensors(source):
    (head,) = (p for p in build_decoder(source).parameters() if p.name == "lm_head.weight")
    return list(head.checkpoint_tensors)


@pytest.mark.parametrize("name", ["llama_tied", "gemma3_window_5", "lfm2", "qwen3_next"])
def test_build_decoder_unties_a_head_that_differs_from_the_table(name, tmp_path, caplog):
    """Transformers 5 does the same: both are present with different values, so they are not tied."""

    def train_head(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["lm_head.weight"][-1, -1] += 1

    source = folder_of(tmp_path, name, train_head)
    source.config = {**source.config, "tie_word_embeddings": True, "tie_embedding": True}
    assert head_tensors(source) == ["lm_head.weight"]
    (warning,) = caplog.messages
    assert warning == (
        f"{name}: the config ties lm_head.weight to model.embed_tokens.weight, but they differ; both are used"
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_build_decoder_keeps_a_head_tied_that_equals_the_table(dtype, tmp_path, caplog):
    def copy_table(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].astype(dtype)

    assert head_tensors(folder_of(tmp_path, "llama_tied", copy_table)) == ["model.embed_tokens.weight"]
    assert caplog.messages == []


def test_wrong_shape_is_named_beforehand_and_when_read():
    source = RandomCheckpoint()
    source.shapes["model.layers.0.mlp.up_proj.weight"] = (51, 36)
    said = r"tensor model.layers.0.mlp.up_proj.weight is \[51, 36\], expected \[52, 36\]"
    with pytest.raises(ModelError, match=said):
        build_decoder(source)
    parameters = {p.name: p for p in make_decoder(source)[0].parameters()}
    with pytest.raises(ModelError, match=said):
        parameters["model.layers.0.mlp.gate_up_proj.weight"].load(source)


def test_unknown_architecture_is_refused_with_the_known_ones():
    source = RandomCheckpoint()
    source.architecture = "rwkv"
    with pytest.raises(UnsupportedModelError, match="architecture 'rwkv' is not supported; supported: ") as raised:
        build_decoder(source)
    assert all(family in str(raised.value) for family in FAMILIES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "mish"}, "hidden_act 'mish' is not supported; supported: silu"),
        ({"sliding_window": 32}, "sliding_window = 32 is not supported in this family"),
        ({"quantization_config": {"bits": 4}}, "quantised by another library"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic' is not supported"),
    ],
)
def test_unsupported_feature_is_refused_by_name(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        build_decoder(checkpoint(**changes))


def test_sliding_window_as_long_as_the_context_changes_nothing():
    assert read_config(checkpoint(sliding_window=64)).sliding_window == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": ...}, "the config lacks 'hidden_size'"),
        ({"intermediate_size": None}, "the config lacks 'intermediate_size'"),
        ({"vocab_size": 0}, "vocab_size is 0, expected a positive whole number"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 10**6}, "the config claims 1000000 layers, but the checkpoint has"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"head_dim": 9}, "head_dim is 9; RoPE needs an even one"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"max_position_embeddings": 2**24 + 1}, "claims a context of 16777217 tokens; expected at most 16777216"),
        ({"sliding_window": 2**24 + 1}, "sliding_window is 16777217; expected at most 16777216"),
    ],
)
def test_invalid_config_is_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        read_config(checkpoint(**changes))


@pytest.mark.parametrize("length", [2**20 + 1, 4_194_304, 2**24])
def test_contexts_of_up_to_2_to_the_24_are_accepted(length):
    """Llama-3-8B-Instruct-Gradient-4194k has 4,194,304."""
    config = read_config(checkpoint(max_position_embeddings=length, sliding_window=length - 1))
    assert (config.context_length, config.sliding_window) == (length, length - 1)


def test_defaults_are_those_of_transformers():
    config = read_config(
        checkpoint(num_key_value_heads=..., head_dim=None, hidden_size=32, rms_norm_eps=..., attention_bias=...)
    )
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 8, 1e-6)


def test_family_uses_the_epsilon_that_transformers_does():
    """LFM2 has `norm_eps`, all others `rms_norm_eps`."""
    both = checkpoint(rms_norm_eps=1e-3, norm_eps=1e-4)
    assert read_config(both).rms_norm_eps == 1e-3
    assert read_config(both, lfm2.DEFAULTS).rms_norm_eps == 1e-4
    assert read_config(checkpoint(rms_norm_eps=1e-3, norm_eps=...), lfm2.DEFAULTS).rms_norm_eps == 1e-5
