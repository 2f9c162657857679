"""A model and its ONNX exports: comparison of greedy tokens from chunkrt, a fixed window, and ONNX Runtime GenAI.

    python bench/onnx_forms.py smollm2-135m-instruct --genai-python /path/to/python --dtype fp32

GenAI runs in an interpreter that has `onnxruntime-genai`; without one it is omitted. A tiny random decoder comes first.
The exit status is 1 if tokens differ.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import numpy as np
from safetensors.numpy import save_file

import chunkrt
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.engine.resolve import find_checkpoint
from chunkrt.graph.partition import Planned
from chunkrt.onnx.exporting import (
    DynamicSettings,
    WindowSettings,
    dynamic_model,
    genai_config,
    save_model,
    window_model,
    write_beside,
)
from chunkrt.onnx.window_session import OnnxSession
from chunkrt.testing.random_decoders import CONFIG, RandomCheckpoint

PROMPT = "The capital of France is"

GENAI = """
import json, sys
import onnxruntime_genai as genai
folder, num_new, *prompt = json.loads(sys.argv[1])
model = genai.Model(folder)
parameters = genai.GeneratorParams(model)
parameters.set_search_options(max_length=len(prompt) + num_new, do_sample=False)
generator = genai.Generator(model, parameters)
generator.append_tokens(prompt)
tokens = []
while not generator.is_done():
    generator.generate_next_token()
    tokens.append(int(generator.get_next_tokens()[0]))
print(json.dumps(tokens))
"""
"""Script for the other interpreter."""


@click.command()
@click.argument("model", required=False)
@click.option("--genai-python", help="Interpreter with onnxruntime-genai.")
@click.option("--dtype", type=click.Choice(["fp16", "fp32"]), default="fp32", show_default=True)
@click.option("--opset", type=int, default=18, show_default=True)
@click.option("-n", "num_new", type=int, default=32, show_default=True, help="Tokens to generate.")
def onnx_forms(model: str | None, genai_python: str | None, dtype: str, opset: int, num_new: int) -> None:
    """Compare a random decoder, and MODEL if one is given."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoints = [(random_checkpoint(folder / "random"), np.random.default_rng(5).integers(0, 59, 40).tolist())]
        if model is not None:
            checkpoint, _ = find_checkpoint(model, lambda what, done, total: None)
            checkpoints.append((checkpoint, PROMPT))
        agree = [
            compare(checkpoint, prompt, folder / str(index), genai_python, dtype, opset, num_new)
            for index, (checkpoint, prompt) in enumerate(checkpoints)
        ]
    sys.exit(0 if all(agree) else 1)


def random_checkpoint(folder: Path) -> Path:
    """Return a tiny Llama whose heads have as many dimensions as GenAI's attention rotates."""
    config = {**CONFIG, "head_dim": 16, "max_position_embeddings": 128, "eos_token_id": 60, "model_type": "llama"}
    source = RandomCheckpoint(config)
    folder.mkdir()
    save_file({name: source.read(name) for name in source.names()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def compare(
    checkpoint: Path,
    prompt: str | list[int],
    folder: Path,
    genai_python: str | None,
    dtype: str,
    opset: int,
    num_new: int,
) -> bool:
    """Print the generated tokens of each form, and return True if all are equal."""
    folder.mkdir()
    planned = plan_checkpoint(checkpoint, {})
    with chunkrt.load(checkpoint, npu="onnxrt", scheme="float", cache_dtype="float32") as engine:
        session = engine.session()
        session.prefill(prompt)
        prompt_ids = list(session.tokens)
        tokens = {"chunkrt": [piece.token_id for piece in session.generate(max_new_tokens=num_new)]}
    tokens["window"] = generate_by_window(planned, prompt_ids, folder, dtype, opset, num_new)
    if genai_python is not None:
        tokens["genai"] = generate_by_genai(planned, prompt_ids, folder / "genai", genai_python, dtype, opset, num_new)
    length = min(map(len, tokens.values()))  # some may end at an end token
    for runtime, generated in tokens.items():
        is_same = generated[:length] == tokens["chunkrt"][:length]
        verdict = "the same" if is_same else f"others: {generated[:length]}, not {tokens['chunkrt'][:length]}"
        click.echo(f"{checkpoint.name}, {dtype}, opset {opset}: {runtime}'s {length} tokens are {verdict}")
    return all(generated[:length] == tokens["chunkrt"][:length] for generated in tokens.values())


def generate_by_window(
    planned: Planned, prompt_ids: list[int], folder: Path, dtype: str, opset: int, num_new: int
) -> list[int]:
    """Generate with two fixed windows that share caches."""
    context = len(prompt_ids) + num_new + 32
    paths = [folder / f"window_{window}.onnx" for window in (32, 1)]
    for path, window in zip(paths, (32, 1), strict=True):
        settings = WindowSettings(window=window, sequence=context, context=context, dtype=dtype, opset=opset)
        save_model(window_model(planned, settings), path, external_data=True)
    return list(OnnxSession(*paths).generate(prompt_ids, num_new))


def generate_by_genai(
    planned: Planned, prompt_ids: list[int], folder: Path, python: str, dtype: str, opset: int, num_new: int
) -> list[int]:
    """Generate with ONNX Runtime GenAI, in another interpreter."""
    settings = DynamicSettings(context=planned.plan.context_length, dtype=dtype, opset=opset)
    save_model(dynamic_model(planned, settings), folder / "model.onnx", external_data=True)
    write_beside(folder, genai_config(planned, settings, "model.onnx"))
    call = json.dumps([str(folder), num_new, *prompt_ids])
    done = subprocess.run([python, "-c", GENAI, call], check=True, capture_output=True, text=True)
    generated: list[int] = json.loads(done.stdout.splitlines()[-1])
    return generated


if __name__ == "__main__":
    onnx_forms()
