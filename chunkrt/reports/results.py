"""Results of prefills, measured or predicted, in common terms, and their Pareto fronts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath

import numpy as np

from chunkrt.reports.tables import Column, Row, Table
from chunkrt.runtime.record import Origin


@dataclass(frozen=True, kw_only=True)
class Result:
    """One prefill. Fields are None or empty if the file does not state them.

    Attributes:
        place: device of a simulation, or backend of a run.
        partition: name or text of the placement, with the processor of attention if it is not the default.
        memory_bytes: predicted peak memory of the prompt; None for runs, whose process may have computed other tests.
        mark: choice of a search, e.g. "chosen".
    """

    source: str
    origin: Origin
    model: str
    place: str = ""
    scheme: str = ""
    partition: str = ""
    prompt_length: int | None = None
    chunk_length: int | None = None
    policy: str = ""
    chunks_in_flight: int | None = None
    threads: int | None = None
    ttft_ms: float | None = None
    tokens_per_s: float | None = None
    npu_busy: float | None = None
    cpu_busy: float | None = None
    overlap: float | None = None
    memory_bytes: int | None = None
    energy_joules: float | None = None
    mark: str = ""


COLUMNS = (
    Column(name="source", form="text"),
    Column(name="model", form="text"),
    Column(name="device", form="text"),
    Column(name="scheme", form="text"),
    Column(name="partition", form="text"),
    Column(name="prompt tokens", form="setting"),
    Column(name="chunk", form="setting"),
    Column(name="policy", form="text"),
    Column(name="in flight", form="setting"),
    Column(name="threads", form="setting"),
    Column(name="time to first token, ms"),
    Column(name="tokens/s"),
    Column(name="NPU busy", form="share"),
    Column(name="CPU busy", form="share"),
    Column(name="overlap", form="share"),
    Column(name="memory, MB", scale=1e-6),
    Column(name="energy, J"),
    Column(name="Pareto front", form="text"),
    Column(name="choice", form="text"),
)


def short_name(name: str) -> str:
    """Return the last part of a path; other names are returned unchanged."""
    if name.startswith(("/", "./", "../", "~")):
        return PurePosixPath(name).name or name
    return PureWindowsPath(name).name if PureWindowsPath(name).drive else name


def results_table(results: Sequence[Result]) -> Table:
    """Return the table of all prefills."""
    on_front = front_of(results)
    rows = [
        Row(
            origin=result.origin,
            values=(
                short_name(result.source),
                short_name(result.model),
                result.place,
                result.scheme,
                result.partition,
                result.prompt_length,
                result.chunk_length,
                result.policy,
                result.chunks_in_flight,
                result.threads,
                result.ttft_ms,
                result.tokens_per_s,
                result.npu_busy,
                result.cpu_busy,
                result.overlap,
                result.memory_bytes,
                result.energy_joules,
                "yes" if is_on_front else "",
                result.mark,
            ),
        )
        for result, is_on_front in zip(results, on_front, strict=True)
    ]
    return Table(caption="Prefills", columns=COLUMNS, rows=rows).narrowed()


Group = tuple[str, str, int | None]
"""A model, a device and a prompt length. Predictions with these in common are compared in one front."""


def groups_of(results: Sequence[Result]) -> dict[Group, list[int]]:
    """Return the indices of the predictions with a time and a memory, by group."""
    groups: dict[Group, list[int]] = {}
    for index, result in enumerate(results):
        if result.ttft_ms is not None and result.memory_bytes is not None:
            groups.setdefault((result.model, result.place, result.prompt_length), []).append(index)
    return {group: members for group, members in groups.items() if len(members) > 1}


def front_of(results: Sequence[Result]) -> list[bool]:
    """Return, for each result, whether no other result of its group exceeds it in time, memory or energy without being
    worse in another of these. Energy counts if all results of the group have it.
    """
    marks = [False] * len(results)
    for members in groups_of(results).values():
        has_energy = all(results[index].energy_joules is not None for index in members)
        points = np.array(
            [
                (
                    results[index].ttft_ms,
                    results[index].memory_bytes,
                    results[index].energy_joules if has_energy else 0.0,
                )
                for index in members
            ],
            dtype=np.float64,
        )
        for index, point in zip(members, points, strict=True):
            is_exceeded = np.any(np.all(points <= point, axis=1) & np.any(points < point, axis=1))
            marks[index] = not is_exceeded
    return marks
