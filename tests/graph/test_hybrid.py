"""Decoders with linear attention: kinds of layers from the config, and refused configs."""

import json
import shutil

import numpy as np
import pytest
from fixture_checkpoints import checkpoint, input_ids
from safetensors.numpy import load_file, save_file

import chunkrt
from chunkrt.checkpoints.checkpoint import open_checkpoint
from chunkrt.errors import ModelError, UnsupportedModelError
from chunkrt.graph.decoders import build_decoder


@pytest.fixture
def changed(tmp_path):
    """Return a function that copies a fixture with another config: `...` removes a key."""

    def change(name, changes):
        folder = shutil.copytree(checkpoint(name), tmp_path / name)
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
        return open_checkpoint(folder)

    return change


@pytest.mark.parametrize(
    ("name", "changes", "error", "message"),
    [
        ("lfm2", {"layer_types": ["conv", "mamba", "conv", "conv"]}, UnsupportedModelError, "a layer is 'mamba'"),
        ("lfm2", {"layer_types": ["conv"]}, ModelError, "expected a word for each of 4 layers"),
        ("lfm2", {"full_attn_idxs": [0, 1]}, ModelError, "layers.0.self_attn.q_proj.weight is missing"),
        ("lfm2", {"block_ffn_dim_multiplier": 10**400}, ModelError, "is 1000\\d+, expected a positive number"),
        ("lfm2", {"block_ff_dim": ...}, ModelError, "the config lacks 'intermediate_size'"),
        ("qwen3_5", {"linear_num_value_heads": 3}, ModelError, "3 value heads .* cannot share 2 key heads evenly"),
        ("qwen3_5", {"linear_num_key_heads": "2"}, ModelError, "linear_num_key_heads is '2'"),
        ("qwen3_next", {"full_attention_interval": 2}, ModelError, r"layers\.1\.self_attn\.q_proj\.weight is missing"),
        ("qwen3_next_experts", {"num_experts": 1}, ModelError, "cannot pick 2 of 1 experts"),
        ("qwen3_next_experts", {"num_experts": 4}, ModelError, r"experts\.4\.\S+ is in the checkpoint, but no part"),
    ],
)
def test_mismatched_config_is_refused(changed, name, changes, error, message):
    if "intermediate_size" in message:
        changes = changes | {"intermediate_size": ...}
    with pytest.raises(error, match=message):
        build_decoder(changed(name, changes))


def test_convolution_of_another_width_is_named(changed):
    with pytest.raises(ModelError, match=r"conv\.conv\.weight is \[32, 1, 3\], expected \[32, 1, 5\]"):
        build_decoder(changed("lfm2", {"conv_L_cache": 5}))


@pytest.mark.parametrize(
    ("name", "key", "tensor"),
    [
        ("lfm2", "conv_L_cache", "conv.conv.weight"),
        ("qwen3_next", "linear_conv_kernel_dim", "conv1d.weight"),
        ("qwen3_5", "linear_conv_kernel_dim", "conv1d.weight"),
    ],
)
@pytest.mark.parametrize("npu", ["reference", "native", "onnxrt"])
def test_convolution_of_one_tap_is_a_longer_one_with_zeros(tmp_path, name, key, tensor, npu):
    def write(folder, change, settings):
        shutil.copytree(checkpoint(name), folder)
        tensors = load_file(folder / "model.safetensors")
        changed = {n: change(value) if n.endswith(tensor) else value for n, value in tensors.items()}
        save_file(changed, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text()) | settings
        (folder / "config.json").write_text(json.dumps(config))
        scheme = "w8a8-dynamic" if npu == "native" else "float"
        with chunkrt.load(folder, npu=npu, scheme=scheme, chunk_length=8) as engine:
            return engine.session().prefill(input_ids(name)[:20], logits="all").logits

    found = write(tmp_path / "short", lambda weight: weight[..., -1:].copy(), {key: 1})
    expected = write(
        tmp_path / "long", lambda weight: weight * (np.arange(weight.shape[-1]) == weight.shape[-1] - 1), {}
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
