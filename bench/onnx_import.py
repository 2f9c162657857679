"""A checkpoint by way of ONNX: exported by two tools, imported, and compared with each export under ONNX Runtime.

    python bench/onnx_import.py SmolLM2-135M-Instruct.Q4_1.gguf --genai GENAI/bin/python --optimum OPTIMUM/bin/python

GENAI has onnxruntime-genai, torch, transformers, gguf and onnx_ir; OPTIMUM has optimum-onnx, torch, and the
transformers that it asks for. Both write into the folder that --folder names, once; a second run compares alone.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import click
import numpy as np
from numpy.typing import NDArray
from peers.process import convert

import chunkrt
from chunkrt.onnx_import.evaluation import open_session
from chunkrt.onnx_import.exact import without_rounding
from chunkrt.onnx_import.reading import read_proto

LENGTHS = (1, 31, 33, 95)
BUILDER = {"genai_fp32": {"precision": "fp32"}, "genai_int4": {"precision": "int4"}}
"""The builder's exports."""


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.option("--genai", required=True, help="Interpreter that has ONNX Runtime GenAI.")
@click.option("--optimum", required=True, help="Interpreter that has Optimum.")
@click.option("--folder", type=click.Path(path_type=Path), default="onnx-exports", show_default=True)
@click.option("--npu", default="onnxrt", show_default=True, help="Backend of the NPU's role.")
def onnx_import(checkpoint: Path, genai: str, optimum: str, folder: Path, npu: str) -> None:
    """Print, for each export of CHECKPOINT, how far its import is from it at several lengths."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "hugging_face"
    if not source.exists():
        convert("hugging_face", checkpoint, source, {}, python=genai)
    for name, options in BUILDER.items():
        if not (folder / name).exists():
            convert("onnx_genai", source, folder / name, options, python=genai)
    if not (folder / "optimum_fp32").exists():
        _export_by_optimum(source, folder / "optimum_fp32", optimum)
    click.echo("| export | import, s | logit, largest | " + " | ".join(f"T = {n}" for n in LENGTHS) + " |")
    click.echo("| --- |" + " ---: |" * (len(LENGTHS) + 2))
    for name in (*BUILDER, "optimum_fp32"):
        click.echo(f"| {name} | {_row(folder / name, npu)} |")


def _export_by_optimum(source: Path, target: Path, python: str) -> None:
    command = [python, "-m", "optimum.commands.optimum_cli", "export", "onnx", "--model", str(source)]
    try:
        subprocess.run([*command, "--task", "text-generation-with-past", str(target)], check=True)
    except subprocess.CalledProcessError as error:
        shutil.rmtree(target, ignore_errors=True)
        raise click.ClickException(f"Optimum failed: {error}") from error


def _row(folder: Path, npu: str) -> str:
    """Seconds to import, the largest logit, and the largest difference at each length."""
    start = perf_counter()
    with chunkrt.load(folder, scheme="float", npu=npu) as engine:
        seconds = perf_counter() - start
        tokens = np.random.default_rng(0).integers(0, engine.plan.vocab_size, max(LENGTHS))
        expected = _original(folder / "model.onnx", [tokens[:n] for n in LENGTHS], engine.plan.state_tensors[0].shape)
        found = [engine.session().prefill(tokens[:n].tolist(), logits="all").logits for n in LENGTHS]
    largest = max(float(np.abs(logits).max()) for logits in expected)
    differences = [f"{np.abs(a - b).max():.1e}" for a, b in zip(found, expected, strict=True)]
    return " | ".join([f"{seconds:.1f}", f"{largest:.1f}", *differences])


def _original(
    model: Path, prompts: Sequence[NDArray[np.int64]], cache: Sequence[int | str]
) -> list[NDArray[np.float32]]:
    """Logits [T, V] of prompts under ONNX Runtime, each in one run with empty caches [1, heads, 0, head_dim].

    Activations are floats where the export would round them to int8: of int4, the weights alone are compared.
    """
    session = open_session(without_rounding(read_proto(model)).SerializeToString(), model.parent)
    results = []
    for tokens in prompts:
        given = {"input_ids": tokens[None], "attention_mask": np.ones((1, tokens.size), np.int64)}
        given["position_ids"] = np.arange(tokens.size)[None]
        for value in session.get_inputs():
            if value.name.startswith("past"):
                given[value.name] = np.zeros((1, int(cache[0]), 0, int(cache[2])), np.float32)
        read = {value.name for value in session.get_inputs()}
        results.append(session.run(["logits"], {n: v for n, v in given.items() if n in read})[0][0])
    return results


if __name__ == "__main__":
    onnx_import()
