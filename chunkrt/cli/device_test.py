"""`chunkrt device-test`: check an engine directory on a device, and write a report that can be compared."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from chunkrt.backends.qnn import QnnBackend
from chunkrt.cli.command import STATUS_OF_NO, FiniteRange, GroupedCommand, option
from chunkrt.cli.doctor import check_directory
from chunkrt.cli.shared_options import engine_fields, verbose_option
from chunkrt.engine.engine import Engine
from chunkrt.engine.loading import load
from chunkrt.engine_directory.manifest import is_engine_directory
from chunkrt.errors import ChunkrtError, ConfigError, cause_of
from chunkrt.files import check_writable, read_json, write_text
from chunkrt.progress import ShownProgress
from chunkrt.runtime.record import RunRecord

FORMAT = 1
NUM_PROMPT_TOKENS, SEED, NUM_GENERATED = 100, 20240607, 8
MOST_LOGITS = 4096
"""Number of logits in a report, which are evenly spaced over the vocabulary."""
SECONDS_PER_MINUTE = 60.0
FARTHEST = 0.02
"""Largest accepted distance of logits from those of another report, relative to their root mean square."""

Report = dict[str, Any]


@click.command(
    "device-test",
    cls=GroupedCommand,
    first="output against minutes soc chunk_length recompile",
    epilog="See docs/device-checklist.md.",
)
@click.argument("folder", type=click.Path(path_type=Path))
@option("-o", "--output", group="Output", required=True, type=click.Path(path_type=Path), help="JSON report to write.")
@option(
    "--against",
    group="Output",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Report of the same directory from another machine, e.g. from the emulator, for comparison.",
)
@option(
    "--minutes",
    group="Measurement",
    type=FiniteRange(0, 120),
    default=5.0,
    show_default=True,
    help="Minutes of repeated prompts, which show the effect of heat.",
)
@engine_fields("soc", "chunk_length", "recompile", "htp")
@verbose_option
def device_test(folder: Path, output: Path, against: Path | None, minutes: float, **settings: Any) -> None:
    """Check an engine directory on this machine's NPU, or in the emulator, and write a report.

    The checks are: files, library and SoC; loading without compiling; memory that CPU and NPU share; logits, compared
    with the CPU's and with another report; decode on the NPU; time per graph, at the beginning and when hot; and
    restoring the NPU's contexts.

    The exit status is 3 if a check fails.
    """
    if not is_engine_directory(folder):
        raise ConfigError(f"{folder} is not an engine directory; make one with chunkrt compile")
    try:
        check_writable(output)
        other = None if against is None else read_json(against)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot use a report: {cause_of(error)}") from error
    if other is not None and not _is_report(other):
        raise ConfigError(f"{against} is not a report of this version of device-test; make one with -o")
    report: Report = {"format": FORMAT, "machine": platform.platform(), "directory": str(folder)}
    report["checks"] = [{"name": each.what, "ok": each.ok, "found": each.found} for each in check_directory(folder)]
    with ShownProgress() as progress:
        began = time.perf_counter()
        options: dict[str, Any] = {"npu": "qnn", "on_npu_failure": "fail", "prefix_cache": "off", **settings}
        with load(folder, progress=progress, **options) as engine:
            report["load_s"] = time.perf_counter() - began
            _test_engine(engine, report, minutes, progress)
        with load(folder, npu="native", prefix_cache="off", chunk_length=engine.chunk_length) as native:
            _compare_with_cpu(native, report)
        progress("", 0, 0)
    if other is not None:
        _compare(report, other)
    write_text(output, json.dumps(report, indent=1))
    for check in report["checks"]:
        click.echo(f"{'ok  ' if check['ok'] else 'FAIL'} {check['name']}: {check['found']}")
    if not all(check["ok"] for check in report["checks"]):
        raise click.exceptions.Exit(STATUS_OF_NO)


def _is_report(other: object) -> bool:
    if not isinstance(other, dict) or other.get("format") != FORMAT:
        return False
    logits = other.get("logits")
    return isinstance(logits, list) and all(type(value) in (int, float) for value in logits)


def _check(report: Report, name: str, ok: object, found: str) -> None:
    report["checks"].append({"name": name, "ok": bool(ok), "found": found})


def _tokens(engine: Engine) -> list[int]:
    length = min(NUM_PROMPT_TOKENS, engine.context_length - NUM_GENERATED)
    tokens: list[int] = np.random.default_rng(SEED).integers(0, engine.loaded.plan.vocab_size, length).tolist()
    return tokens


def _test_engine(engine: Engine, report: Report, minutes: float, progress: Callable[[str, int, int], None]) -> None:
    backend, tokens = engine.loaded.npu_backend, _tokens(engine)
    assert isinstance(backend, QnnBackend)
    _check(report, "contexts load", backend.num_compiled == 0, f"{backend.num_compiled} had to be compiled")
    shares = backend.shares_memory
    emulated = backend.htp.is_emulated
    _check(report, "shared memory", shares or emulated, "shared" if shares else "ordinary memory, which is copied")
    report |= {
        "is_emulated": emulated,
        "soc": backend.soc.name,
        "library": backend.htp.version,
        "chunk_length": engine.chunk_length,
        "prompt_tokens": tokens,
    }
    result = engine.session().prefill(tokens)
    assert result.logits is not None
    spaced = result.logits[:: max(1, len(result.logits) // MOST_LOGITS)]
    report["logits"] = [float(value) for value in spaced]
    report["likeliest"] = int(np.argmax(result.logits))
    session = engine.session()
    session.prefill(tokens)
    report["generated"] = [piece.token_id for piece in session.generate(max_new_tokens=NUM_GENERATED)]
    _measure(engine, report, minutes, progress)
    try:
        backend.restore()
        again = engine.session().prefill(tokens).logits
        is_same = again is not None and np.array_equal(again, result.logits)
        _check(report, "restored contexts", is_same, "opened again from their files")
    except ChunkrtError as error:
        _check(report, "restored contexts", False, str(error))


def _measure(engine: Engine, report: Report, minutes: float, progress: Callable[[str, int, int], None]) -> None:
    """Repeat the prompt, and record the times of each graph on the NPU in the first and the last tenth of the runs."""
    tokens, began, runs = _tokens(engine), time.monotonic(), list[dict[str, list[int]]]()
    seconds = minutes * SECONDS_PER_MINUTE
    while not runs or time.monotonic() - began < seconds:
        progress("measuring", int(time.monotonic() - began), int(seconds))
        times, records = dict[str, list[int]](), list[RunRecord]()
        with engine.session() as session:
            session.on_run = records.append
            session.prefill(tokens)
        for record in records:
            for event in record.events:
                if event.passage is not None:
                    name = record.pipeline.stages[event.task.subgraph].name
                    times.setdefault(name, []).append(event.passage.ended_ns - event.passage.began_ns)
        runs.append(times)
    tenth = max(1, len(runs) // 10)
    report["runs"] = len(runs)
    report["graph_us"] = {
        name: {
            label: median(time for run in part for time in run[name]) / 1000
            for label, part in (("first", runs[:tenth]), ("last", runs[-tenth:]))
        }
        for name in runs[0]
    }


def _compare_with_cpu(native: Engine, report: Report) -> None:
    logits = native.session().prefill(report["prompt_tokens"]).logits
    assert logits is not None
    distance = _distance(report["logits"], logits[:: max(1, len(logits) // MOST_LOGITS)])
    same = report["likeliest"] == int(np.argmax(logits))
    report["distance_from_cpu"] = distance
    _check(report, "logits of the CPU", distance < FARTHEST, f"distance {distance:.2g}, same likeliest token: {same}")


def _compare(report: Report, other: Report) -> None:
    same = all(report[name] == other.get(name) for name in ("soc", "library", "chunk_length", "prompt_tokens"))
    if not same or len(other["logits"]) != len(report["logits"]):
        _check(report, "other report", False, "it is of another directory, SoC, chunk length or library")
        return
    distance = _distance(report["logits"], other["logits"])
    exact = report["logits"] == other["logits"] and report["generated"] == other.get("generated")
    found = "bit-identical logits and tokens" if exact else f"distance {distance:.2g}"
    _check(report, "logits of the other report", distance < FARTHEST, found)


def _distance(found: Any, expected: Any) -> float:
    difference = np.asarray(found, np.float64) - np.asarray(expected, np.float64)
    return float(np.sqrt(np.mean(difference**2) / np.mean(np.square(expected, dtype=np.float64))))
