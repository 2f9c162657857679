"""chunkrt beside llama.cpp: prefill and decode of one model on the same cores, in one interleaved run.

    pip install chunkrt llama-cpp-python
    python bench/peers.py smollm2-135m-instruct --threads 2 --rounds 7

Every contender lives in a process of its own and measures when it is told to, one after another, round after round,
so that a noisy machine is noisy for all of them. Ratios are taken within a round and their median is reported.
llama.cpp's Q8_0, Q4_0 and F16 files are made from the checkpoint by llama.cpp itself.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

LLAMA_TYPES = {"Q8_0": 7, "Q4_0": 2, "F16": 1}
"""llama.cpp's `llama_ftype` numbers."""

PAUSE_S = 0.3
"""Between two measurements: longer than the idle threads of an OpenMP pool go on spinning."""


@click.command()
@click.argument("model")
@click.option("--threads", type=int, default=2, show_default=True)
@click.option("--rounds", type=int, default=7, show_default=True)
@click.option("--chunk", type=int, default=32, show_default=True, help="chunkrt's chunk length.")
@click.option("--json", "as_json", is_flag=True, help="Every sample, as JSON.")
def peers(model: str, threads: int, rounds: int, chunk: int, as_json: bool) -> None:
    """Measure MODEL (a catalogue name or a GGUF file) in chunkrt and in llama.cpp."""
    tests = ["pp128", "pp512", "tg32"]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = _checkpoint(model)
        files = {name: _requantize(checkpoint, name, Path(folder)) for name in LLAMA_TYPES}
        contenders = {"chunkrt": _start("chunkrt", str(checkpoint), threads, chunk)}
        contenders |= {f"llama.cpp {n}": _start("llama", str(file), threads, 0) for n, file in files.items()}
        rates: dict[str, dict[str, list[float]]] = {test: {name: [] for name in contenders} for test in tests}
        for round_index in range(rounds + 1):
            for test in tests:
                for name, process in contenders.items():
                    rate = _ask(process, test)
                    if round_index:  # the first round warms up
                        rates[test][name].append(rate)
                    time.sleep(PAUSE_S)
        for process in contenders.values():
            process.communicate()
    click.echo(json.dumps(rates) if as_json else _table(rates, threads, chunk, rounds))


def _checkpoint(model: str) -> Path:
    from chunkrt import catalogue

    return Path(model) if Path(model).exists() else catalogue.pull(catalogue.find(model))


def _requantize(checkpoint: Path, name: str, folder: Path) -> Path:
    import llama_cpp

    path = folder / f"{name}.gguf"
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.allow_requantize = LLAMA_TYPES[name], True
    llama_cpp.llama_log_set(_silent_log(), None)
    if llama_cpp.llama_model_quantize(str(checkpoint).encode(), str(path).encode(), parameters):
        raise click.ClickException(f"llama.cpp cannot make {name} from {checkpoint}")
    return path


def _silent_log() -> Any:
    import llama_cpp

    _silent_log.keep = llama_cpp.llama_log_callback(lambda level, text, data: None)  # type: ignore[attr-defined]
    return _silent_log.keep  # type: ignore[attr-defined]


def _start(kind: str, path: str, threads: int, chunk: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--serve", kind, path, str(threads), str(chunk)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _ask(process: subprocess.Popen[str], test: str) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(test + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise click.ClickException(f"a contender ended with status {process.wait()} during {test}")
    return float(answer)


def _table(rates: dict[str, dict[str, list[float]]], threads: int, chunk: int, rounds: int) -> str:
    lines = [
        f"{_processor()}, {threads} threads, {rounds} rounds, chunk {chunk}; tokens/s, median (min - max);",
        "ratio: chunkrt's rate over the peer's in the same round, median",
        "",
        "| test | contender | tokens/s | ratio |",
        "| --- | --- | ---: | ---: |",
    ]
    for test, by_name in rates.items():
        for name, samples in by_name.items():
            ratio = statistics.median(a / b for a, b in zip(by_name["chunkrt"], samples, strict=True))
            spread = f"{statistics.median(samples):.0f} ({min(samples):.0f} - {max(samples):.0f})"
            lines.append(f"| {test} | {name} | {spread} | {ratio:.2f} |")
    return "\n".join(lines)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.processor()


def serve(kind: str, path: str, threads: int, chunk: int) -> None:
    """A contender's process: reads tests from stdin, writes tokens per second to stdout."""
    measure = {"chunkrt": _chunkrt, "llama": _llama}[kind](path, threads, chunk)
    for line in sys.stdin:
        test = line.strip()
        count = int(test[2:])
        begin = time.perf_counter()
        measure(test[:2], count)
        print(count / (time.perf_counter() - begin), flush=True)


def _chunkrt(path: str, threads: int, chunk: int) -> Any:
    import chunkrt

    engine = chunkrt.load(path, threads=threads, chunk_length=chunk)
    session = engine.session()

    def measure(kind: str, count: int) -> None:
        session.rewind(0)
        for tokens in [range(count)] if kind == "pp" else [[token] for token in range(count)]:
            session.prefill(tokens)

    return measure


def _llama(path: str, threads: int, _: int) -> Any:
    import llama_cpp

    model = llama_cpp.Llama(
        path, n_ctx=1024, n_batch=512, n_ubatch=512, n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def measure(kind: str, count: int) -> None:
        context = model.ctx  # the model must outlive it
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        for tokens in [range(count)] if kind == "pp" else [[token] for token in range(count)]:
            array = (llama_cpp.llama_token * len(tokens))(*tokens)
            assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(tokens))) == 0
            llama_cpp.llama_synchronize(context)

    return measure


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    else:
        peers()
