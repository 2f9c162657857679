"""Sources of a report: the files that chunkrt's commands write, recognised by their content, or objects in memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from chunkrt.errors import ConfigError, cause_of
from chunkrt.files import parse_json, read_text
from chunkrt.reports.formats import ReportSource, experiment, reader_of, simulations, source_with
from chunkrt.reports.results import Result, short_name
from chunkrt.runtime.record import RunRecord
from chunkrt.runtime.trace.file import parse_trace
from chunkrt.runtime.trace.groups import Group, group_runs
from chunkrt.runtime.trace.utilisation import utilisation
from chunkrt.simulate import Simulation
from chunkrt.simulate.experiments import GridRow, Rows

KNOWN = (
    "traces (`--trace`), and the output of `bench`, `experiment`, `simulate`, `tune` and `eval` with --json, or of "
    "`experiment -o`"
)

Given = str | os.PathLike[str] | Rows | Simulation | RunRecord | Sequence[Simulation] | Sequence[RunRecord]
"""A source as a caller gives it: a path, the rows of an experiment, simulations, or records of runs."""


def source_of(given: Given, name: str | None = None) -> ReportSource:
    """Return the content of a file or an object.

    Args:
        name: name to show; by default the path of the file, or the kind of the object.

    Raises:
        ConfigError: the file cannot be read, is damaged or of an unknown kind; or the object is none of these kinds.
    """
    if isinstance(given, str | os.PathLike):
        return read_source(Path(given), os.fspath(given) if name is None else name)
    items: Sequence[object] = [given] if isinstance(given, Simulation | RunRecord) else given
    if isinstance(items, Sequence) and items:
        rows = [item for item in items if isinstance(item, GridRow)]
        prompts = [item for item in items if isinstance(item, Simulation)]
        records = [item for item in items if isinstance(item, RunRecord)]
        if len(rows) == len(items):
            return experiment([asdict(row) for row in rows], name or "experiment")
        if len(prompts) == len(items):
            data = [{"model": "", **prompt.to_dict()} for prompt in prompts]
            of_prompts = [record for prompt in prompts for record in prompt.records]
            return replace(simulations(data, name or "simulation"), groups=group_runs(of_prompts), records=of_prompts)
        if len(records) == len(items):
            return _trace("", records, name or "records", kind="records")
    raise ConfigError(
        f"{name or 'a source'} is {given!r:.80}, expected a path, rows of an experiment, simulations, or records of "
        "runs; at least one"
    )


def read_source(path: Path, name: str) -> ReportSource:
    """Return the content of a file. The errors are those of `source_of`."""
    try:
        text = read_text(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {cause_of(error)}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error}); a report takes {KNOWN}") from error
    if not text.strip():
        raise ConfigError(f"{path} is empty; a report takes {KNOWN}")
    try:
        data = parse_json(text)
    except ValueError as error:
        data = _json_lines(text, path, error)
    if _is_header(data):  # without rows
        data = _experiment_rows(path)
    if isinstance(data, dict) and "traceEvents" in data:
        title, records, _ = parse_trace(data, path)
        return _trace(title, records, name)
    read = reader_of(data)
    if read is None:
        raise ConfigError(f"{path} is JSON of an unknown kind; a report takes {KNOWN}")
    try:
        return read(data, name)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path} is damaged: {error}; write it again") from error


def _json_lines(text: str, path: Path, of_whole: ValueError) -> Any:
    """Return the rows of a file of JSON lines: an experiment's after their header, or those of `bench -o x.jsonl`."""
    lines = [line for line in text.split("\n") if line.strip()]
    try:
        values = [parse_json(line) for line in lines]
    except ValueError as error:
        if len(lines) > 1 and text.startswith("{"):
            try:
                parse_json(lines[0])
            except ValueError:
                pass
            else:
                if "format" not in lines[0]:
                    raise ConfigError(f"{path} is damaged: a line is not JSON ({error}); write it again") from error
                return _experiment_rows(path)
        raise ConfigError(f"{path} is not JSON ({of_whole}); a report takes {KNOWN}") from error
    return _experiment_rows(path) if _is_header(values[0]) else values


def _is_header(value: Any) -> bool:
    """Return True if a line begins a file of rows of an experiment."""
    return isinstance(value, dict) and value.keys() == {"chunkrt", "format"}


def _experiment_rows(path: Path) -> Any:
    rows = Rows.read(path)
    if not rows:
        raise ConfigError(f"{path} has no rows yet; run its experiment")
    return [asdict(row) for row in rows]


def _trace(title: str, records: Sequence[RunRecord], name: str, *, kind: str = "trace") -> ReportSource:
    named = title.removeprefix("chunkrt ").removeprefix("simulate ")  # as the commands write titles
    title = ", ".join(short_name(model) for model in named.split(", "))
    groups = group_runs(records)
    results = [_prefills(group, title, name) for group in groups if not group.records[0].is_decode]
    return source_with(
        name,
        kind,
        [title],
        (record.pipeline.origin for record in records),
        results=[result for result in results if result is not None],
        groups=groups,
        records=records,
    )


def _prefills(group: Group, title: str, name: str) -> Result | None:
    """Return the mean of the prefills of one length that begin at position 0; None if there are none, or if they shared
    chunks or took no time.
    """
    records = [record for record in group.records if not (record.position or record.chunks)]
    wall_ns = sum(record.end_ns - record.start_ns for record in records)
    if not wall_ns:
        return None
    first, runs = records[0], len(records)
    pipeline = first.pipeline
    busy = utilisation(records) if runs == 1 else None
    has_npu = any(processor.devices == {"npu"} for processor in pipeline.processors)
    processors = [processor for processor in pipeline.processors if processor.name != "link"]
    return Result(
        source=name,
        origin=pipeline.origin,
        model=title,
        place=" and ".join(processor.name.upper() for processor in processors),
        prompt_length=first.num_tokens,
        chunk_length=pipeline.chunk_length,
        policy=pipeline.policy,
        chunks_in_flight=min(pipeline.num_slots, first.num_chunks),
        ttft_ms=wall_ns / runs / 1e6,
        tokens_per_s=first.num_tokens * runs / (wall_ns / 1e9),
        npu_busy=busy["npu_busy"] if busy and has_npu else None,
        cpu_busy=busy["cpu_busy"] if busy else None,
        overlap=busy["overlap"] if busy and has_npu else None,
    )
