"""Perplexity of an exported window that slides over a text, with and without sink tokens.

    python bench/onnx_sinks.py smollm2-135m-instruct --sinks 0,4

The text is the one that chunkrt ships for calibration. Tokens are counted once the caches have filled up.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click
import numpy as np

from chunkrt.compile.calibrate import shipped_text
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.engine.resolve import find_checkpoint
from chunkrt.onnx.exporting import WindowSettings, save_model, window_model
from chunkrt.onnx.window_session import OnnxSession
from chunkrt.tokenizer import Tokenizer


@click.command()
@click.argument("model")
@click.option("--sinks", default="0,4", show_default=True, help="Numbers of sinks, separated by commas.")
@click.option("--context", type=int, default=256, show_default=True, help="Slots of the caches.")
@click.option("--window", type=int, default=32, show_default=True)
@click.option("--tokens", "num_tokens", type=int, default=1024, show_default=True)
def onnx_sinks(model: str, sinks: str, context: int, window: int, num_tokens: int) -> None:
    """Print the perplexity of MODEL for each number of sinks."""
    checkpoint, _ = find_checkpoint(model, lambda what, done, total: None)
    planned = plan_checkpoint(checkpoint, {})
    tokenizer = Tokenizer.from_source(planned.source)
    assert tokenizer is not None, "the checkpoint has no tokenizer"
    tokens = tokenizer.encode(shipped_text(), add_special=True)[:num_tokens]
    longest = min(len(tokens), planned.plan.context_length)
    cases = [(context, int(number)) for number in sinks.split(",")] + [(-(-longest // window) * window, 0)]
    with tempfile.TemporaryDirectory() as folder:
        for slots, number in cases:
            path = Path(folder) / f"{slots}.{number}.onnx"
            settings = WindowSettings(window=window, sequence=slots, context=slots, sinks=number, dtype="fp32")
            save_model(window_model(planned, settings), path, external_data=True)
            value = perplexity(OnnxSession(path), tokens, window, context)
            click.echo(f"{slots} slots, {number} sinks, {len(tokens)} tokens: perplexity {value:.2f}")


def perplexity(session: OnnxSession, tokens: list[int], window: int, first: int) -> float:
    """Return the perplexity of the tokens after the `first` ones."""
    losses: list[float] = []
    for start in range(0, len(tokens) - window, window):
        logits = session.run(tokens[start : start + window]).astype(np.float64)
        shifted = logits - logits.max(axis=-1, keepdims=True)
        logs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        for row, token in enumerate(tokens[start + 1 : start + window + 1]):
            if start + row + 1 >= first:
                losses.append(-logs[row, token])
    return float(np.exp(np.mean(losses)))


if __name__ == "__main__":
    onnx_sinks()
