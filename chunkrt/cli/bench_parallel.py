"""`chunkrt bench --parallel`: sequences that prefill and decode at the same time, in llama-batched-bench's terms."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from chunkrt.cli.bench_tests import BenchSetup, deviation, repeat, setup_of
from chunkrt.engine.engine import Engine
from chunkrt.engine.session import Session
from chunkrt.runtime.record import RunRecord

MOST_SEQUENCES = 4096


@dataclass(frozen=True, kw_only=True)
class ParallelRow(BenchSetup):
    """One test: `pl` sequences prefill a prompt of `pp` tokens each, then decode `tg` tokens each.

    Fields have the names of llama-batched-bench's JSON lines (`pl` is column B of its table). All are means over the
    repetitions, except the last ones.

    Attributes:
        n_kv: number of tokens of all sequences.
        t_pp, t_tg, t: seconds until the last prompt is complete, from then until the last token, and their sum.
        speed_pp, speed_tg, speed: tokens of all sequences per second; 0 without tokens.
        stddev_pp, stddev_tg, stddev: standard deviations of the speeds.
        samples_pp_ns, samples_tg_ns: times of each repetition.
    """

    pp: int
    tg: int
    pl: int
    n_kv: int
    t_pp: float
    speed_pp: float
    stddev_pp: float
    t_tg: float
    speed_tg: float
    stddev_tg: float
    t: float
    speed: float
    stddev: float
    samples_pp_ns: list[int]
    samples_tg_ns: list[int]

    def cells(self) -> dict[str, str]:
        """Return the columns of llama-batched-bench's table, after the columns of `BenchSetup`."""
        return super().cells() | {
            "PP": str(self.pp),
            "TG": str(self.tg),
            "B": str(self.pl),
            "N_KV": str(self.n_kv),
            "T_PP s": f"{self.t_pp:.3f}",
            "S_PP t/s": f"{self.speed_pp:.2f} ± {self.stddev_pp:.2f}",
            "T_TG s": f"{self.t_tg:.3f}",
            "S_TG t/s": f"{self.speed_tg:.2f} ± {self.stddev_tg:.2f}",
            "T s": f"{self.t:.3f}",
            "S t/s": f"{self.speed:.2f} ± {self.stddev:.2f}",
        }


def measure_parallel(
    num_sequences: int,
    prompt_length: int,
    new_tokens: int,
    engine: Engine,
    model: str,
    repetitions: int,
    records: list[RunRecord] | None,
) -> ParallelRow:
    """Run one test `repetitions` times, after one warm-up run; append the last run's records to `records`.

    Raises:
        BusyError: the caches have no room for this number of sequences.
    """
    shape = num_sequences, prompt_length + new_tokens
    tokens = np.random.default_rng(0).integers(0, engine.plan.vocab_size, shape)
    prompts, continuations = tokens[:, :prompt_length].tolist(), tokens[:, prompt_length:].tolist()
    ran: list[RunRecord] = []
    with ExitStack() as stack:
        sessions = [stack.enter_context(engine.session()) for _ in range(num_sequences)]

        def run() -> tuple[int, int]:
            ran.clear()
            for session in sessions:
                session.rewind(0)
                session.on_run = ran.append
            return asyncio.run(_answer_all(sessions, prompts, continuations))

        samples = repeat(repetitions, run)
    if records is not None:
        records += sorted(ran, key=lambda record: record.start_ns)
    prefills, decodes = ([ns / 1e9 for ns in phase] for phase in zip(*samples, strict=True))
    both = [prefill + decode for prefill, decode in zip(prefills, decodes, strict=True)]
    return ParallelRow(
        **setup_of(engine, model),
        pp=prompt_length,
        tg=new_tokens,
        pl=num_sequences,
        n_kv=tokens.size,
        **_figures("_pp", num_sequences * prompt_length, prefills),
        **_figures("_tg", num_sequences * new_tokens, decodes),
        **_figures("", tokens.size, both),
        samples_pp_ns=[prefill_ns for prefill_ns, _ in samples],
        samples_tg_ns=[decode_ns for _, decode_ns in samples],
    )


def _figures(suffix: str, num_tokens: int, seconds: list[float]) -> dict[str, Any]:
    speeds = [num_tokens / each if num_tokens else 0.0 for each in seconds]
    return {
        f"t{suffix}": statistics.mean(seconds),
        f"speed{suffix}": statistics.mean(speeds),
        f"stddev{suffix}": deviation(speeds),
    }


async def _answer_all(
    sessions: list[Session], prompts: list[list[int]], continuations: list[list[int]]
) -> tuple[int, int]:
    """Return nanoseconds of all prompts, and of all decoding after them."""
    prefill_ns = await _nanoseconds(
        session.aprefill(prompt) for session, prompt in zip(sessions, prompts, strict=True) if prompt
    )
    return prefill_ns, await _nanoseconds(map(_decode, sessions, continuations))


async def _nanoseconds(work: Iterable[Awaitable[object]]) -> int:
    begin = time.perf_counter_ns()
    await asyncio.gather(*work)
    return time.perf_counter_ns() - begin


async def _decode(session: Session, tokens: list[int]) -> None:
    for token in tokens:
        await session.aprefill([token])
