"""A model on this machine: duration of prefills, start, and peak memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np
from roofline_work import Work, tasks_of, work_of

import chunkrt
from chunkrt.engine.engine import Engine
from chunkrt.engine_directory.figures import weight_bytes
from chunkrt.runtime.state import State
from chunkrt.simulate.work import cut

PROMPT = "The capital of France is"
MEMORY_TOKENS = 512


class Prefills:
    """Prefills of several lengths on several numbers of threads.

    Args:
        model: see `chunkrt.load`.
        lengths: of prompts, in tokens.
        thread_counts: an engine is loaded for each.
        options: of the engines, in addition to threads.
    """

    def __init__(
        self, model: str, lengths: Sequence[int], thread_counts: Sequence[int], options: Mapping[str, Any]
    ) -> None:
        self._stack = ExitStack()
        self._engines = {
            threads: self._stack.enter_context(chunkrt.load(model, threads=threads, prefix_cache="off", **options))
            for threads in thread_counts
        }
        engine = self.engine
        if engine.scheme.weight_bits is None:
            raise click.ClickException(f"scheme {engine.scheme.name!r} has no integer products to compare with a peak")
        if too_long := [length for length in lengths if length > engine.context_length]:
            raise click.ClickException(f"{too_long[0]} tokens do not fit the context of {engine.context_length}")
        self.model, self.lengths, self.options = model, lengths, options
        self.samples: dict[tuple[int, int], list[float]] = {}
        """Seconds by (tokens, threads)."""
        self.works: dict[int, Work] = {}
        """By tokens."""

    @property
    def engine(self) -> Engine:
        """The engine with the fewest threads."""
        return self._engines[min(self._engines)]

    def measure(self, *, counts: bool) -> None:
        """Run one round: every prompt once on each number of threads."""
        for length in self.lengths:
            for threads, engine in self._engines.items():
                with engine.session() as session:
                    result = session.prefill(_tokens(engine, length))
                if counts:
                    self.samples.setdefault((length, threads), []).append(result.seconds)
                chunks = cut(length, engine.chunk_length)
                tasks = tasks_of(engine.plan, chunks)
                self.works[length] = work_of(engine.plan, engine.scheme, chunks, tasks)

    def close(self) -> None:
        """Release the engines."""
        self._stack.close()


def start_command(model: str, threads: int, options: Mapping[str, Any]) -> float:
    """Return the seconds from starting `chunkrt run` to the first byte of the answer."""
    settings = [f"--{name.removesuffix('_length')}={value}" for name, value in options.items()]
    program = [sys.executable, "-P", "-m", "chunkrt"]  # the installed one: a source folder has no native module
    command = [*program, "run", model, "--raw", "-p", PROMPT, "-n", "8", f"--threads={threads}"]
    start = perf_counter()
    with subprocess.Popen([*command, *settings], stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = perf_counter() - start
        _, errors = process.communicate()
    if not first or process.returncode:
        raise click.ClickException(f"chunkrt run ended with status {process.returncode}: {errors.decode().strip()}")
    return seconds


def start_fresh(model: str, threads: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of `_fresh` in a process of its own."""
    question = json.dumps({"model": model, "threads": threads, "options": dict(options)})
    done = subprocess.run([sys.executable, __file__, question], capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(f"a fresh process ended with status {done.returncode}: {done.stderr.strip()}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _fresh(model: str, threads: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the seconds from `load` to the first token, and bytes: before, at the peak after a longer prompt, weights,
    cache.
    """
    before = _peak_bytes()
    start = perf_counter()
    with chunkrt.load(model, threads=threads, prefix_cache="off", **options) as engine, engine.session() as session:
        session.prefill(PROMPT)
        next(session.generate(max_new_tokens=1))
        seconds = perf_counter() - start
        session.rewind(0)
        length = min(MEMORY_TOKENS, engine.context_length)
        session.prefill(_tokens(engine, length))
        state = State(engine.plan, length, engine.cache_dtype)
        return {
            "load_to_first_token_s": seconds,
            "before_bytes": before,
            "peak_bytes": _peak_bytes(),
            "weight_bytes": sum(weight_bytes(engine.plan, engine.scheme).values()),
            "cache_bytes": state.num_bytes,
            "tokens": length,
        }


def _peak_bytes() -> int | None:
    """Return the largest resident memory of this process, including mapped files; None if it is unknown."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)


def _tokens(engine: Engine, count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(0).integers(0, engine.plan.vocab_size, count).tolist()
    return tokens


if __name__ == "__main__":
    print(json.dumps(_fresh(**json.loads(sys.argv[1]))))
