"""Tests of `chunkrt bench`: prefill, decode, and both, after an optional context that is not timed."""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar

import numpy as np
import psutil

from chunkrt import __version__
from chunkrt.backends.native.cpu import cpu_info
from chunkrt.cli.bench_rows import BenchSetup, deviation, repeat, setup_of
from chunkrt.engine.engine import Engine
from chunkrt.engine_directory.figures import weight_bytes
from chunkrt.runtime.record import RunRecord
from chunkrt.runtime.trace.utilisation import utilisation

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
class TestRow(LlamaBench, BenchSetup):
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
) -> TestRow:
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
    busy = utilisation([event for record in ran for event in record.events], ran[0].pipeline.stages)
    has_npu = engine.npu_backend.concurrency is not None
    return TestRow(
        **setup_of(engine, model),
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
        npu_busy=busy.npu_busy if has_npu else None,
        cpu_busy=busy.cpu_busy,
        overlap=busy.overlap if has_npu else None,
    )


def _llama_bench(engine: Engine, model: str) -> dict[str, Any]:
    """Return the columns that are equal for all tests of an engine."""
    num_parameters = engine.manifest.num_parameters
    cache_type = _GGML_TYPES[engine.cache_dtype]
    return {
        "build_commit": f"chunkrt {__version__}",
        "build_number": 0,
        "cpu_info": cpu_info()["processor"],
        "gpu_info": "",
        "backends": engine.npu_backend.name,
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


def peak_memory_bytes() -> int:
    """Return the peak memory of this process, in bytes."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
