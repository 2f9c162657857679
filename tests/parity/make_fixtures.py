"""Tiny random decoders with the logits that Hugging Face Transformers computes for them.

Each folder under fixtures/ holds a checkpoint (config.json and model.safetensors, or model.gguf) and expected.npz:
`input_ids` int64 [T] and `logits` float32 [T, V], computed by Transformers with eager attention in one pass: in
float32, or in float64 for decoders with recurrences. The configurations have the form of published checkpoints.

    python make_fixtures.py           remake every fixture
    python make_fixtures.py NAME ...  remake single fixtures of family_fixtures.py
    python make_fixtures.py --check   remake elsewhere and compare with the committed files
    python make_fixtures.py --live    compare chunkrt's own logits with the committed ones

Remaking needs torch, transformers, safetensors and gguf; last done with torch 2.13, transformers 5.23.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import family_fixtures
import numpy as np
import recurrent_fixtures
from gguf_twins import write_gguf
from numpy.typing import NDArray

FIXTURES = Path(__file__).parent / "fixtures"
MOST_TOKENS = 95
"""Number of tokens: three chunks of 32, minus one token."""
LOGIT_TOLERANCE = 1e-4
Weights = dict[str, NDArray[Any]]

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama_gqa": LLAMA | {"num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 80},
    "llama_tied": LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "llama_mha": LLAMA | {"num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 500.0},
    "llama_rope_llama3": LLAMA | {"num_attention_heads": 2, "rope_scaling": LLAMA3_ROPE},
    "llama_rope_linear": LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    # Transformers 5 saves it so: rope_theta inside rope_parameters, "dtype" for "torch_dtype".
    "llama_rope_parameters": {k: v for k, v in LLAMA.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    | {"dtype": "float32", "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0}},
    "llama_biased": LLAMA | {"attention_bias": True, "mlp_bias": True, "num_attention_heads": 2},
    "llama_head_dim": LLAMA | {"head_dim": 12},
    # Weights stored as bfloat16, computed in float32.
    "mistral_bfloat16": {k: v for k, v in LLAMA.items() if k not in ("attention_bias", "mlp_bias")}
    | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
    | {"torch_dtype": "bfloat16", "hidden_size": 48, "head_dim": 16},
}

SMALL: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float16",
}
MISTRAL = SMALL | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu"}
MISTRAL |= {"tie_word_embeddings": False}
QWEN2 = SMALL | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu"}
QWEN2 |= {"tie_word_embeddings": True, "rope_theta": 1e6, "sliding_window": 32, "use_sliding_window": False}
QWEN2 |= {"max_window_layers": 1}
QWEN3 = SMALL | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu"}
QWEN3 |= {"head_dim": 8, "tie_word_embeddings": True, "rope_theta": 1e6, "attention_bias": False}
QWEN3 |= {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 2}
GEMMA3 = SMALL | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 8}
GEMMA3 |= {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 8,
    "num_hidden_layers": 6,
    "intermediate_size": 16,
}
GEMMA3 |= {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
    "attention_bias": False,
}
PHI3 = SMALL | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_act": "silu"}
PHI3 |= {"tie_word_embeddings": False, "rms_norm_eps": 1e-5, "rope_scaling": None, "pad_token_id": 0}
PHI3 |= {"num_attention_heads": 2, "num_key_value_heads": 1, "original_max_position_embeddings": 128}
LONGROPE = PHI3 | {"original_max_position_embeddings": 64, "partial_rotary_factor": 0.75, "sliding_window": None}
LONGROPE |= {"rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.2, 2.0, 4.0]}}

# Windows shorter than a chunk, of the prompt, longer.
WINDOWS = (5, MOST_TOKENS, 120)
CONFIGS |= {f"mistral_window_{window}": MISTRAL | {"sliding_window": window} for window in WINDOWS}
CONFIGS |= {f"gemma3_window_{window}": GEMMA3 | {"sliding_window": window} for window in WINDOWS}
CONFIGS |= {f"phi3_window_{window}": PHI3 | {"sliding_window": window} for window in WINDOWS}
CONFIGS |= {
    "qwen2": QWEN2,
    "qwen2_window": QWEN2 | {"use_sliding_window": True, "tie_word_embeddings": False},
    "qwen3": QWEN3,
    # With a window, as Transformers 5 saves it.
    "qwen3_layer_types": {k: v for k, v in QWEN3.items() if k != "rope_theta"}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "attention_bias": True, "head_dim": 4}
    | {"use_sliding_window": True, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    # Two layers; each kind has its section; logits are bounded.
    "gemma3_rope_parameters": {k: v for k, v in GEMMA3.items() if k not in ("rope_theta", "rope_local_base_freq")}
    | {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9}
    | {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 12}
    | {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        }
    },
    "gemma3_scaled": GEMMA3 | {"sliding_window": 6, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    # One decoder, and a prompt on either side of its original context.
    "phi3_longrope_short": LONGROPE,
    "phi3_longrope_long": LONGROPE,
}
NUM_TOKENS = dict.fromkeys((name for name in CONFIGS if CONFIGS[name]["vocab_size"] == 128), 70)
NUM_TOKENS["phi3_longrope_short"] = 64
GGUF_OF = {
    "llama_rope_llama3_gguf": "llama_rope_llama3",
    "llama_biased_gguf": "llama_biased",
    "qwen2_gguf": "qwen2",
    "qwen3_gguf": "qwen3",
    "gemma3_gguf": "gemma3_scaled",
    "phi3_gguf": "phi3_window_5",
    "phi3_longrope_gguf": "phi3_longrope_long",
}
RECURRENT = recurrent_fixtures.CONFIGS
GGUF_OF |= recurrent_fixtures.GGUF_OF | family_fixtures.GGUF_OF
FAMILIES = family_fixtures.CONFIGS
ALL_NAMES = [*CONFIGS, *RECURRENT, *FAMILIES, *GGUF_OF]


def main() -> int:
    """Remake, check or compare live; the exit status is 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="fixtures to remake")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="compare with the committed files")
    mode.add_argument("--live", action="store_true", help="compare chunkrt's logits with the committed ones")
    arguments = parser.parse_args()
    for name in arguments.names:
        _make_family(FIXTURES, name, FAMILIES[name])
    if arguments.names:
        return 0
    if arguments.live:
        return _report({name: _live_difference(FIXTURES / name) for name in ALL_NAMES})
    if not arguments.check:
        make(FIXTURES)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        return _report({name: _difference(FIXTURES / name, Path(folder) / name) for name in ALL_NAMES})


def make(folder: Path) -> None:
    """Write every fixture under `folder`."""
    for name, config in CONFIGS.items():
        seed = list(CONFIGS).index("phi3_longrope_long" if name == "phi3_longrope_short" else name)
        weights = random_weights(config, np.random.default_rng(seed))
        input_ids = np.random.default_rng(1000 + seed).integers(
            0, config["vocab_size"], NUM_TOKENS.get(name, MOST_TOKENS), np.int64
        )
        write_checkpoint(folder / name, config, weights)
        _write_expected(folder / name, input_ids, transformers_logits(folder / name, input_ids, "float32"))
        _write_gguf_twins(folder, name, config, weights, write_gguf)
    for seed, (name, config) in enumerate(RECURRENT.items(), 2000):
        rng = np.random.default_rng(seed)
        weights = recurrent_fixtures.random_weights(config, rng)
        input_ids = rng.integers(0, config["vocab_size"], recurrent_fixtures.NUM_TOKENS, np.int64)
        write_checkpoint(folder / name, config, weights)
        _write_expected(folder / name, input_ids, transformers_logits(folder / name, input_ids, "float64"))
        _write_gguf_twins(folder, name, config, weights, recurrent_fixtures.write_gguf)
    for name, config in FAMILIES.items():
        _make_family(folder, name, config)


def _make_family(folder: Path, name: str, config: dict[str, Any]) -> None:
    """Write a fixture whose random numbers depend on its name alone."""
    rng = np.random.default_rng(list(name.encode()))
    weights = family_fixtures.random_weights(config, rng)
    input_ids = rng.integers(0, config["vocab_size"], family_fixtures.NUM_TOKENS, np.int64)
    write_checkpoint(folder / name, config, weights)
    with tempfile.TemporaryDirectory() as known:
        write_checkpoint(Path(known), family_fixtures.equivalent(config), family_fixtures.dequantised(weights))
        _write_expected(folder / name, input_ids, transformers_logits(Path(known), input_ids, "float64"))
    _write_gguf_twins(folder, name, config, weights, family_fixtures.write_gguf)


def _write_gguf_twins(
    folder: Path, name: str, config: dict[str, Any], weights: Weights, write: Callable[..., None]
) -> None:
    for gguf_name in [g for g, source in GGUF_OF.items() if source == name]:
        (folder / gguf_name).mkdir(parents=True, exist_ok=True)
        write(folder / gguf_name / "model.gguf", config, weights)
        (folder / gguf_name / "expected.npz").write_bytes((folder / name / "expected.npz").read_bytes())


def random_weights(config: dict[str, Any], rng: np.random.Generator) -> Weights:
    """Return weights that make attention and logits non-trivial: linears of gain about 1.2, norms around 1."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim, family = config.get("head_dim") or hidden // config["num_attention_heads"], config["model_type"]
    query, key = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    norm_center = 0 if family == "gemma3_text" else 1
    weights: Weights = {}

    def linear(name: str, out_features: int, in_features: int, bias: bool = False) -> None:
        scale = 1.2 / in_features**0.5
        weights[f"{name}.weight"] = rng.standard_normal((out_features, in_features), np.float32) * np.float32(scale)
        if bias:
            weights[f"{name}.bias"] = rng.standard_normal(out_features, np.float32) * np.float32(0.3)

    def norm(name: str, width: int = hidden) -> None:
        weights[f"{name}.weight"] = norm_center + rng.standard_normal(width, np.float32) * np.float32(0.2)

    weights["model.embed_tokens.weight"] = rng.standard_normal((config["vocab_size"], hidden), np.float32) * np.float32(
        0.3
    )
    qkv = {"q_proj": (query, hidden), "k_proj": (key, hidden), "v_proj": (key, hidden)}
    gate_up = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden)}
    if family == "phi3":
        qkv, gate_up = {"qkv_proj": (query + 2 * key, hidden)}, {"gate_up_proj": (2 * inner, hidden)}
    biased = {"q_proj", "k_proj", "v_proj"} if family == "qwen2" else set()
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        norm(f"{prefix}.input_layernorm")
        norm(f"{prefix}.post_attention_layernorm")
        if family == "gemma3_text":
            norm(f"{prefix}.pre_feedforward_layernorm")
            norm(f"{prefix}.post_feedforward_layernorm")
        if family in ("gemma3_text", "qwen3"):
            norm(f"{prefix}.self_attn.q_norm", head_dim)
            norm(f"{prefix}.self_attn.k_norm", head_dim)
        for name, shape in {**qkv, "o_proj": (hidden, query)}.items():
            has_bias = config.get("attention_bias", False) or name in biased
            linear(f"{prefix}.self_attn.{name}", *shape, bias=has_bias)
        for name, shape in {**gate_up, "down_proj": (hidden, inner)}.items():
            linear(f"{prefix}.mlp.{name}", *shape, bias=config.get("mlp_bias", False))
    norm("model.norm")
    if not config.get("tie_word_embeddings", True):
        linear("lm_head", config["vocab_size"], hidden)
    if config.get("torch_dtype") == "float16":  # the twins store these very values
        weights = {name: weight.astype(np.float16) for name, weight in weights.items()}
    return weights


def transformers_logits(folder: Path, input_ids: NDArray[np.int64], dtype: str) -> NDArray[np.float32]:
    """Compute logits [T, V] of the checkpoint in `folder`, in `dtype`; every weight must have been used."""
    import torch
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=getattr(torch, dtype),
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    unplaced = {key: names for key, names in loading.items() if names}
    if unplaced:
        raise SystemExit(f"{folder.name}: Transformers did not load it wholly: {unplaced}")
    with torch.inference_mode():
        logits = model(torch.from_numpy(input_ids)[None], use_cache=False).logits[0]
        return np.asarray(logits.float().numpy())


def write_checkpoint(folder: Path, config: dict[str, Any], weights: Weights) -> None:
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    dtype = getattr(torch, config.get("torch_dtype") or config["dtype"])
    tensors = {name: torch.from_numpy(weight) for name, weight in weights.items()}
    tensors = {name: tensor if tensor.dtype == torch.uint8 else tensor.to(dtype) for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _write_expected(folder: Path, input_ids: NDArray[np.int64], logits: NDArray[np.float32]) -> None:
    np.savez(folder / "expected.npz", input_ids=input_ids, logits=logits)


def _difference(committed: Path, remade: Path) -> str | None:
    """Return the first file that differs, or None. Weights must agree byte for byte, logits to a tolerance."""
    for path in sorted(remade.iterdir()):
        other = committed / path.name
        if not other.is_file():
            return f"{path.name} is not committed"
        if path.name != "expected.npz" and path.read_bytes() != other.read_bytes():
            return f"{path.name} differs"
    old, new = np.load(committed / "expected.npz"), np.load(remade / "expected.npz")
    if not np.array_equal(old["input_ids"], new["input_ids"]):
        return "input_ids differ"
    return _logit_difference(new["logits"], old["logits"])


def _live_difference(folder: Path) -> str | None:
    """Return the difference of chunkrt's own logits from the committed ones, or None."""
    import chunkrt

    expected = np.load(folder / "expected.npz")
    path = folder / "model.gguf" if (folder / "model.gguf").exists() else folder
    with chunkrt.load(path, npu="reference", scheme="float") as engine:
        logits = engine.session().prefill(expected["input_ids"].tolist(), logits="all").logits
    return _logit_difference(logits, expected["logits"])


def _logit_difference(found: NDArray[np.float32], expected: NDArray[np.float32]) -> str | None:
    largest = float(np.max(np.abs(found - expected)))
    return None if largest <= LOGIT_TOLERANCE else f"logits differ by up to {largest:.2e}"


def _report(differences: dict[str, str | None]) -> int:
    for name, difference in differences.items():
        print(f"{name}: {difference or 'ok'}")
    return int(any(differences.values()))


if __name__ == "__main__":
    sys.exit(main())
