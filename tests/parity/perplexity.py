"""A real checkpoint's perplexity as Hugging Face Transformers computes it, on the windows of `chunkrt eval`.

    python perplexity.py cut MODEL TEXT WINDOWS.json       with chunkrt: the tokens of the windows that it evaluates
    python perplexity.py score FILE.gguf WINDOWS.json ...  with torch and transformers: their perplexity, in float32
    chunkrt eval MODEL --text TEXT --scheme float --base none --window 512 --windows 4     must report the same

Transformers reads the GGUF file itself: names, layout, dequantisation and arithmetic are not chunkrt's.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

ROWS = 64
"""Number of rows whose logits are in float64 at a time: the largest vocabularies need 2 MB for each."""


def main() -> None:
    """Cut windows or score them; figures go to stdout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    cutting = commands.add_parser("cut", help="write the windows of a text")
    cutting.add_argument("model", help="a name of the catalogue, or a path")
    cutting.add_argument("text", type=Path)
    cutting.add_argument("output", type=Path)
    cutting.add_argument("--window", type=int, default=512, help="tokens of a window, its beginning token included")
    cutting.add_argument("--windows", type=int, default=4, help="how many, spread over the text")
    scoring = commands.add_parser("score", help="print the perplexity of windows")
    scoring.add_argument("checkpoint", type=Path, help="a GGUF file")
    scoring.add_argument("windows", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "cut":
        windows = cut(arguments.model, arguments.text.read_text("utf-8"), arguments.window, arguments.windows)
        arguments.output.write_text(json.dumps(windows))
    else:
        score(arguments.checkpoint, arguments.windows)


def cut(model: str, text: str, length: int, number: int) -> list[list[int]]:
    """Return the windows that `chunkrt eval MODEL --text TEXT --window LENGTH --windows NUMBER` runs."""
    import chunkrt
    from chunkrt.evaluation.text import cut_windows, spread

    with chunkrt.load(model, npu="native", context_length=length) as engine:
        tokenizer = engine.tokenizer
        bos_id = tokenizer.settings.bos_id if tokenizer.settings.add_bos else None
        tokens = tokenizer.encode(text, add_special=False, parse_special=False)
    return spread(cut_windows(tokens, length, bos_id=bos_id), number)


def score(checkpoint: Path, files: list[Path]) -> None:
    """Print the perplexity of each file's windows, over all tokens except a window's first."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        checkpoint.parent, gguf_file=checkpoint.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for file in files:
        surprisals = []
        for window in json.loads(file.read_text()):
            tokens = torch.tensor(window)
            with torch.inference_mode():
                logits = model(tokens[None, :-1], use_cache=False).logits[0]
            for rows, following in zip(logits.split(ROWS), tokens[1:].split(ROWS), strict=True):
                found = -torch.log_softmax(rows.double(), dim=-1).gather(1, following[:, None])
                surprisals += found[:, 0].tolist()
        perplexity = math.exp(sum(surprisals) / len(surprisals))
        print(f"{file}: perplexity {perplexity:.6f} of {len(surprisals)} tokens")


if __name__ == "__main__":
    main()
