"""int8 caches of models with large biases on their keys, such as Qwen2, compared with the model in NumPy and
float64."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from float64_llama import float64_logits
from led_ranks import led
from safetensors.numpy import save_file

import chunkrt
from chunkrt.engine.engine import Engine

HIDDEN, INNER, VOCABULARY, LAYERS, HEADS, KV_HEADS, HEAD_DIM, THETA, EPSILON = 512, 384, 256, 2, 4, 2, 128, 1e6, 1e-6
CONTEXT = 512
HALF = HEAD_DIM // 2
SLOW = np.arange(HALF - 5, HALF)
"""Pairs of channels that rotate slowest: the biases are in the first channels of these."""
CONFIG = {
    "model_type": "qwen2",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": EPSILON,
    "rope_theta": THETA,
    "tie_word_embeddings": False,
}
TOKENS = np.random.default_rng(3).integers(0, VOCABULARY, 384).tolist()


def weights(bias: float) -> dict[str, np.ndarray]:
    """Return a Qwen2 with random weights. Queries are small where keys have their biases, and heads attend to a few
    tokens."""
    drawn = np.random.default_rng(1)

    def linear(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return (drawn.standard_normal((rows, columns)) * gain / columns**0.5).astype(np.float32)

    found = {"model.embed_tokens.weight": linear(VOCABULARY, HIDDEN, HIDDEN**0.5)}
    for layer in (f"model.layers.{index}." for index in range(LAYERS)):
        query = linear(HEADS * HEAD_DIM, HIDDEN, 1.7).reshape(HEADS, HEAD_DIM, HIDDEN)
        query[:, SLOW] *= 0.01
        query[:, SLOW + HALF] *= 0.01
        key_bias = np.zeros((KV_HEADS, HEAD_DIM), np.float32)
        key_bias[:, SLOW] = bias * np.array([1, -1, 1, -1, 1])
        found |= {
            f"{layer}self_attn.q_proj.weight": query.reshape(-1, HIDDEN),
            f"{layer}self_attn.q_proj.bias": np.zeros(HEADS * HEAD_DIM, np.float32),
            f"{layer}self_attn.k_proj.weight": linear(KV_HEADS * HEAD_DIM, HIDDEN, 1.7),
            f"{layer}self_attn.k_proj.bias": key_bias.reshape(-1),
            f"{layer}self_attn.v_proj.weight": linear(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}self_attn.v_proj.bias": np.zeros(KV_HEADS * HEAD_DIM, np.float32),
            f"{layer}self_attn.o_proj.weight": linear(HIDDEN, HEADS * HEAD_DIM),
            f"{layer}mlp.gate_proj.weight": linear(INNER, HIDDEN),
            f"{layer}mlp.up_proj.weight": linear(INNER, HIDDEN),
            f"{layer}mlp.down_proj.weight": linear(HIDDEN, INNER),
            f"{layer}input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{layer}post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
        }
    return found | {
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": linear(VOCABULARY, HIDDEN, 3.0),
    }


def write_model(folder: Path, tensors: Mapping[str, np.ndarray], **changes: Any) -> Path:
    folder.mkdir(parents=True)
    save_file(dict(tensors), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | changes), encoding="utf-8")
    return folder


def log_softmax(scores: np.ndarray) -> np.ndarray:
    shifted = scores - scores.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def truth(tensors: Mapping[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """Return log-probabilities [T, V] in float64."""
    w = {name: tensor.T.astype(np.float64) for name, tensor in tensors.items()}
    w["model.embed_tokens.weight"] = w["model.embed_tokens.weight"].T
    for layer in (f"model.layers.{index}." for index in range(LAYERS)):
        for kind in ("weight", "bias"):
            parts = [w[f"{layer}self_attn.{n}_proj.{kind}"] for n in "qkv"]
            w[f"{layer}self_attn.qkv_proj.{kind}"] = np.concatenate(parts, axis=-1)
        parts = [w[f"{layer}mlp.{n}_proj.weight"] for n in ("gate", "up")]
        w[f"{layer}mlp.gate_up_proj.weight"] = np.concatenate(parts, axis=-1)
    return log_softmax(float64_logits(CONFIG, w, tokens))


def divergence(expected: np.ndarray, logits: np.ndarray | None) -> float:
    """Return the mean KL divergence of a model's answers from the truth."""
    assert logits is not None
    found = log_softmax(logits.astype(np.float64))
    return float((np.exp(expected) * (expected - found)).sum(axis=-1).mean())


@pytest.fixture(scope="module", params=[0.0, 30.0, 300.0])
def biased(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A model with such biases, and its log-probabilities in float64."""
    tensors = weights(request.param)
    return write_model(tmp_path_factory.mktemp("biased") / "model", tensors), truth(tensors, TOKENS)


def load(folder: Path, cache_dtype: str, **options: Any) -> Engine:
    return chunkrt.load(folder, npu="native", scheme="w8a8-dynamic", threads=2, cache_dtype=cache_dtype, **options)


@pytest.mark.sampled(biased=[0.0, 300.0])
@pytest.mark.parametrize("attention_math", ["float32", "bfloat16"])
def test_int8_caches_are_as_close_as_float16_caches(biased: tuple[Path, np.ndarray], attention_math: str) -> None:
    folder, expected = biased
    found = {}
    for dtype in ("float16", "int8"):
        with load(folder, dtype, attention_math=attention_math) as engine:
            found[dtype] = divergence(expected, engine.session().prefill(TOKENS, logits="all").logits)
    assert 0 < found["float16"] < 0.02
    assert found["int8"] - found["float16"] < 0.001


@pytest.fixture(scope="module")
def largest(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """The model with biases of 300, and its log-probabilities in float64."""
    tensors = weights(300.0)
    return write_model(tmp_path_factory.mktemp("largest") / "model", tensors), truth(tensors, TOKENS)


def test_sessions_rewind_continue_and_are_saved(largest: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    with load(largest[0], "int8", chunk_length=32, prefix_cache="memory") as engine:
        session = engine.session()
        session.prefill(TOKENS[:100])
        session.save(tmp_path / "said")
        fork = session.fork()
        expected = session.prefill(TOKENS[100:130], logits="all").logits
        np.testing.assert_array_equal(fork.prefill(TOKENS[100:130], logits="all").logits, expected)
        session.rewind(100)
        np.testing.assert_array_equal(session.prefill(TOKENS[100:130], logits="all").logits, expected)
        again = engine.session()
        again.prefill(TOKENS[:100])
        assert engine.stats().cached_tokens >= 64
        np.testing.assert_array_equal(again.prefill(TOKENS[100:130], logits="all").logits, expected)
    with load(largest[0], "int8", chunk_length=8) as engine, engine.load_session(tmp_path / "said") as session:
        np.testing.assert_array_equal(session.prefill(TOKENS[100:130], logits="all").logits, expected)
    with load(largest[0], "int8", context_shift=True) as engine, engine.load_session(tmp_path / "said") as session:
        np.testing.assert_array_equal(session.prefill(TOKENS[100:130], logits="all").logits, expected)


def test_ranks_leave_out_their_share_of_the_biases(largest: tuple[Path, np.ndarray]) -> None:
    folder, expected = largest
    options = {"scheme": "w8a8-dynamic", "context_length": CONTEXT}
    found = {}
    for dtype in ("float16", "int8"):
        with led(folder, 2, cache_dtype=dtype, **options) as ranks:
            found[dtype] = divergence(expected, ranks.engine.session().prefill(TOKENS, logits="all").logits)
    assert found["int8"] - found["float16"] < 0.001


def test_windows_and_shifts_keep_the_remaining_tokens(tmp_path: Path) -> None:
    """Shift a decoder of one layer, whose keys depend on their own token alone: the rest equals a session of its
    own."""
    tensors = {name: each for name, each in weights(300.0).items() if "layers.1." not in name}
    window = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 0}
    folder = write_model(tmp_path / "model", tensors, num_hidden_layers=1, **window)
    with load(folder, "int8", context_length=128, context_shift=True, chunk_length=16) as engine:
        session = engine.session()
        found = session.prefill(TOKENS[:200]).logits
        assert len(session.tokens) < 200
        expected = engine.session().prefill(session.tokens).logits
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
