"""Folders that other libraries quantised, against the values that these libraries return; see
tests/parity/make_quantised_fixtures.py.
"""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_folders import write_folder
from safetensors.numpy import load_file, save_file

import chunkrt
from chunkrt.checkpoints.checkpoint import open_checkpoint
from chunkrt.checkpoints.source import INT4
from chunkrt.errors import ModelError, UnsupportedModelError

FOLDER = Path(__file__).parents[1] / "data" / "quantised"
FORMATS = sorted(path.name for path in FOLDER.iterdir())
BLOCKS = {"awq", "compressed_int4", "compressed_int4_zeros", "gemma_4", "gptq", "gptq_v2", "mlx"}
"""Formats whose integers can be kept."""
FLOATS_OF_8_AND_16_BITS = {"compressed_fp8", "compressed_nvfp4", "fp8", "mlx", "mlx_6"}
"""Formats with types that NumPy does not have."""


def expected(name: str) -> np.ndarray:
    return np.load(FOLDER / name / "expected.npz")["weight"]


def changed(name: str, folder: Path, **settings: Any) -> Path:
    shutil.copytree(FOLDER / name, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", FORMATS)
def test_weight_equals_that_of_its_library(name: str, caplog: pytest.LogCaptureFixture) -> None:
    source = open_checkpoint(FOLDER / name)
    (weight,) = source.names()
    truth = expected(name)
    assert source.info(weight).shape == truth.shape
    tolerance = 4e-3 if name == "compressed_nvfp4" or ("4" in name and "nf" in name) or name == "fp4" else 1e-6
    np.testing.assert_allclose(source.read(weight), truth, rtol=0, atol=tolerance * np.abs(truth).max())
    assert "1 weights are quantised" in caplog.text
    assert "quantization_config" not in source.config


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_of_4_bits_are_kept_where_a_group_is_a_multiple_of_32(name: str) -> None:
    source = open_checkpoint(FOLDER / name)
    (weight,) = source.names()
    blocks = source.read_blocks(weight)
    assert (blocks is not None) == (name in BLOCKS) == (source.info(weight).stored_as == INT4)
    if blocks is not None:
        truth = expected(name)
        assert blocks.integers.max() <= 15
        np.testing.assert_allclose(blocks.dequantise(), truth, rtol=0, atol=1e-3 * np.abs(truth).max())


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("awq", {"quant_method": "exl3"}, "the quantisation 'exl3' is not supported; supported: awq, gptq,"),
        ("awq", {"version": "gemv"}, "the AWQ version 'gemv' is not supported"),
        ("awq", {"bits": 5}, "bits of the quantisation is 5; supported: 4"),
        ("gptq", {"checkpoint_format": "marlin"}, "the GPTQ format 'marlin' is not supported"),
        (
            "compressed_int4",
            {"config_groups": {"g": {"format": "marlin-24", "targets": ["Linear"]}}},
            "the compressed-tensors format 'marlin-24' is not supported",
        ),
    ],
)
def test_unsupported_format_is_refused_by_name(
    name: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        open_checkpoint(changed(name, tmp_path / "model", **settings))


def read_all(folder: Path) -> None:
    """Read all weights. The file is no longer mapped afterwards, so that Windows can replace it."""
    source = open_checkpoint(folder)
    for name in source.names():
        source.read(name)


@pytest.mark.parametrize("name", sorted(set(FORMATS) - FLOATS_OF_8_AND_16_BITS))
def test_missing_or_misshapen_part_raises_only_model_errors(name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER / name, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for part, array in tensors.items():
        for odd in (None, array.reshape(-1)[:-1].copy(), array[None]):
            others = {key: value for key, value in tensors.items() if key != part}
            save_file(others if odd is None else {**others, part: odd}, folder / "model.safetensors")
            with suppress(ModelError):
                read_all(folder)


def test_decoder_of_gptq_weights_equals_that_of_their_values(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    plain = write_folder(tmp_path / "plain", **sizes)
    packed = shutil.copytree(plain, tmp_path / "packed")
    weights = load_file(plain / "model.safetensors")
    stored = dict(weights)
    for name in [name for name in weights if name.endswith("proj.weight")]:
        weight = stored.pop(name)
        scales = np.abs(weight).reshape(len(weight), -1, 64).max(axis=-1).astype(np.float16) / np.float16(7)
        steps = np.repeat(scales.astype(np.float32), 64, axis=1)
        integers = np.clip(np.rint(weight / steps) + 8, 0, 15).astype(np.uint32)
        weights[name] = (integers.astype(np.float32) - 8) * steps
        words = np.zeros((weight.shape[1] // 8, len(weight)), np.uint32)
        for index, column in enumerate(integers.T):
            words[index // 8] |= column << np.uint32(index % 8 * 4)
        prefix = name.removesuffix("weight")
        stored[f"{prefix}qweight"] = words.view(np.int32)
        stored[f"{prefix}qzeros"] = np.full((scales.shape[1], len(weight) // 8), 0x77777777, np.int32)
        stored[f"{prefix}scales"] = np.ascontiguousarray(scales.T)
    save_file(weights, plain / "model.safetensors")
    save_file(stored, packed / "model.safetensors")
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}
    config = json.loads((packed / "config.json").read_text()) | {"quantization_config": settings}
    (packed / "config.json").write_text(json.dumps(config))
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    options = {"npu": "reference", "cache_dtype": "float32"}
    with (
        chunkrt.load(plain, scheme="float", **options) as truth,
        chunkrt.load(packed, scheme="float", **options) as found,
    ):
        logits = truth.session().prefill(prompt).logits
        np.testing.assert_array_equal(found.session().prefill(prompt).logits, logits)
    with chunkrt.load(packed, npu="native", scheme="w4a8-dynamic", attention_math="float32") as kept:
        assert not kept.scheme.weights_of_8_bits or "lm_head" in str(kept.scheme.weights_of_8_bits)
        error = np.abs(kept.session().prefill(prompt).logits - logits).max() / np.abs(logits).max()
        assert error < 0.03


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gptq_zero_points_of_0_borrow_from_the_next_field(bits: int, tmp_path: Path) -> None:
    random = np.random.default_rng(bits)
    size, depth = 32, 64
    integers = random.integers(0, 2**bits, (depth, size)).astype(np.uint32)
    zeros = random.integers(0, 2**bits, (1, size)).astype(np.uint32)
    zeros[0, ::3] = 0

    def packed(fields: np.ndarray) -> np.ndarray:
        per_word = 32 // bits
        words = np.zeros((fields.shape[0], fields.shape[1] // per_word), np.uint32)
        for index in range(fields.shape[1]):
            words[:, index // per_word] |= fields[:, index] << np.uint32(index % per_word * bits)
        return words

    ones = np.uint32(sum(1 << place for place in range(0, 32, bits)))
    tensors = {
        "a.qweight": np.ascontiguousarray(packed(integers.T).T).view(np.int32),
        "a.qzeros": (packed(zeros) - ones).view(np.int32),
        "a.scales": np.ones((1, size), np.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    settings = {"quant_method": "gptq", "bits": bits, "group_size": depth, "checkpoint_format": "gptq"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": settings}))
    expected = integers.astype(np.float32).T - zeros.astype(np.float32).T
    np.testing.assert_array_equal(open_checkpoint(tmp_path).read("a.weight"), expected)


def test_groups_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    tensors = {
        "a.qweight": np.zeros((40, 8), np.int32),
        "a.qzeros": np.zeros((3, 1), np.int32),
        "a.scales": np.ones((3, 8), np.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": settings}))
    with pytest.raises(ModelError, match="which 3 groups cannot share evenly"):
        open_checkpoint(tmp_path)


def test_mlx_settings_may_stand_twice_and_differ_by_module(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER / "mlx_6", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (weight,) = open_checkpoint(folder).names()
    settings = {"group_size": 64, "bits": 4, weight.removesuffix(".weight"): {"group_size": 64, "bits": 6}}
    config |= {"quantization": settings, "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    np.testing.assert_allclose(open_checkpoint(folder).read(weight), expected("mlx_6"), atol=1e-6)
