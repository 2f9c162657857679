"""Perplexity of a Llama whose attention slides over a text, with and without first tokens that stay in sight.

    python bench/npu_sinks.py smollm2-135m-instruct wikitext-2-valid.txt --windows 512,1024 --sinks 0,4

The model is computed in float64 by the reference of the tests, with the mask of `--npu-sinks`. Tokens are counted from
the longest window on, where the masks differ.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.engine.resolve import find_checkpoint
from chunkrt.tokenizer import Tokenizer

sys.path.append(str(Path(__file__).parent.parent / "tests" / "support"))
from float64_llama import float64_logits, sliding_mask


@click.command()
@click.argument("model")
@click.argument("text", type=click.Path(path_type=Path, exists=True))
@click.option("--windows", default="512,1024", show_default=True, help="Lengths of the window, separated by commas.")
@click.option("--sinks", default="0,4", show_default=True, help="Numbers of first tokens, separated by commas.")
@click.option("--tokens", "num_tokens", type=int, default=2048, show_default=True, help="Tokens of each part.")
@click.option("--parts", type=int, default=2, show_default=True, help="Parts of the text.")
def npu_sinks(model: str, text: Path, windows: str, sinks: str, num_tokens: int, parts: int) -> None:
    """Print the perplexity of MODEL on TEXT for each window and each number of first tokens."""
    checkpoint, _ = find_checkpoint(model, lambda what, done, total: None)
    planned = plan_checkpoint(checkpoint, {})
    tokenizer = Tokenizer.from_source(planned.source)
    assert tokenizer is not None, "the checkpoint has no tokenizer"
    tensors = planned.plan.tensors.values()
    weights = {t.name: planned.load(t.name).astype(np.float64) for t in tensors if t.kind == "weight"}
    config = planned.source.config
    lengths, numbers = ([int(part) for part in given.split(",")] for given in (windows, sinks))
    content = text.read_text(encoding="utf-8")
    step = len(content) // parts
    starts = [content[step * part : step * part + 8 * num_tokens] for part in range(parts)]
    pieces = [tokenizer.encode(start, add_special=True)[:num_tokens] for start in starts]
    click.echo(f"{parts} parts of {num_tokens} tokens, tokens from {max(lengths)} on")
    for window in (None, *lengths):
        for kept in numbers if window else (0,):
            losses = [
                _losses(
                    float64_logits(
                        config, weights, piece, None if window is None else sliding_mask(len(piece), window, kept)
                    ),
                    piece,
                    max(lengths),
                )
                for piece in pieces
            ]
            what = "all positions" if window is None else f"window {window}, sinks {kept}"
            click.echo(f"{what}: perplexity {np.exp(np.mean(losses)):.2f}")


def _losses(logits: NDArray[np.float64], tokens: list[int], first: int) -> NDArray[np.float64]:
    """Return the losses of the tokens after the `first` ones."""
    rows = logits[first - 1 : -1]
    shifted = rows - rows.max(axis=-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    found: NDArray[np.float64] = -logs[np.arange(len(rows)), tokens[first:]]
    return found


if __name__ == "__main__":
    npu_sinks()
