"""Write tests/data/quantised: weights that other libraries quantised, with the values that these libraries return.

Run it with torch, Transformers, compressed-tensors and bitsandbytes:

    python tests/parity/make_quantised_fixtures.py

AWQ, GPTQ and MLX need a GPU or a Mac, so this program packs their weights, by the loops of the formats' descriptions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file

FOLDER = Path(__file__).parents[1] / "data" / "quantised"
SIZE, DEPTH, GROUP = 32, 192, 64
NAME = "model.layers.0.mlp.up_proj"

Tensors = dict[str, torch.Tensor]


def weight() -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(SIZE, DEPTH, generator=generator) * torch.rand(SIZE, 1, generator=generator)


def write(name: str, settings: dict[str, Any], tensors: Tensors, expected: torch.Tensor, key: str = "") -> None:
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "llama", **settings}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    named = {f"{key or NAME}{part}": tensor.contiguous() for part, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")
    np.savez_compressed(folder / "expected.npz", weight=expected.detach().float().numpy())


def compressed(name: str, form: str, arguments: dict[str, Any]) -> None:
    """Let compressed-tensors quantise the weight and return it."""
    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    values, group = weight(), args.group_size or DEPTH
    parts = values.reshape(SIZE, -1, group) if args.strategy != "tensor" else values.reshape(1, 1, -1)
    levels = 2 ** (args.num_bits - 1) - 1 if args.type == "int" else {8: 448.0, 4: 6.0}[args.num_bits]
    state: Tensors = {"weight": values}
    if form == "nvfp4-pack-quantized":
        state["weight_global_scale"] = (448.0 * 6.0 / values.abs().max()).reshape(1).float()
        state["weight_scale"] = (
            (parts.abs().amax(-1) / 6.0 * state["weight_global_scale"]).to(torch.float8_e4m3fn).float()
        )
    elif form.startswith("mxfp"):
        exponents = torch.floor(torch.log2(parts.abs().amax(-1))) - 2
        state["weight_scale"] = torch.exp2(exponents)
    elif args.symmetric:
        state["weight_scale"] = (parts.abs().amax(-1) / levels).to(torch.bfloat16).float()
    else:
        low, high = parts.amin(-1), parts.amax(-1)
        state["weight_scale"] = ((high - low) / (2**args.num_bits - 1)).half().float()
        zero = torch.round(-low / state["weight_scale"]) - 2 ** (args.num_bits - 1)
        state["weight_zero_point"] = zero.clamp(-(2 ** (args.num_bits - 1)), levels).to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(dict(stored), scheme)["weight"]
    groups = {"group_0": {"targets": ["Linear"], "weights": json.loads(args.model_dump_json()), "format": form}}
    settings = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}
    write(name, {"quantization_config": settings}, {f".{part}": value for part, value in stored.items()}, expected)


def words(fields: np.ndarray, bits: int) -> torch.Tensor:
    """Pack the last axis into int32, the lowest bits first."""
    found = np.zeros((*fields.shape[:-1], fields.shape[-1] * bits // 32), np.uint64)
    for index in range(fields.shape[-1]):
        for bit in range(bits):
            place = index * bits + bit
            value = (fields[..., index].astype(np.uint64) >> np.uint64(bit)) & np.uint64(1)
            found[..., place // 32] |= value << np.uint64(place % 32)
    return torch.from_numpy(found.astype(np.uint32).view(np.int32))


def affine(bits: int, order: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return integers [in, out], scales and zeros [groups, out], and the dequantised weight [out, in]."""
    values = weight().numpy().T
    groups = np.arange(DEPTH) // GROUP if order is None else order
    integers = np.empty(values.shape, np.int64)
    scales, zeros = np.empty((DEPTH // GROUP, SIZE), np.float16), np.empty((DEPTH // GROUP, SIZE), np.int64)
    for group in range(DEPTH // GROUP):
        part = values[groups == group]
        low, high = part.min(axis=0), part.max(axis=0)
        scales[group] = (high - low) / (2**bits - 1)
        zeros[group] = np.clip(np.rint(-low / scales[group].astype(np.float32)), 1, 2**bits - 1)
        rounded = np.rint(part / scales[group].astype(np.float32)) + zeros[group]
        integers[groups == group] = np.clip(rounded, 0, 2**bits - 1)
    expected = (integers - zeros[groups]) * scales[groups].astype(np.float32)
    return integers, scales, zeros, expected.T.astype(np.float32)


def awq() -> None:
    integers, scales, zeros, expected = affine(4)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(rows: np.ndarray) -> torch.Tensor:
        columns = rows.reshape(len(rows), -1, 8)[..., order]
        return words(columns, 4)[..., 0]

    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    tensors = {".qweight": packed(integers), ".qzeros": packed(zeros), ".scales": torch.from_numpy(scales)}
    write("awq", {"quantization_config": settings}, tensors, torch.from_numpy(expected))


def gptq(name: str, bits: int, *, version: str = "gptq", act_order: bool = False) -> None:
    order = np.random.default_rng(3).permutation(np.arange(DEPTH) // GROUP) if act_order else np.arange(DEPTH) // GROUP
    integers, scales, zeros, expected = affine(bits, order)
    settings = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": act_order, "sym": False}
    settings["checkpoint_format"] = version
    stored = zeros - 1 if version == "gptq" else zeros
    tensors = {
        ".qweight": words(np.ascontiguousarray(integers.T), bits).T,
        ".qzeros": words(stored, bits),
        ".scales": torch.from_numpy(scales),
        ".g_idx": torch.from_numpy(order.astype(np.int32)),
    }
    write(name, {"quantization_config": settings}, tensors, torch.from_numpy(expected))


def mlx(name: str, bits: int) -> None:
    integers, scales, zeros, _ = affine(bits)
    biases = torch.from_numpy((-zeros * scales.astype(np.float32)).astype(np.float16)).bfloat16()
    scale = torch.from_numpy(scales).bfloat16()
    groups = np.arange(DEPTH) // GROUP
    expected = integers * scale.float().numpy()[groups] + biases.float().numpy()[groups]
    tensors = {
        ".weight": words(np.ascontiguousarray(integers.T), bits).view(torch.uint32),
        ".scales": scale.T,
        ".biases": biases.T,
    }
    write(name, {"quantization": {"group_size": GROUP, "bits": bits}}, tensors, torch.from_numpy(expected.T.copy()))


def fp8() -> None:
    values, block = weight(), 128
    scales = torch.empty(-(-SIZE // block), -(-DEPTH // block))
    stored = torch.empty_like(values)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            place = slice(row * block, (row + 1) * block), slice(column * block, (column + 1) * block)
            scales[row, column] = values[place].abs().max() / 448
            stored[place] = values[place] / scales[row, column]
    eight = stored.to(torch.float8_e4m3fn)
    spread = scales.repeat_interleave(block, 0)[:SIZE].repeat_interleave(block, 1)[:, :DEPTH]
    settings = {"quant_method": "fp8", "weight_block_size": [block, block], "activation_scheme": "dynamic"}
    write(
        "fp8",
        {"quantization_config": settings},
        {".weight": eight, ".weight_scale_inv": scales},
        eight.float() * spread,
    )


def mxfp4() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (2, 12, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 130, (2, 12, 3), generator=generator, dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    key = "model.layers.0.mlp.experts.gate_up_proj"
    settings = {"quantization_config": {"quant_method": "mxfp4"}}
    write("mxfp4", settings, {"_blocks": blocks, "_scales": scales}, expected, key=key)


def bitsandbytes(name: str, kind: str, *, nested: bool) -> None:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    packed, state = quantize_4bit(weight().bfloat16(), blocksize=64, compress_statistics=nested, quant_type=kind)
    expected = dequantize_4bit(packed, state).float()
    parts = state.as_dict(packed=True)
    tensors = {".weight": packed, **{f".weight.{part}": value for part, value in parts.items()}}
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    write(name, {"quantization_config": settings}, tensors, expected)


def bitsandbytes8() -> None:
    values = weight()
    peaks = values.abs().amax(1)
    eight = torch.round(values / peaks[:, None] * 127).to(torch.int8)
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    tensors = {".weight": eight, ".SCB": peaks, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    write("bitsandbytes_int8", {"quantization_config": settings}, tensors, eight.float() * peaks[:, None] / 127)


def gemma(bits: int) -> None:
    """Fill Transformers' linear layer, whose width another pattern of the settings contradicts."""
    from transformers.integrations.gemma_quant import QuantizedLinear

    module = QuantizedLinear(DEPTH, SIZE, num_bits=bits)
    generator = torch.Generator().manual_seed(bits)
    fields = torch.randint(0, 256, module.weight.shape, generator=generator, dtype=torch.uint8)
    module.weight.data = fields.view(module.weight.dtype)
    module.weight_scale.data = torch.rand(SIZE, 1, generator=generator) / 2**bits
    module.input_activation_scale.data = torch.tensor(0.02)
    tensors = {f".{key}": value for key, value in module.state_dict().items()}
    widths = {r"mlp\.up_proj$": {"num_bits": bits}, r"mlp": {"num_bits": 10 - bits}}
    settings = {"quant_method": "gemma", "module_quant_configs": widths}
    write(f"gemma_{bits}", {"quantization_config": settings}, tensors, module._dequantize_weights())


def gemma_embedding() -> None:
    from transformers.integrations.gemma_quant import QuantizedEmbedding

    module = QuantizedEmbedding(SIZE, DEPTH, torch.float32, num_bits=2)
    generator = torch.Generator().manual_seed(3)
    module.embedding_quantized.data = torch.randint(
        0, 256, module.embedding_quantized.shape, generator=generator, dtype=torch.uint8
    )
    module.embedding_scale.data = torch.rand(SIZE, 3, generator=generator)
    tensors = {f".{key}": value for key, value in module.state_dict().items()}
    settings = {"quant_method": "gemma", "num_bits": 2, "quantize_embeddings": True}
    key = "model.embed_tokens"
    write("gemma_embedding", {"quantization_config": settings}, tensors, module.weight, key=key)


if __name__ == "__main__":
    group = {"num_bits": 4, "strategy": "group", "group_size": GROUP}
    compressed("compressed_int4", "pack-quantized", {**group, "symmetric": True})
    compressed("compressed_int4_zeros", "pack-quantized", {**group, "symmetric": False})
    compressed("compressed_int3", "pack-quantized", {**group, "num_bits": 3, "symmetric": True})
    compressed("compressed_int8", "int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": True})
    floats = {"num_bits": 4, "type": "float"}
    compressed("compressed_fp8", "float-quantized", {**floats, "num_bits": 8, "strategy": "channel", "symmetric": True})
    compressed("compressed_nvfp4", "nvfp4-pack-quantized", {**floats, "strategy": "tensor_group", "group_size": 16})
    compressed("compressed_mxfp4", "mxfp4-pack-quantized", {**floats, "strategy": "group", "group_size": 32})
    awq()
    gptq("gptq", 4)
    gptq("gptq_v2", 4, version="gptq_v2")
    gptq("gptq_order", 4, act_order=True)
    gptq("gptq_8", 8)
    gptq("gptq_3", 3)
    mlx("mlx", 4)
    mlx("mlx_6", 6)
    fp8()
    mxfp4()
    bitsandbytes("nf4", "nf4", nested=False)
    bitsandbytes("nf4_nested", "nf4", nested=True)
    bitsandbytes("fp4", "fp4", nested=False)
    bitsandbytes8()
    for bits in (2, 4, 8):
        gemma(bits)
    gemma_embedding()
