"""Tiny random decoders, exported by ONNX Runtime GenAI's model builder and by Optimum.

Each folder under tests/data/onnx/ is the tool's output for one decoder: the model, its configuration and the
tokenizer's files. The reference for values is the file itself, run by ONNX Runtime.

    python make_onnx_fixtures.py genai      the model builder's, in float32, float16 and int4
    python make_onnx_fixtures.py optimum    Optimum's, in float32 and quantised by ONNX Runtime

Both need torch, transformers and onnx; the first also onnxruntime-genai, the second optimum-onnx with the transformers
that it requires. tests/data/onnx/README.md has the versions that made the committed files.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import recurrent_fixtures
from make_fixtures import GEMMA3, LLAMA, PHI3, QWEN2, QWEN3, random_weights, write_checkpoint

FOLDER = Path(__file__).parents[1] / "data" / "onnx"
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")

# Heads have 16 dimensions, because ONNX Runtime rotates no smaller ones; K is a multiple of 32, because int4 has blocks
# of 32.
SIZES: dict[str, Any] = {
    "vocab_size": 104,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "torch_dtype": "float32",
}
INDEPENDENT_HEADS = {"head_dim": 16}
HALVED_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA | SIZES | INDEPENDENT_HEADS,
    "qwen2": QWEN2 | SIZES | HALVED_HEADS,
    "qwen3": QWEN3 | SIZES | INDEPENDENT_HEADS,
    "phi3": PHI3 | SIZES | HALVED_HEADS | {"sliding_window": 20},
    "gemma3": GEMMA3
    | SIZES
    | INDEPENDENT_HEADS
    | {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 24},
}
CONFIGS["lfm2"] = (
    recurrent_fixtures.CONFIGS["lfm2"] | SIZES | HALVED_HEADS | {"num_hidden_layers": 3, "full_attn_idxs": [1]}
)
CONFIGS["qwen3_5"] = recurrent_fixtures.CONFIGS["qwen3_5"] | SIZES | HALVED_HEADS | {"num_hidden_layers": 3}
RECURRENT = ("lfm2", "qwen3_5")
"""Families that Optimum does not export."""

# Without Gemma 3, whose rotary tables the builder of 0.18 does not find in Transformers 5's configuration.
GENAI_PRECISIONS = {"llama": ("fp32", "fp16", "int4", "int4_qdq"), "qwen2": ("fp32", "int4")}
GENAI_PRECISIONS |= {"qwen3": ("fp32", "int4"), "phi3": ("fp32",), "lfm2": ("fp32",), "qwen3_5": ("fp32",)}


def main() -> None:
    """Remake the fixtures of one tool."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tool", choices=("genai", "optimum"))
    parser.add_argument("--only", choices=tuple(CONFIGS), help="one family alone")
    arguments = parser.parse_args()
    make = make_genai if arguments.tool == "genai" else make_optimum
    for seed, (family, config) in enumerate(CONFIGS.items(), 3000):
        if arguments.only not in (None, family):
            continue
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = Path(folder) / "checkpoint"
            if family == "qwen3_5":
                _write_with_vision(checkpoint, config, np.random.default_rng(seed))
            else:
                weights = recurrent_fixtures.random_weights if family == "lfm2" else random_weights
                write_checkpoint(checkpoint, config, weights(config, np.random.default_rng(seed)))
            _write_tokenizer(checkpoint)
            make(family, checkpoint, Path(folder))


def make_genai(family: str, checkpoint: Path, scratch: Path) -> None:
    """Export `checkpoint` by `onnxruntime_genai.models.builder` at every precision chosen for the family."""
    for name in GENAI_PRECISIONS.get(family, ()):
        precision = name.removesuffix("_qdq")
        # The command line accepts fp16 for GPUs only; the model also runs on the CPU.
        provider = "cuda" if precision == "fp16" else "cpu"
        options = ["int4_block_size=32", "int4_accuracy_level=1", "int4_algo_config=default"]
        options += ["use_qdq=true"] if name != precision else []
        command = ["-m", "onnxruntime_genai.models.builder", "-i", str(checkpoint), "-p", precision, "-e", provider]
        target = scratch / name
        extra = ["--extra_options", *options] if precision == "int4" else []
        subprocess.run([sys.executable, *command, "-o", str(target), "-c", str(scratch / "cache"), *extra], check=True)
        _keep(target, f"genai_{family}_{name}")


def make_optimum(family: str, checkpoint: Path, scratch: Path) -> None:
    """Export `checkpoint` by `optimum-cli export onnx`, and quantise a llama's linears by ONNX Runtime."""
    if family in RECURRENT:
        return
    target = scratch / "optimum"
    command = ["-m", "optimum.commands.optimum_cli", "export", "onnx", "--model", str(checkpoint)]
    subprocess.run([sys.executable, *command, "--task", "text-generation-with-past", str(target)], check=True)
    _keep(target, f"optimum_{family}_fp32")
    if family == "llama":
        from onnxruntime.quantization import QuantType, quantize_dynamic

        for weight in (QuantType.QInt8, QuantType.QUInt8):
            quantised = scratch / weight.name
            shutil.copytree(target, quantised)
            quantize_dynamic(
                target / "model.onnx",
                quantised / "model.onnx",
                op_types_to_quantize=["MatMul"],
                per_channel=weight is QuantType.QInt8,
                weight_type=weight,
            )
            _keep(quantised, f"optimum_{family}_{'int8' if weight is QuantType.QInt8 else 'uint8'}")


def _write_with_vision(folder: Path, text: dict[str, Any], rng: np.random.Generator) -> None:
    """Write a checkpoint of text and images, the only form of Qwen3.5 that the builder of 0.18 takes; it exports the
    text."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "num_position_embeddings": 16}
    vision |= {"out_hidden_size": text["hidden_size"], "deepstack_visual_indexes": []}
    text = {key: value for key, value in text.items() if key != "architectures"}
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision, tie_word_embeddings=False)
    config.architectures = ["Qwen3_5ForConditionalGeneration"]
    model = AutoModelForImageTextToText.from_config(config)
    shapes = {name: tuple(v.shape) for name, v in model.state_dict().items() if "visual" not in name}
    weights = {name: recurrent_fixtures.random_tensor(name, shape, text, rng) for name, shape in shapes.items()}
    model.load_state_dict({n: torch.from_numpy(np.ascontiguousarray(w)) for n, w in weights.items()}, strict=False)
    model.save_pretrained(folder)


def _keep(exported: Path, name: str) -> None:
    shutil.rmtree(FOLDER / name, ignore_errors=True)
    shutil.copytree(exported, FOLDER / name)


def _write_tokenizer(folder: Path) -> None:
    """Write a byte-level vocabulary of the special tokens and ASCII's printable characters, one token each."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*SPECIAL_TOKENS, *(chr(code) for code in range(33, 127)), "\u0120", "\u010a"]  # the space and newline
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


if __name__ == "__main__":
    main()
