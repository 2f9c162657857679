"""chunkrt compared with this machine's limits: its kernels, a complete prefill, start and memory.

    python bench/roofline.py smollm2-135m-instruct --rounds 5 --json roofline.json
    CHUNKRT_FORCE_ISA=avx2 python bench/roofline.py

Compiles bench/roofline/ with CMake (and $CXX, the first time) into build/roofline, and measures the processor's peaks
with loops on registers, its bandwidth with reads, and chunkrt's kernels. With a MODEL, prefills follow. Everything is
measured once a round, round after round: peaks are the best of all samples, the rest medians (least - most). On all
cores every thread computes a product of its own with the same weights, like workers with chunks in flight.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import click
from roofline_machine import USUAL_CACHES, Machine, Probe, build_probe, caches, ring_bytes_for
from roofline_parts import Parts, draw_parts, part_rows
from roofline_prefill import Prefills, start_command, start_fresh
from roofline_tables import markdown
from roofline_work import Bounds, Peaks, Spread

from chunkrt.backends.native.cpu import cpu_info
from chunkrt.engine.options import available_cores
from chunkrt.errors import ChunkrtError, ConfigError
from chunkrt.pictures import check_picture
from chunkrt.quant.scheme import SCHEMES


@click.command()
@click.argument("model", required=False)
@click.option("--threads", type=click.IntRange(1), default=available_cores, help="'All' cores.  [default: all]")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("-p", "--prompt-lengths", default="128,512,1024", show_default=True)
@click.option("--scheme", type=click.Choice([n for n, s in SCHEMES.items() if s.weight_bits]), help="Of MODEL.")
@click.option("--chunk", type=click.IntRange(1), help="Tokens of a chunk.")
@click.option(
    "--json", "path", type=click.Path(path_type=Path, dir_okay=False), help="Also write all figures to this file."
)
@click.option(
    "--plot",
    "picture",
    type=click.Path(path_type=Path),
    help="Draw a time breakdown of MODEL to this file: .svg or .png.",
)
def roofline(
    model: str | None,
    threads: int,
    rounds: int,
    prompt_lengths: str,
    scheme: str | None,
    chunk: int | None,
    path: Path | None,
    picture: Path | None,
) -> None:
    """Measure this machine, chunkrt's kernels on it, and prefills of MODEL, if one is given."""
    if threads > available_cores():
        raise click.BadParameter(
            f"{threads} threads, but only {available_cores()} cores are available", param_hint="--threads"
        )
    if path is not None and not path.parent.is_dir():
        raise click.BadParameter(f"the folder {path.parent} does not exist", param_hint="--json")
    if picture is not None:
        if model is None:
            raise click.BadParameter("--plot needs a MODEL", param_hint="--plot")
        try:
            check_picture(picture)
        except ConfigError as error:
            raise click.BadParameter(str(error), param_hint="--plot") from error
    thread_counts = sorted({1, threads})
    options = {"npu": "native", "scheme": scheme, "chunk_length": chunk}
    given = {name: value for name, value in options.items() if value is not None}
    cache_bytes = caches()
    known = cache_bytes or USUAL_CACHES
    ring_bytes = ring_bytes_for(known)
    program = build_probe()
    lengths = _lengths(prompt_lengths)
    try:
        prefills = Prefills(model, lengths, thread_counts, given) if model is not None else None
    except ChunkrtError as error:
        raise click.ClickException(str(error)) from error
    with Probe(program, ring_bytes) as probe:
        machine = Machine(probe, thread_counts, known, ring_bytes)
        for _ in range(rounds):
            machine.measure()
    report = {
        "machine": {
            "processor": cpu_info()["processor"],
            "cores": available_cores(),
            "threads": threads,
            "cache_bytes": cache_bytes,
            "ring_bytes": ring_bytes,
            "rounds": rounds,
            "selected": machine.selected,
        },
        "peaks": machine.peak_rows(),
        "bandwidth": [
            {"level": level, "bytes_per_s": {str(t): machine.bandwidth(level, t) for t in thread_counts}}
            for level in machine.levels
        ],
        "kernels": [machine.kernel_row(case, t) for case in machine.cases for t in thread_counts],
    }
    if prefills is not None:
        report |= _model(prefills, machine, rounds)
    click.echo("\n".join(markdown(report)))
    if path is not None:
        _write(path, json.dumps(report, indent=1) + "\n")
    if picture is not None:
        model_name, scheme_name = (report["model"][key] for key in ("name", "scheme"))
        try:
            draw_parts(report["parts"], f"{model_name}, {scheme_name}: {report['machine']['processor']}", picture)
        except ConfigError as error:
            raise click.ClickException(str(error)) from error


def _lengths(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise click.BadParameter(f"{text!r}, expected whole numbers separated by commas", param_hint="--prompt-lengths")
    return [int(part) for part in parts]


def _model(prefills: Prefills, machine: Machine, rounds: int) -> dict[str, Any]:
    parts = Parts(prefills.engine, machine.thread_counts)
    model, options, threads = prefills.model, prefills.options, machine.thread_counts[-1]
    commands, starts = [], []
    for number in range(rounds + 1):  # the first round warms up
        prefills.measure(counts=number > 0)
        parts.measure(counts=number > 0)
        command, start = start_command(model, threads, options), start_fresh(model, threads, options)
        if number:
            commands.append(command)
            starts.append(start)
    scheme, chunk_length = prefills.engine.scheme.name, prefills.engine.chunk_length
    bars = [_bar(parts, machine, test, count) for test, count in sorted(parts.samples)]
    prefills.close()
    return {
        "model": {"name": Path(model).name, "scheme": scheme, "chunk": chunk_length, "start_threads": threads},
        "prefill": [
            _prefill_row(prefills, machine, tokens, count)
            for tokens in prefills.lengths
            for count in machine.thread_counts
        ],
        "parts": bars,
        "start": {
            "process_to_first_token_s": Spread.of(commands)._asdict(),
            "load_to_first_token_s": Spread.of([s["load_to_first_token_s"] for s in starts])._asdict(),
        },
        "memory": starts[-1],
    }


def _prefill_row(prefills: Prefills, machine: Machine, tokens: int, threads: int) -> dict[str, Any]:
    work, seconds = prefills.works[tokens], Spread.of(prefills.samples[tokens, threads])
    row = {"tokens": tokens, "threads": threads, "seconds": seconds._asdict(), "work": vars(work)}
    peaks = _peaks(machine, threads)
    if peaks is None:
        return row | {"bounds": None}
    bounds = Bounds.of(work, peaks)
    shares = {
        "arithmetic_s": bounds.arithmetic_s,
        "nearer": bounds.nearer,
        "share_of_arithmetic": bounds.arithmetic_s / seconds.median,
        "share_of_memory": bounds.memory_s / seconds.median,
    }
    return row | {"bounds": vars(bounds) | shares}


def _bar(parts: Parts, machine: Machine, test: str, threads: int) -> dict[str, Any]:
    peaks = _peaks(machine, threads)
    bounds = parts.bounds(test, peaks) if peaks else {}
    rows = part_rows(parts.samples[test, threads])
    return {"test": test, "threads": threads, "parts": [row | {"bound_s": bounds.get(row["part"])} for row in rows]}


def _peaks(machine: Machine, threads: int) -> Peaks | None:
    """Return the peak of the instruction sets that chunkrt selects; None if no loop measures one of them."""
    integer = machine.peak(machine.selected["gemm"], "int8", threads)
    floating = machine.peak(machine.selected["attention"], "float32", threads)
    if integer is None or floating is None:
        return None
    return Peaks(integer_macs=integer, float_macs=floating, memory_bytes=machine.bandwidth("memory", threads))


def _write(path: Path, text: str) -> None:
    """Write under a temporary name, then rename."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        aside.write_text(text, "utf-8")
        aside.replace(path)
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        aside.unlink(missing_ok=True)


if __name__ == "__main__":
    roofline()
