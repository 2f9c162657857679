"""Models of known shapes with random weights, for sizes whose checkpoints are not available.

Speed depends on shapes, not on values. The architecture is llama with biases on queries, keys and values, which is the
same computation as Qwen2.5's; llama's output has a bias, too, which is zero here. The tokenizer is another model's,
with a padded vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import quantize
from numpy.typing import NDArray

ROWS = 8192
"""Rows that are generated and quantised at once, so that memory never holds a complete embedding in float32."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder's sizes. Embeddings are tied."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocabulary_size: int = 151936
    context_length: int = 32768
    rope_theta: float = 1e6


SHAPES = {
    "qwen2.5-0.5b": Shape(hidden_size=896, intermediate_size=4864, num_layers=24, num_heads=14, num_kv_heads=2),
    "qwen2.5-1.5b": Shape(hidden_size=1536, intermediate_size=8960, num_layers=28, num_heads=12, num_kv_heads=2),
}


def write_random_model(shape: Shape, tokenizer: Path, path: Path, *, seed: int = 0) -> None:
    """Write a Q8_0 GGUF file of that shape.

    Args:
        tokenizer: a GGUF file whose tokenizer is copied; its vocabulary is at most the shape's.
        path: the file; written under a temporary name, then renamed.
    """
    part = path.with_name(f"part-{path.name}")
    writer = GGUFWriter(part, "llama")
    head_dim = shape.hidden_size // shape.num_heads
    writer.add_name(path.stem)
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(2)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(shape.vocabulary_size)
    _copy_tokenizer(GGUFReader(tokenizer), writer, shape.vocabulary_size)
    random = np.random.default_rng(seed)
    kv_size = shape.num_kv_heads * head_dim
    linears = {
        "attn_q": (shape.hidden_size, shape.hidden_size),
        "attn_k": (kv_size, shape.hidden_size),
        "attn_v": (kv_size, shape.hidden_size),
        "attn_output": (shape.hidden_size, shape.hidden_size),
        "ffn_gate": (shape.intermediate_size, shape.hidden_size),
        "ffn_up": (shape.intermediate_size, shape.hidden_size),
        "ffn_down": (shape.hidden_size, shape.intermediate_size),
    }
    ones = np.ones(shape.hidden_size, np.float32)

    def add(name: str, rows: int, depth: int) -> None:
        writer.add_tensor(name, _random_blocks(random, rows, depth), raw_dtype=GGMLQuantizationType.Q8_0)

    add("token_embd.weight", shape.vocabulary_size, shape.hidden_size)
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(shape.num_layers):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", ones)
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", ones)
        for name, (rows, depth) in linears.items():
            add(f"blk.{layer}.{name}.weight", rows, depth)
            if name.startswith("attn_"):
                bias = np.zeros if name == "attn_output" else random.standard_normal
                writer.add_tensor(f"blk.{layer}.{name}.bias", bias(rows, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(path)


def _random_blocks(random: np.random.Generator, rows: int, depth: int) -> NDArray[np.uint8]:
    """Normal weights of standard deviation depth ** -0.5, so that activations keep their size; as Q8_0 blocks."""
    parts = [
        quantize(
            random.standard_normal((min(ROWS, rows - start), depth), np.float32) / np.float32(depth**0.5),
            GGMLQuantizationType.Q8_0,
        )
        for start in range(0, rows, ROWS)
    ]
    return np.concatenate(parts)


def _copy_tokenizer(source: GGUFReader, writer: GGUFWriter, vocabulary_size: int) -> None:
    """Copy every tokenizer.* key; tokens (with their types and scores) are padded with unused ones."""
    for field in source.fields.values():
        if not field.name.startswith("tokenizer."):
            continue
        value, kind = field.contents(), field.types[0]
        if field.name == "tokenizer.ggml.tokens":
            value += [f"<|unused {number}|>" for number in range(len(value), vocabulary_size)]
        elif field.name == "tokenizer.ggml.token_type":
            value += [5] * (vocabulary_size - len(value))  # 5: unused
        elif field.name == "tokenizer.ggml.scores":
            value += [0.0] * (vocabulary_size - len(value))
        sub_type = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, kind, sub_type)
