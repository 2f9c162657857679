"""Check single decoder layers of a large shape on the emulated NPU, with random weights.

    python bench/npu_shapes.py llama-3.2-1b --layers 0,15 -o llama-3.2-1b.random

writes a checkpoint with all layers and a calibration, and compares the logits of a short prompt: with the chosen layers
on the NPU, and with all layers on the CPU, under the same scheme. A folder that exists is used again. The vocabulary is
short, because embeddings and LM head run on the CPU. Random weights have no massive activations: the check covers
shapes, the compiler and memory, not the quality of a scheme.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

import chunkrt
from chunkrt.checkpoints.source import weights_digest
from chunkrt.compile.calibrate import calibrate
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.files import written_aside
from chunkrt.testing.random_decoders import RandomCheckpoint

VOCABULARY, CONTEXT, CALIBRATION_TOKENS = 8192, 256, 64
COMMON = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "num_key_value_heads": 8,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
}
LLAMA = {
    **COMMON,
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-3.2-1b": {
        **LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
    },
    "llama-3.2-3b": {
        **LLAMA,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "head_dim": 128,
    },
    "qwen3-1.7b": {
        **COMMON,
        "model_type": "qwen3",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    },
}
"""Configurations on the Hugging Face hub, with a shorter vocabulary and context."""


def write_model(folder: Path, config: Mapping[str, Any], *, seed: int = 0) -> None:
    """Write a Hugging Face folder with random weights in float16, a file for each layer, so that memory holds one."""
    source = RandomCheckpoint(config, seed=seed)
    if config["model_type"] == "qwen3":
        layers, shape = range(config["num_hidden_layers"]), (config["head_dim"],)
        source.shapes |= {f"model.layers.{i}.self_attn.{x}_norm.weight": shape for i in layers for x in "qk"}
    files: dict[str, list[str]] = {}
    for name in source.shapes:
        layer = name.split(".")[2] if name.startswith("model.layers.") else "others"
        files.setdefault(f"model-{layer}.safetensors", []).append(name)
    with written_aside(folder) as aside:
        aside.mkdir()
        for file, names in files.items():
            save_file({name: source.read(name).astype(np.float16) for name in names}, aside / file)
        index = {"metadata": {}, "weight_map": {name: file for file, names in files.items() for name in names}}
        (aside / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        (aside / "config.json").write_text(json.dumps(config), encoding="utf-8")


def write_calibration(folder: Path, path: Path) -> None:
    """Write the ranges of activations on random tokens."""
    planned = plan_checkpoint(folder, {})
    found = calibrate(
        planned.plan,
        planned.load,
        tokens_of(CALIBRATION_TOKENS, 1),
        model=folder.name,
        weights=weights_digest(planned.source),
    )
    found.save(path)


def tokens_of(num_tokens: int, seed: int) -> NDArray[np.int64]:
    """Return random tokens."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, num_tokens)


def layer_errors(
    folder: Path, calibration: Path, layers: Sequence[int], *, num_tokens: int, **options: Any
) -> tuple[float, int]:
    """Return the root mean square of the difference of the logits with and without some layers on the NPU, relative to
    that of the logits, and the number of graphs on the NPU.
    """
    placement = f"layers={','.join(map(str, layers))}"
    logits, num_graphs = {}, 0
    for npu in ("native", "qnn"):
        given = {"npu": npu, "placement": placement, "calibration": calibration, "prefix_cache": "off"}
        with chunkrt.load(folder, **given, **options) as engine:
            num_graphs = len([subgraph for subgraph in engine.plan.subgraphs if subgraph.device == "npu"])
            logits[npu] = engine.session().prefill(tokens_of(num_tokens, 2), logits="all").logits.astype(np.float64)
    difference, expected = logits["qnn"] - logits["native"], logits["native"]
    return float(np.sqrt(np.mean(difference**2) / np.mean(expected**2))), num_graphs


@click.command()
@click.argument("shape", type=click.Choice(sorted(SHAPES)))
@click.option("--layers", default="0,15", show_default=True, help="Layers on the NPU, separated by commas.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder of the checkpoint.")
@click.option("--scheme", default="w8a16", show_default=True)
@click.option("--tokens", "num_tokens", type=int, default=8, show_default=True, help="Tokens of the prompt.")
def npu_shapes(shape: str, layers: str, output: Path, scheme: str, num_tokens: int) -> None:
    """Check layers of SHAPE on the emulated NPU."""
    begin = time.perf_counter()

    def tell(what: str) -> None:
        click.echo(f"{time.perf_counter() - begin:6.0f} s, {time.process_time():.0f} s of CPU: {what}")

    if not output.exists():
        write_model(output, SHAPES[shape])
        tell(f"wrote random weights to {output}")
    calibration = output / "calibration.npz"
    if not calibration.exists():
        write_calibration(output, calibration)
        tell("calibrated")
    numbers = [int(layer) for layer in layers.split(",")]
    error, num_graphs = layer_errors(
        output, calibration, numbers, num_tokens=num_tokens, scheme=scheme, chunk_length=num_tokens
    )
    tell(f"{num_graphs} graphs on the NPU; logits differ from the CPU's by {error:.2g} (root mean square)")


if __name__ == "__main__":
    npu_shapes()
