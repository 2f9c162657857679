"""ONNX round trip of a checkpoint: exported by two tools, imported, and compared with each export under ONNX Runtime.

    python bench/onnx_import.py SmolLM2-135M-Instruct.Q4_1.gguf --genai GENAI/bin/python --optimum OPTIMUM/bin/python

GENAI has onnxruntime-genai, torch, transformers, gguf and onnx_ir; OPTIMUM has optimum-onnx, torch, and the
transformers that it requires. Both write into the folder that --folder names, once; later runs only compare.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from peers.process import convert

import chunkrt
from chunkrt.onnx.importing.import_check import original_session
from chunkrt.onnx.importing.reading import read_proto

LENGTHS = (1, 31, 33, 95)
BUILDER = {"genai_fp32": {"precision": "fp32"}, "genai_int4": {"precision": "int4"}}
"""Exports of GenAI's builder."""


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.option("--genai", required=True, help="Interpreter with ONNX Runtime GenAI.")
@click.option("--optimum", required=True, help="Interpreter with Optimum.")
@click.option("--folder", type=click.Path(path_type=Path), default="onnx-exports", show_default=True)
@click.option("--npu", default="onnxrt", show_default=True, help="Backend that serves as the NPU.")
def onnx_import(checkpoint: Path, genai: str, optimum: str, folder: Path, npu: str) -> None:
    """Print for each export of CHECKPOINT its import's distance at several lengths, and both distances from float64."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "hugging_face"
    if not source.exists():
        convert("hugging_face", checkpoint, source, {}, python=genai)
    _name_rope_theta(source)
    for name, options in BUILDER.items():
        if not (folder / name).exists():
            convert("onnx_genai", source, folder / name, options, python=genai)
    if not (folder / "optimum_fp32").exists():
        _export_by_optimum(source, folder / "optimum_fp32", optimum)
    truth = _truth(source, genai)
    lengths = " | ".join(f"T = {n}" for n in LENGTHS)
    click.echo(f"| export | import, s | CPU, s | logit, largest | largest difference | {lengths} |")
    click.echo("| --- | ---: | ---: | ---: | --- |" + " ---: |" * len(LENGTHS))
    for name in (*BUILDER, "optimum_fp32"):
        for cells in _rows(folder / name, npu, truth if name.endswith("fp32") else None):
            click.echo(f"| {cells} |")


def _export_by_optimum(source: Path, target: Path, python: str) -> None:
    command = [python, "-m", "optimum.commands.optimum_cli", "export", "onnx", "--model", str(source)]
    try:
        subprocess.run([*command, "--task", "text-generation-with-past", str(target)], check=True)
    except subprocess.CalledProcessError as error:
        shutil.rmtree(target, ignore_errors=True)
        raise click.ClickException(f"Optimum failed: {error}") from error


def _rows(folder: Path, npu: str, truth: NDArray[np.float64] | None) -> Iterator[str]:
    """Return the cells of an export's rows: import time, and the largest differences at each length.

    Args:
        truth: logits in float64; None if the export has other weights.
    """
    wall, cpu = perf_counter(), process_time()
    with chunkrt.load(folder, scheme="float", npu=npu) as engine:
        seconds = f"{perf_counter() - wall:.1f} | {process_time() - cpu:.1f}"
        tokens = _tokens(engine.plan.vocab_size)
        original = _original(folder / "model.onnx", [tokens[:n] for n in LENGTHS], engine.plan.state_tensors[0].shape)
        imported = [engine.session().prefill(tokens[:n].tolist(), logits="all").logits for n in LENGTHS]
    largest = max(float(np.abs(logits).max()) for logits in original)
    yield f"{folder.name} | {seconds} | {largest:.1f} | import from original | {_differences(imported, original)}"
    if truth is not None:
        exact = [truth[:n] for n in LENGTHS]
        yield f" | | | | original from float64 | {_differences(original, exact)}"
        yield f" | | | | import from float64 | {_differences(imported, exact)}"


def _differences(left: Sequence[NDArray[Any]], right: Sequence[NDArray[Any]]) -> str:
    return " | ".join(f"{np.abs(a - b).max():.1e}" for a, b in zip(left, right, strict=True))


def _tokens(vocab_size: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, vocab_size, max(LENGTHS))


def _truth(source: Path, python: str) -> NDArray[np.float64]:
    """Return logits [T, V] of the checkpoint in float64."""
    vocab_size = json.loads((source / "config.json").read_text("utf-8"))["vocab_size"]
    with TemporaryDirectory() as folder:
        tokens, logits = Path(folder, "tokens.npy"), Path(folder, "logits.npy")
        np.save(tokens, _tokens(vocab_size))
        program = Path(__file__).with_name("float64_logits.py")
        subprocess.run([python, str(program), str(source), str(tokens), str(logits)], check=True)
        found: NDArray[np.float64] = np.load(logits)
    return found


def _name_rope_theta(source: Path) -> None:
    """Store the rotary frequencies' base where Transformers 4 reads it, too; Optimum would use 10000 otherwise."""
    path = source / "config.json"
    config = json.loads(path.read_text("utf-8"))
    theta = config.get("rope_parameters", {}).get("rope_theta")
    if theta is not None and "rope_theta" not in config:
        path.write_text(json.dumps(config | {"rope_theta": theta}, indent=2) + "\n", encoding="utf-8")


def _original(
    model: Path, prompts: Sequence[NDArray[np.int64]], cache: Sequence[int | str]
) -> list[NDArray[np.float32]]:
    """Return logits [T, V] of prompts under ONNX Runtime, each in one run with empty caches [1, heads, 0, head_dim].

    Activations that the export would round to int8 stay floats: of int4 exports, only the weights are compared.
    """
    session = original_session(model, read_proto(model))
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
