"""Tests of `chunkrt bench`, and the rows of their results: set-up columns, repetitions, and output formats.

The tests of `--parallel` run sequences that prefill and decode at the same time, in llama-batched-bench's terms.
"""

from __future__ import annotations

import asyncio
import csv
import io
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from chunkrt import __version__
from chunkrt.backends.native.cpu import cpu_info
from chunkrt.engine.engine import Engine
from chunkrt.engine.peak_memory import peak_memory_bytes
from chunkrt.engine.sampling import SamplingOptions
from chunkrt.engine.session import Session
from chunkrt.engine_directory.figures import weight_bytes
from chunkrt.runtime.policy import find_policy
from chunkrt.runtime.record import Origin, RunRecord, origin_of
from chunkrt.runtime.trace.utilisation import utilisation

Sample = TypeVar("Sample")
WIDTH = 80
"""Widest Markdown table."""


@dataclass(frozen=True, kw_only=True)
class BenchSetup:
    """Columns that describe the model and its settings in every row.

    Attributes:
        origin: "emulated" if an emulated NPU took part, else "measured".
    """

    model: str
    backend: str
    scheme: str
    chunk: int
    policy: str
    threads: int
    affinity: str
    attention_math: str
    origin: Origin

    TEXTS: ClassVar[tuple[str, ...]] = ("model", "backend", "scheme", "chunk", "policy", "threads")
    """Left-aligned columns of the Markdown table."""

    def cells(self) -> dict[str, str]:
        """Return the cells of the Markdown table by header."""
        texts = {name: str(getattr(self, name)) for name in self.TEXTS}
        return texts | {"model": Path(self.model).name if Path(self.model).exists() else self.model}


def setup_of(engine: Engine, model: str, records: Sequence[RunRecord]) -> dict[str, Any]:
    """Return the fields of `BenchSetup` for a test with these records."""
    return {
        "model": model,
        "backend": engine.loaded.npu_backend.name,
        "scheme": engine.scheme.name,
        "chunk": engine.chunk_length,
        "policy": find_policy(engine.options.policy).name,
        "threads": engine.options.num_threads,
        "affinity": engine.options.affinity,
        "attention_math": engine.attention_math,
        "origin": origin_of(records),
    }


def repeat(repetitions: int, run: Callable[[], Sample]) -> list[Sample]:
    """Return the results of `repetitions` runs, after one warm-up run."""
    return [run() for _ in range(repetitions + 1)][1:]


def deviation(speeds: Sequence[float]) -> float:
    """Return the standard deviation; 0 for a single value."""
    return statistics.stdev(speeds) if len(speeds) > 1 else 0.0


def _markdown(rows: Sequence[BenchSetup]) -> str:
    """Return a Markdown table; if it is too wide, columns with one value are moved to a line above it."""
    heads = list(rows[0].cells())
    table = [[row.cells().get(head, "-") for head in heads] for row in rows]
    texts = set(rows[0].TEXTS)
    common = [head for i, head in enumerate(heads) if head in texts and len({cells[i] for cells in table}) == 1]
    common = [head for head in common if head not in ("test", heads[-1])]
    text = _table(heads, table, texts)
    if len(text.partition("\n")[0]) <= WIDTH or not common:
        return text
    shown = [i for i, head in enumerate(heads) if head not in common]
    above = ", ".join(f"{head} {table[0][heads.index(head)]}" for head in common)
    return f"{above}\n\n" + _table([heads[i] for i in shown], [[cells[i] for i in shown] for cells in table], texts)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], texts: set[str]) -> str:
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    rule = ["-" * max(w, 3) if h in texts else "-" * max(w - 1, 3) + ":" for h, w in zip(heads, widths, strict=True)]
    align = [str.ljust if head in texts else str.rjust for head in heads]
    lines = [
        [put(cell, width) for put, cell, width in zip(align, line, widths, strict=True)]
        for line in (heads, rule, *rows)
    ]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _json(rows: Sequence[BenchSetup]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=1) + "\n"


def _json_lines(rows: Sequence[BenchSetup]) -> str:
    return "".join(json.dumps(asdict(row)) + "\n" for row in rows)


def _csv(rows: Sequence[BenchSetup]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(rows[0])], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        cells = asdict(row).items()
        writer.writerow({name: " ".join(map(str, x)) if isinstance(x, list) else x for name, x in cells})
    return text.getvalue()


def _sql(rows: Sequence[BenchSetup]) -> str:
    """Return SQL that creates llama-bench's table and inserts the rows; lists become text."""
    columns = [(f.name, getattr(rows[0], f.name)) for f in fields(rows[0])]
    kinds = {bool: "INTEGER", int: "INTEGER", float: "REAL"}
    declared = ",\n".join(f"  {name} {kinds.get(type(value), 'TEXT')}" for name, value in columns)
    names = ", ".join(name for name, _ in columns)
    lines = [f"CREATE TABLE IF NOT EXISTS llama_bench (\n{declared}\n);\n"]
    lines += [
        f"INSERT INTO llama_bench ({names}) VALUES ({', '.join(map(_literal, asdict(row).values()))});\n"
        for row in rows
    ]
    return "\n".join(lines)


def _literal(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, int | float):
        return str(int(value) if isinstance(value, bool) else value)
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return "'" + text.replace("'", "''") + "'"


FORMATS: dict[str, Callable[[Sequence[BenchSetup]], str]] = {
    "md": _markdown,
    "json": _json,
    "jsonl": _json_lines,
    "csv": _csv,
    "sql": _sql,
}

_GGML_TYPES = {"float32": "f32", "float16": "f16", "int8": "q8_0", "bfloat16": "bf16"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A prompt of `n_prompt` tokens, then `n_gen` decoded tokens, after `n_depth` tokens that are not timed."""

    n_prompt: int = 0
    n_gen: int = 0
    n_depth: int = 0

    @property
    def name(self) -> str:
        """Name in llama-bench's notation: pp512, tg32 @ d128, pp512+tg128."""
        parts = [f"{kind}{number}" for kind, number in (("pp", self.n_prompt), ("tg", self.n_gen)) if number]
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the session at the end."""
        return self.n_prompt + self.n_gen + self.n_depth


@dataclass(frozen=True, kw_only=True)
class LlamaBench:
    """llama-bench's columns, with its names and types, so that tools for its rows read these.

    Columns without a counterpart in chunkrt hold llama.cpp's default.

    Attributes:
        model_size: bytes of the weights as stored.
        n_batch, n_ubatch: tokens per chunk.
        avg_ts, stddev_ts: mean and standard deviation of tokens per second.
        samples_ns, samples_ts: time and rate of each repetition.
    """

    build_commit: str
    build_number: int
    cpu_info: str
    gpu_info: str
    backends: str
    model_filename: str
    model_type: str
    model_size: int
    model_n_params: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    cpu_mask: str
    cpu_strict: bool
    poll: int
    type_k: str
    type_v: str
    n_gpu_layers: int
    split_mode: str
    main_gpu: int
    no_kv_offload: bool
    flash_attn: bool
    devices: str
    tensor_split: str
    tensor_buft_overrides: str
    use_mmap: bool
    embeddings: bool
    no_op_offload: int
    n_prompt: int
    n_gen: int
    n_depth: int
    test_time: str
    avg_ns: int
    stddev_ns: int
    avg_ts: float
    stddev_ts: float
    samples_ns: list[int]
    samples_ts: list[float]


@dataclass(frozen=True, kw_only=True)
class BenchRow(LlamaBench, BenchSetup):
    """Result of one test.

    Attributes:
        ttft_ms: mean time to first token; None without a prompt.
        peak_memory_bytes: peak memory of this process so far.
        cpu_busy, npu_busy, overlap: shares of the last repetition; the last two are None without an NPU.
    """

    test: str
    ttft_ms: float | None
    peak_memory_bytes: int
    npu_busy: float | None
    cpu_busy: float
    overlap: float | None

    TEXTS: ClassVar[tuple[str, ...]] = ("model", "backend", "scheme", "threads", "test")

    def cells(self) -> dict[str, str]:
        """Return cells for speed, time to first token, memory and, with an NPU, its busy share."""
        cells = super().cells() | {
            "t/s": f"{self.avg_ts:.2f} ± {self.stddev_ts:.2f}",
            "ttft ms": "-" if self.ttft_ms is None else f"{self.ttft_ms:.0f}",
        }
        if self.npu_busy is not None and self.overlap is not None:
            cells |= {"npu": f"{self.npu_busy:.0%}", "overlap": f"{self.overlap:.0%}"}
        return cells


def measure(
    test: Case,
    engine: Engine,
    model: str,
    repetitions: int,
    records: list[RunRecord] | None,
    prompt: list[int] | None = None,
) -> BenchRow:
    """Run a test `repetitions` times, after one warm-up run; append the last run's records to `records`.

    Args:
        prompt: tokens to use instead of random ones, at least as many as the test needs.
    """
    tokens = prompt or np.random.default_rng(0).integers(0, engine.plan.vocab_size, test.num_tokens).tolist()
    before, asked = tokens[: test.n_depth], tokens[test.n_depth : test.num_tokens]
    ran: list[RunRecord] = []
    with engine.session() as session:
        session.on_run = ran.append

        def once() -> tuple[int, int]:
            session.rewind(0)
            if before:
                session.prefill(before)
            ran.clear()
            begin = time.perf_counter_ns()
            if test.n_prompt:
                session.prefill(asked[: test.n_prompt])
            first = time.perf_counter_ns()
            for token in asked[test.n_prompt :]:
                session.prefill([token])
            return first - begin, time.perf_counter_ns() - begin

        samples = repeat(repetitions, once)
    if records is not None:
        records += ran
    samples_ns = [whole for _, whole in samples]
    rates = [(test.n_prompt + test.n_gen) / (ns / 1e9) for ns in samples_ns]
    busy = utilisation(ran)
    has_npu = engine.loaded.npu_backend.concurrency is not None
    return BenchRow(
        **setup_of(engine, model, ran),
        **_llama_bench(engine, model),
        test=test.name,
        **asdict(test),
        test_time=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        avg_ns=round(statistics.mean(samples_ns)),
        stddev_ns=round(deviation(samples_ns)),
        avg_ts=statistics.mean(rates),
        stddev_ts=deviation(rates),
        samples_ns=samples_ns,
        samples_ts=rates,
        ttft_ms=statistics.mean(ns for ns, _ in samples) / 1e6 if test.n_prompt else None,
        peak_memory_bytes=peak_memory_bytes(),
        npu_busy=busy["npu_busy"] if has_npu else None,
        cpu_busy=busy["cpu_busy"],
        overlap=busy["overlap"] if has_npu else None,
    )


def _llama_bench(engine: Engine, model: str) -> dict[str, Any]:
    """Return the columns that are equal for all tests of an engine."""
    num_parameters = engine.loaded.manifest.num_parameters
    cache_type = _GGML_TYPES[engine.cache_dtype]
    return {
        "build_commit": f"chunkrt {__version__}",
        "build_number": 0,
        "cpu_info": cpu_info()["processor"],
        "gpu_info": "",
        "backends": engine.loaded.npu_backend.name,
        "model_filename": model,
        "model_type": f"{engine.plan.family} {num_parameters / 1e6:.0f}M {engine.scheme.name}",
        "model_size": sum(weight_bytes(engine.plan, engine.scheme).values()),
        "model_n_params": num_parameters,
        "n_batch": engine.chunk_length,
        "n_ubatch": engine.chunk_length,
        "n_threads": engine.options.num_threads,
        "cpu_mask": "0x0",
        "cpu_strict": False,
        "poll": 0,
        "type_k": cache_type,
        "type_v": cache_type,
        "n_gpu_layers": 0,
        "split_mode": "layer",
        "main_gpu": 0,
        "no_kv_offload": False,
        "flash_attn": True,
        "devices": "auto",
        "tensor_split": "0.00",
        "tensor_buft_overrides": "none",
        "use_mmap": True,
        "embeddings": False,
        "no_op_offload": 0,
    }


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
    shape = num_sequences, max(prompt_length, 1)
    prompts = np.random.default_rng(0).integers(0, engine.plan.vocab_size, shape).tolist()
    num_prefilled = num_sequences * prompt_length
    ran: list[RunRecord] = []
    with ExitStack() as stack:
        sessions = [stack.enter_context(engine.session()) for _ in range(num_sequences)]

        def run() -> tuple[int, int]:
            ran.clear()
            for session in sessions:
                session.rewind(0)
                session.on_run = ran.append
            return asyncio.run(_answer_all(sessions, prompts, prompt_length, new_tokens))

        samples = repeat(repetitions, run)
    if records is not None:
        records += sorted(ran, key=lambda record: record.start_ns)
    prefills, decodes = ([ns / 1e9 for ns in phase] for phase in zip(*samples, strict=True))
    both = [prefill + decode for prefill, decode in zip(prefills, decodes, strict=True)]
    return ParallelRow(
        **setup_of(engine, model, ran),
        pp=prompt_length,
        tg=new_tokens,
        pl=num_sequences,
        n_kv=num_prefilled + num_sequences * new_tokens,
        **_figures("_pp", num_prefilled, prefills),
        **_figures("_tg", num_sequences * new_tokens, decodes),
        **_figures("", num_prefilled + num_sequences * new_tokens, both),
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
    sessions: list[Session], prompts: list[list[int]], prompt_length: int, new_tokens: int
) -> tuple[int, int]:
    """Return nanoseconds of all prompts, and of all decoding after them."""
    pairs = list(zip(sessions, prompts, strict=True))
    prefill_ns = await _nanoseconds(session.aprefill(prompt) for session, prompt in pairs if prompt_length)
    return prefill_ns, await _nanoseconds(_decode(session, prompt[0], new_tokens) for session, prompt in pairs)


async def _nanoseconds(work: Iterable[Awaitable[object]]) -> int:
    begin = time.perf_counter_ns()
    await asyncio.gather(*work)
    return time.perf_counter_ns() - begin


async def _decode(session: Session, first: int, num_tokens: int) -> None:
    """Run a number of single tokens, the first of which is given if the session is empty."""
    if num_tokens and not session.position:
        await session.aprefill([first])
        num_tokens -= 1
    if num_tokens:  # the last generated token is not run
        async for _ in session.agenerate(max_new_tokens=num_tokens + 1, sampling=SamplingOptions(ignore_eos=True)):
            pass
