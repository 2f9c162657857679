"""A contender's process: `python -m peers.worker ENGINE MODEL THREADS CONTEXT OPTIONS`.

It first prints a description of itself, then answers a line of JSON for each line of JSON:

    {"do": "prefill" or "decode", "tokens": [...]}   ->   {"seconds": 0.123}
    {"do": "next", "tokens": [...]}                  ->   {"token": 42}, the most likely one after these
    {"do": "serve", "prompts": [[...], ...], "arrivals": [0.0, ...], "new_tokens": 64}
                                                     ->   {"answers": [{"tokens": [...], "times": [...]}, ...]}
    {"do": "score", "pairs": [[[...], [...]], ...]}  ->   {"scores": [...], "rows": 1, "padded": 1, "seconds": 0.123}

After a failure it answers {"error": "a line"} and continues.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any


def main() -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # output of the runtimes goes to the log
    engine, model, threads, context_length, options = sys.argv[1:]
    try:
        module = import_module(f"peers.engines.{engine}")
        runner = module.Runner(Path(model), int(threads), int(context_length), json.loads(options))
        print(json.dumps({"versions": module.versions(), "settings": runner.settings}), file=answers)
    except Exception as error:
        print(json.dumps({"error": describe(error)}), file=answers)
        return
    for line in sys.stdin:
        try:
            request = json.loads(line)
            answer = {"serve": serve, "score": score}.get(request["do"], carry_out)(runner, **request)
        except Exception as error:
            answer = {"error": describe(error)}
        print(json.dumps(answer), file=answers)


def carry_out(runner: Any, do: str, tokens: list[int]) -> dict[str, Any]:
    """Answer one request; only the pass itself is timed."""
    runner.reset(len(tokens))
    if do == "next":
        runner.prefill(tokens)
        return {"token": runner.next_token()}
    run = {"prefill": runner.prefill, "decode": runner.decode}[do]
    begin = time.perf_counter()
    run(tokens)
    return {"seconds": time.perf_counter() - begin}


def serve(runner: Any, do: str, prompts: list[list[int]], arrivals: list[float], new_tokens: int) -> dict[str, Any]:
    """Answer many prompts at once; every answer has all of its tokens."""
    answers = runner.serve(prompts, arrivals, new_tokens)
    if short := [len(answer.tokens) for answer in answers if len(answer.tokens) != new_tokens]:
        raise RuntimeError(f"{short[0]} tokens were generated, expected {new_tokens}")
    return {"answers": [vars(answer) for answer in answers]}


def score(runner: Any, do: str, pairs: list[tuple[list[int], list[int]]]) -> dict[str, Any]:
    """Score continuations after contexts."""
    begin = time.perf_counter()
    scores, num_rows, num_padded = runner.score(pairs)
    seconds = time.perf_counter() - begin
    return {"scores": scores, "rows": num_rows, "padded": num_padded, "seconds": seconds}


def describe(error: Exception) -> str:
    """Return an error in a line; the log has the rest."""
    traceback.print_exc()
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


if __name__ == "__main__":
    main()
