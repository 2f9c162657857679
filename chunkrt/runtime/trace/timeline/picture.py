"""Contents of a timeline, independent of the output format: rows of bars.

A timeline consists of three or four panels:

- The workers panel shows the tasks and the causes of idle time of each worker. The link's workers share one row,
  because they only wait for sums.
- The chunks panel shows the same tasks by chunk, and so how chunks overtake each other. Concurrent tasks of one chunk
  share the height of its row.
- The shares panel shows the total time of each processor.
- If several sequences share chunks, the sequences panel shows a row for each sequence, with the chunks that contain
  rows of the sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from chunkrt.runtime.record import WORKS, RunRecord, track_name
from chunkrt.runtime.trace.idle import CAUSES, idle_gaps, times_of
from chunkrt.runtime.trace.shared import chunk_numbers, rows_of, sequence_names
from chunkrt.runtime.trace.utilisation import link_time

IDLE = "idle: "

COLOURS: Mapping[str, str] = {
    "linears": "#0072b2",
    "attention": "#e69f00",
    "layers": "#8c6bb1",
    "embedding": "#009e73",
    "sums": "#56b4e9",
    "bare sums": "#882255",
    "copy": "#7a4b2a",
    "rows": "#44aa99",
    "row": "#332288",
    "idle: start": "#d9d9d9",
    "idle: attention": "#ffe2a8",
    "idle: linears": "#b9dcf2",
    "idle: layers": "#d4c6e3",
    "idle: embedding": "#b8e6d5",
    "idle: sums": "#d6d2f0",
    "idle: order": "#cc79a7",
    "idle: buffer": "#f0e442",
    "idle: chunk": "#f4cccc",
    "idle: copy": "#d55e00",
    "idle: drain": "#bdbdbd",
    "idle: overhead": "#4d4d4d",
}
"""Colours by kind, mostly Okabe and Ito's, which colour-blind people can distinguish."""

LABELS: Mapping[str, str] = {
    "linears": "linears",
    "attention": "attention",
    "layers": "linear layers and attention together",
    "embedding": "embedding, LM head",
    "sums": "sums over ranks",
    "bare sums": "sums without overlapping work",
    "copy": "copy",
    "rows": "chunk with several rows of the sequence",
    "row": "chunk with one row of the sequence",
    **{IDLE + cause: IDLE + meaning for cause, meaning in CAUSES.items()},
}


class Bar(NamedTuple):
    """A bar from `start` to `end`, in milliseconds, or in percent in the shares panel.

    At the bar, the row is divided into `lanes` lanes, and the bar fills lane number `lane`.
    """

    start: float
    end: float
    kind: str
    text: str
    lane: int = 0
    lanes: int = 1


Row = tuple[str, Sequence[Bar]]
"""The name of a row, and its bars side by side, in order."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A timeline.

    Attributes:
        milliseconds: duration of the run, which is the width of `workers`, `chunks` and `sequences`; the width of
            `shares` is 100.
        sequences: the rows of the sequences panel; empty if the run shared no chunks.
    """

    title: str
    milliseconds: float
    workers: Sequence[Row]
    chunks: Sequence[Row]
    shares: Sequence[Row]
    sequences: Sequence[Row] = ()

    @property
    def kinds(self) -> list[str]:
        """Kinds that occur, in the order of the colours."""
        rows = (*self.workers, *self.shares, *self.sequences)
        found = {bar.kind for _, bars in rows for bar in bars}
        return [kind for kind in COLOURS if kind in found]


def make_picture(record: RunRecord) -> Picture:
    """Return the timeline of a run. For a run that shared chunks, pass the record that `with_others` returns.

    Raises:
        ConfigError: the events contradict the schedule's rules.
    """
    pipeline = record.pipeline
    processors = {processor.name: processor for processor in pipeline.processors}
    workers: dict[tuple[str, int], list[Bar]] = {
        (processor.name, worker): [] for processor in pipeline.processors for worker in range(processor.workers)
    }
    chunks: list[list[Bar]] = [[] for _ in range(record.num_chunks)]
    names = [f"chunk {chunk}" for chunk in chunk_numbers(record)]

    def bar(start_ns: int, end_ns: int, kind: str, text: str) -> Bar:
        start, end = (start_ns - record.start_ns) / 1e6, (end_ns - record.start_ns) / 1e6
        return Bar(start, end, kind, f"{text}, {end - start:.3f} ms")

    for gap in idle_gaps(record):
        piece = bar(gap.start_ns, gap.end_ns, IDLE + gap.cause, LABELS[IDLE + gap.cause])
        workers[gap.processor, gap.worker].append(piece)
    for event in record.events:
        stage = pipeline.stages[event.task.subgraph]
        task = bar(event.start_ns, event.end_ns, stage.work, f"{stage.name} {names[event.task.chunk]}")
        workers[event.processor, event.worker].append(task)
        chunks[event.task.chunk].append(task)
    copies = [
        bar(c.start_ns, c.end_ns, "copy", f"copy for {pipeline.stages[c.task.subgraph].name} {names[c.task.chunk]}")
        for c in record.copies
    ]
    sums = [bar for (name, _), bars in workers.items() if name == "link" for bar in bars if bar.kind == "sums"]
    rows: list[Row] = [
        (track_name(processors[name], worker), sorted(bars))
        for (name, worker), bars in workers.items()
        if name != "link"
    ]
    if sums:
        rows.append(("LINK", in_lanes(sums)))
    milliseconds = (record.end_ns - record.start_ns) / 1e6
    return Picture(
        title=f"{_name(record)}: {milliseconds:.1f} ms, policy {pipeline.policy}, chunks of {pipeline.chunk_length}",
        milliseconds=milliseconds,
        workers=[*rows, ("copies", sorted(copies))] if copies else rows,
        chunks=[(name, in_lanes(bars)) for name, bars in zip(names, chunks, strict=True)],
        shares=_shares(record),
        sequences=_sequences(record, chunks),
    )


def _name(record: RunRecord) -> str:
    if not record.chunks:
        return record.name
    return f"chunks of {sequence_names(record.chunks)}"


def _sequences(record: RunRecord, chunks: Sequence[Sequence[Bar]]) -> list[Row]:
    """Return a row for every sequence, with a bar for each of its chunks from the chunk's first task to its last."""
    rows: dict[int, list[Bar]] = {}
    for shared, tasks in zip(record.chunks, chunks, strict=bool(record.chunks)):
        start, end = min(bar.start for bar in tasks), max(bar.end for bar in tasks)
        for segment, where in zip(shared.segments, rows_of(shared).values(), strict=True):
            kind = "rows" if segment.num_tokens > 1 else "row"
            rows.setdefault(segment.sequence, []).append(Bar(start, end, kind, f"chunk {shared.number}, {where}"))
    return [(f"sequence {sequence}", in_lanes(bars)) for sequence, bars in sorted(rows.items())]


def in_lanes(bars: Sequence[Bar]) -> list[Bar]:
    """Sort bars by their starts, and put overlapping bars into separate lanes."""
    found: list[Bar] = []
    crowd: list[Bar] = []
    ends: list[float] = []
    """End of each lane of `crowd`, a group of bars that overlap directly or through others."""

    def part() -> None:
        found.extend(bar._replace(lanes=len(ends)) for bar in crowd)
        crowd.clear()
        ends.clear()

    for bar in sorted(bars):
        if ends and max(ends) <= bar.start:
            part()
        lane = next((lane for lane, end in enumerate(ends) if end <= bar.start), len(ends))
        ends[lane : lane + 1] = [bar.end]
        crowd.append(bar._replace(lane=lane))
    part()
    return found


def _shares(record: RunRecord) -> list[Row]:
    rows: list[Row] = []
    for time in times_of([record]):
        if time.name == "link":
            continue
        parts: dict[str, int] = {work: time.busy_ns.get(work, 0) for work in WORKS}
        parts.update((IDLE + cause, time.idle_ns.get(cause, 0)) for cause in CAUSES)
        bars, start = [], 0.0
        for kind, part in parts.items():
            share = 100 * part / max(time.total_ns, 1)
            if part:
                bars.append(Bar(start, start + share, kind, f"{LABELS[kind]} {share:.1f} %"))
            start += share
        rows.append((time.name.upper(), bars))
    if link := link_time([record]):
        wall_ns = max(record.end_ns - record.start_ns, 1)
        hidden, busy = (100 * link[part] / wall_ns for part in ("hidden_ns", "busy_ns"))
        link_bars = [
            Bar(0.0, hidden, "sums", f"sums hidden by other work {hidden:.1f} %"),
            Bar(hidden, busy, "bare sums", f"{LABELS['bare sums']} {busy - hidden:.1f} %"),
        ]
        rows.append(("LINK", [bar for bar in link_bars if bar.end > bar.start]))
    return rows


def ink(kind: str) -> str:
    """Return a text colour that is readable on a kind's colour."""
    red, green, blue = (int(COLOURS[kind][at : at + 2], 16) for at in (1, 3, 5))
    return "#000" if 299 * red + 587 * green + 114 * blue > 140_000 else "#fff"
