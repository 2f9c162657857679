"""Time breakdown of a prefill and of a token: steps of the native programs, and the time outside of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from roofline_work import Peaks, Spread, step_bounds

from chunkrt._native import StepTimes
from chunkrt.backends.native.backend import NativeBackend
from chunkrt.engine.engine import Engine
from chunkrt.graph.plan import Plan
from chunkrt.graph.rewrites import merged_on_cpu
from chunkrt.pictures import COLOURS, plain, save_picture
from chunkrt.runtime.batcher import find_batcher
from chunkrt.runtime.executor import Executor, ExecutorSet
from chunkrt.runtime.policy import find_policy
from chunkrt.runtime.request import Request
from chunkrt.runtime.scheduler import Scheduler
from chunkrt.runtime.state import State
from chunkrt.runtime.tasks import Task, processors_for
from chunkrt.simulate.work import ChunkWork, cut

PROMPT_TOKENS, DECODED_TOKENS, DECODE_POSITION = 512, 16, 128

DECODE = "token"

PYTHON, IDLE = "Python in tasks", "executor, idle threads"
BESIDE_STEPS = ("between_steps", PYTHON, IDLE)
"""Parts outside all steps: in programs between steps (opening loops, waiting for other threads), in tasks outside of
programs, and outside of tasks.
"""

LEAST_SHARE_DRAWN, LEAST_SHARE_TOLD = 0.01, 3
"""Smallest share of a part with a colour of its own in some bar; and, in %, smallest share that is written on a bar."""

GREYS = ("#666666", "#a0a0a0", "#d9d9d9")
"""Colours of the time outside all steps."""


class Timed(NamedTuple):
    """Some runs: name; seconds from begin to end, in tasks, of callers in programs, and of all threads by step."""

    tasks: Sequence[Task]
    wall_s: float
    tasks_s: float
    callers_s: float
    steps_s: Mapping[str, float]

    def parts(self, threads: int) -> dict[str, float]:
        """Return seconds by part, each thread's share of it; together they are the time from begin to end."""
        helpers_s = sum(self.steps_s.values()) - self.callers_s
        thread_seconds = {
            **self.steps_s,
            PYTHON: self.tasks_s - self.callers_s,
            IDLE: threads * self.wall_s - self.tasks_s - helpers_s,
        }
        return {name: seconds / threads for name, seconds in thread_seconds.items()}


class _Clocked:
    """A plan's executor on a number of threads whose programs time their steps."""

    def __init__(self, engine: Engine, plan: Plan, chunk_length: int, threads: int) -> None:
        self._times = StepTimes()
        backend = NativeBackend(threads, engine.attention_math, times=self._times)
        executor = Executor(
            plan,
            {
                s.name: backend.compile(s, plan, chunk_length, engine.scheme, engine.loaded.weights)
                for s in plan.subgraphs
            },
            chunk_length=chunk_length,
            processors=processors_for(backend.concurrency, threads),
            policy=find_policy(engine.options.policy),
        )
        self._scheduler = Scheduler(ExecutorSet.of_one(executor), find_batcher(engine.options.batcher))

    def run(self, prompts: Sequence[Sequence[int]], state: State) -> Timed:
        """Run prompts one after the other."""
        self._times.take()
        tasks: list[Task] = []
        wall_ns = tasks_ns = 0
        for prompt in prompts:
            record = self._scheduler.run(Request(np.array(prompt, np.int64), state)).record
            wall_ns += record.end_ns - record.start_ns
            tasks += [event.task for event in record.events]
            tasks_ns += sum(event.end_ns - event.start_ns for event in record.events)
        callers_ns, steps_ns = self._times.take()
        steps_s = {name: ns / 1e9 for name, ns in steps_ns.items()}
        return Timed(tasks, wall_ns / 1e9, tasks_ns / 1e9, callers_ns / 1e9, steps_s)


class Parts:
    """Time breakdown of prompts and single tokens, on several numbers of threads.

    Args:
        engine: on the native backend.
        thread_counts: executors are created for each.
    """

    def __init__(self, engine: Engine, thread_counts: Sequence[int]) -> None:
        self._engine, self._merged = engine, merged_on_cpu(engine.plan)
        num_tokens = min(PROMPT_TOKENS, engine.context_length)
        self._position = min(DECODE_POSITION, num_tokens - DECODED_TOKENS)
        self._prefill = f"pp{num_tokens}"
        self._tokens = np.random.default_rng(0).integers(0, engine.plan.vocab_size, num_tokens).tolist()
        self._state = State(engine.plan, engine.context_length, engine.cache_dtype)
        self._clocked = {
            threads: (
                _Clocked(engine, engine.plan, engine.chunk_length, threads),
                _Clocked(engine, self._merged, 1, threads),
            )
            for threads in thread_counts
        }
        self._prompt_tasks: Sequence[Task] = []
        self.samples: dict[tuple[str, int], list[dict[str, float]]] = {}
        """For each round: seconds by part, of a prompt or of a token, by test and threads."""

    def measure(self, *, counts: bool) -> None:
        """Run one round."""
        prompt, singles = [self._tokens], [[token] for token in self._tokens[:DECODED_TOKENS]]
        for threads, (prompts, tokens) in self._clocked.items():
            self._state.rewind(0)
            prefill = prompts.run(prompt, self._state)
            self._state.rewind(0)
            prompts.run([self._tokens[: self._position]], self._state)
            decode = tokens.run(singles, self._state)
            self._prompt_tasks = prefill.tasks
            if counts:
                self._add(self._prefill, threads, prefill, 1)
                self._add(DECODE, threads, decode, DECODED_TOKENS)

    def _add(self, test: str, threads: int, timed: Timed, times: int) -> None:
        sample = {name: seconds / times for name, seconds in timed.parts(threads).items()}
        self.samples.setdefault((test, threads), []).append(sample)

    def bounds(self, test: str, peaks: Peaks) -> dict[str, float]:
        """Return the smallest possible seconds of the steps that have a peak; of tokens, for the one in the middle."""
        scheme, plan, merged = self._engine.scheme, self._engine.plan, self._merged
        if test == self._prefill:
            return step_bounds(
                plan, scheme, cut(len(self._tokens), self._engine.chunk_length), self._prompt_tasks, peaks
            )
        middle = ChunkWork(num_tokens=1, num_rows=1, position=self._position + DECODED_TOKENS // 2)
        return step_bounds(merged, scheme, [middle], [Task(i, 0) for i in range(len(merged.subgraphs))], peaks)


def part_rows(samples: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """Return for each part the spread of its seconds over the rounds, and its median's share of all medians.

    The steps come first, the slowest before the others; then the time outside of them.
    """
    names = {name for sample in samples for name in sample}
    spreads = {name: Spread.of([sample.get(name, 0.0) for sample in samples]) for name in names}
    whole = sum(spread.median for spread in spreads.values())
    steps = sorted(names.difference(BESIDE_STEPS), key=lambda name: (-spreads[name].median, name))
    return [
        {"part": name, "seconds": spreads[name]._asdict(), "share": spreads[name].median / whole}
        for name in (*steps, *(name for name in BESIDE_STEPS if name in names))
    ]


def draw_parts(bars: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw a bar for each test and number of threads, with stacked parts; small ones are combined.

    Args:
        bars: as in the report's "parts".

    Raises:
        ConfigError: see `chunkrt.pictures.save_picture`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 + 1.6 * len(bars), 6), layout="constrained")
    axes = figure.subplots()
    shares = [{row["part"]: row["share"] for row in bar["parts"]} for bar in bars]
    names = list(dict.fromkeys(name for of_bar in shares for name in of_bar))
    drawn = [name for name in names if any(of_bar.get(name, 0.0) >= LEAST_SHARE_DRAWN for of_bar in shares)]
    steps = [name for name in drawn if name not in BESIDE_STEPS]
    kinds = {name: [name] for name in steps} | {"others": [name for name in names if name not in drawn]}
    kinds |= {name: [name] for name in drawn if name in BESIDE_STEPS}
    colours = dict(zip(steps, cycle(COLOURS), strict=False)) | dict(zip(BESIDE_STEPS, GREYS, strict=True))
    ends = np.zeros(len(bars))
    for name, together in kinds.items():
        heights = np.array([100 * sum(of_bar.get(kind, 0.0) for kind in together) for of_bar in shares])
        drawing = axes.bar(
            range(len(bars)),
            heights,
            0.6,
            ends,
            color=colours.get(name, "white"),
            edgecolor="black",
            linewidth=0.3,
            hatch="///" if name in steps[len(COLOURS) :] else None,
            label=name,
        )
        told = [f"{height:.0f} %" if height >= LEAST_SHARE_TOLD else "" for height in heights]
        axes.bar_label(drawing, told, label_type="center", fontsize=8)
        ends += heights
    axes.set_xticks(range(len(bars)), [bar_name(bar) for bar in bars])
    axes.set_ylabel("share of the time, %")
    axes.set_ylim(0, 100)
    plain(axes)
    axes.grid(visible=False, axis="x")
    axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False, fontsize=9)
    figure.suptitle(title, x=0.01, ha="left")
    save_picture(figure, path)


def bar_name(bar: Mapping[str, Any]) -> str:
    """Return a label such as "pp512, 2 threads" and, below, its time."""
    seconds = sum(row["seconds"]["median"] for row in bar["parts"])
    threads = "1 thread" if bar["threads"] == 1 else f"{bar['threads']} threads"
    return f"{bar['test']}, {threads}\n{1e3 * seconds:.{0 if seconds >= 0.1 else 1}f} ms"
