"""Timelines of a report, as data that the page's script draws, so that a reader can enlarge any part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chunkrt.reports.tables import MARKS, Column, Row, Table, Value
from chunkrt.runtime.record import WORKS, Origin, RunRecord, origin_of
from chunkrt.runtime.trace.groups import Group, shares
from chunkrt.runtime.trace.idle import CAUSES
from chunkrt.runtime.trace.shared import with_others
from chunkrt.runtime.trace.timeline.picture import COLOURS, IDLE, LABELS, Bar, Picture, make_picture
from chunkrt.runtime.trace.timeline.picture import Row as PictureRow

MOST_TIMELINES = 12
"""Maximum number of timelines of one source. The longest groups are drawn; tables cover all."""

MOST_BARS = 60_000
"""Maximum number of bars of one timeline. If there are more, short adjacent bars of a row are joined."""

KINDS = list(COLOURS)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One timeline: data for the script, and the statement of the rule by which bars were joined, if any."""

    title: str
    origin: Origin
    data: dict[str, Any]
    kinds: Sequence[str]
    note: str


def timelines_of(groups: Sequence[Group], records: Sequence[RunRecord]) -> tuple[list[Timeline], str]:
    """Return a timeline of the longest run of each group, and a note about groups without a timeline."""
    drawn = sorted(groups, key=lambda group: -group.wall_ns)[:MOST_TIMELINES]
    found = []
    for group in groups:
        if group in drawn:
            longest = max(group.records, key=lambda record: (record.num_tokens, record.end_ns - record.start_ns))
            found.append(_timeline(with_others(longest, records), len(group.records)))
    left = len(groups) - len(drawn)
    note = "" if not left else f"Timelines show the {len(drawn)} groups that took longest; the table covers all."
    return found, note


def _timeline(record: RunRecord, num_runs: int) -> Timeline:
    picture = make_picture(record)
    origin = record.pipeline.origin
    total = sum(len(bars) for _, bars in (*picture.workers, *picture.chunks, *picture.sequences))
    gap = 0.0
    rows = _panels(picture, gap)
    while sum(len(bars) for _, _, bars in rows) > MOST_BARS and gap < picture.milliseconds:
        gap = 2 * gap or picture.milliseconds / MOST_BARS
        rows = _panels(picture, gap)
    note = ""
    if gap:
        note = (
            f"The run has {total:,} bars. Adjacent bars of a row that begin and end within {gap:.4g} ms are joined. A "
            "joined bar has the colour of most of its time, and states the number of its bars."
        )
    texts: dict[str, int] = {}
    where = {
        (bar.start, bar.end, bar.text): texts.setdefault(name, len(texts))
        for name, bars in picture.workers
        for bar in bars
    }
    data = {
        "ns": round(picture.milliseconds * 1e6),
        "mark": MARKS[origin],
        "origin": origin,
        "rows": [
            {
                "name": name,
                "panel": panel,
                "bars": [
                    _data(bar, count, texts, where.get((bar.start, bar.end, bar.text), -1), panel, name)
                    for bar, count in bars
                ],
            }
            for panel, name, bars in rows
        ],
    }
    data["texts"] = list(texts)
    runs = "" if num_runs == 1 else f" (the longest of {num_runs} runs)"
    drawn = {bar.kind for _, bars in (*picture.workers, *picture.sequences) for bar in bars}
    name, _, rest = picture.title.partition(": ")
    choices = rest.partition(", ")[2]
    return Timeline(
        title=f"{name}{runs}, {choices}: {picture.milliseconds:,.{1 if picture.milliseconds >= 100 else 3}f} ms",
        origin=origin,
        data=data,
        kinds=[kind for kind in KINDS if kind in drawn],
        note=note,
    )


Counted = tuple[Bar, int]
"""A bar, and the number of bars that it stands for."""


def _panels(picture: Picture, gap: float) -> list[tuple[str, str, list[Counted]]]:
    """Return the panel, the name and the bars of each row."""
    panels: tuple[tuple[str, Sequence[PictureRow]], ...] = (
        ("workers", picture.workers),
        ("chunks", picture.chunks if len(picture.chunks) > 1 else ()),
        ("sequences", picture.sequences),
    )
    return [(panel, name, _joined(bars, gap)) for panel, rows in panels for name, bars in rows]


def _joined(bars: Sequence[Bar], gap: float) -> list[Counted]:
    """Join the bars of a lane that begin and end within `gap` milliseconds. The kind with the most time remains."""
    if not gap:
        return [(bar, 1) for bar in bars]
    found: list[Counted] = []
    groups: dict[tuple[int, int], list[Bar]] = {}

    def finish(group: list[Bar]) -> None:
        times: dict[str, float] = {}
        for bar in group:
            times[bar.kind] = times.get(bar.kind, 0.0) + bar.end - bar.start
        kind = max(times, key=lambda kind: times[kind])
        text = group[0].text if len(group) == 1 else f"{len(group)} bars, mostly {LABELS[kind]}, "
        end = max(bar.end for bar in group)
        found.append((group[0]._replace(end=end, kind=kind, text=text), len(group)))

    for bar in bars:
        group = groups.setdefault(bar[4:], [])
        if group and bar.end - group[0].start > gap:
            finish(group)
            group.clear()
        group.append(bar)
    for group in filter(None, groups.values()):
        finish(group)
    return sorted(found)


def _data(bar: Bar, count: int, texts: dict[str, int], where: int, panel: str, row: str) -> list[int]:
    """Return a bar: start and duration in ns, kind, text, lane, lanes, number of tasks, and the processor's text."""
    start, end = round(bar.start * 1e6), round(bar.end * 1e6)
    name = bar.text if count == 1 and panel == "sequences" else bar.text.rsplit(", ", 1)[0]
    text = texts.setdefault(name, len(texts))
    place = texts.setdefault(row, len(texts)) if panel == "workers" else where
    return [start, end - start, KINDS.index(bar.kind), text, bar.lane, bar.lanes, count, place]


def times_table(groups: Sequence[Group]) -> Table:
    """Return the breakdown of the time of each group and processor, in percent of the processor's time. The workers of
    the link between ranks are combined.
    """
    columns = [
        Column(name="runs", form="text"),
        Column(name="processor", form="text"),
        Column(name="workers", form="setting"),
        Column(name="number of runs", form="setting"),
        Column(name="total, ms"),
        Column(name="busy", form="share"),
        *(Column(name="embedding, LM head" if work == "embedding" else work, form="share") for work in WORKS),
        *(Column(name=f"idle: {meaning}", form="share") for meaning in CAUSES.values()),
        Column(name="sums hidden by other work", form="share"),
        Column(name="sums not hidden", form="share"),
    ]
    rows = []
    for group in groups:
        for time in group.processors:
            settings: list[Value] = [group.name, time.name.upper(), time.workers, len(group.records)]
            settings.append(group.wall_ns / 1e6)
            if time.name == "link":
                hidden, bare = _sums(group)
                nothing = [None] * (len(WORKS) + len(CAUSES))
                settings[2] = None  # its workers only wait
                rows.append(
                    Row(origin=origin_of(group.records), values=(*settings, hidden + bare, *nothing, hidden, bare))
                )
                continue
            parts = shares(time)
            works = [100 * time.busy_ns[work] / time.total_ns if time.busy_ns.get(work) else None for work in WORKS]
            percents = [parts["busy"], *works, *(parts[cause] or None for cause in CAUSES)]
            values = [None if percent is None else percent / 100 for percent in percents]
            rows.append(Row(origin=origin_of(group.records), values=(*settings, *values, None, None)))
    caption = "Time of each processor, and causes of its idle time"
    return Table(caption=caption, columns=columns, rows=rows).narrowed()


def _sums(group: Group) -> tuple[float, float]:
    """Return the shares of a group's time in which sums over ranks were in progress: with other work, and without."""
    link = group.link
    if link is None or not group.wall_ns:
        return 0.0, 0.0
    return link["hidden_ns"] / group.wall_ns, (link["busy_ns"] - link["hidden_ns"]) / group.wall_ns


@dataclass(frozen=True, kw_only=True)
class ShareBar:
    """Busy and idle shares of one processor in a group of runs, as (kind, percent)."""

    name: str
    parts: Sequence[tuple[str, float]]


def share_bars(groups: Sequence[Group]) -> list[ShareBar]:
    """Return a stacked bar for each group and processor, which shows its work and the causes of its idle time."""
    found = []
    for group in groups:
        for time in group.processors:
            if not time.total_ns:
                continue
            if time.name == "link":
                sums = zip(("sums", "bare sums"), _sums(group), strict=True)
                of_link = [(kind, 100 * share) for kind, share in sums if share]
                found.append(ShareBar(name=f"{group.name}, LINK", parts=of_link))
                continue
            parts: list[tuple[str, int]] = [(work, time.busy_ns.get(work, 0)) for work in WORKS]
            parts += [(IDLE + cause, time.idle_ns.get(cause, 0)) for cause in CAUSES]
            percents = [(kind, 100 * part / time.total_ns) for kind, part in parts if part]
            found.append(ShareBar(name=f"{group.name}, {time.name.upper()}", parts=percents))
    return found


def subgraphs_table(record: RunRecord) -> Table:
    """Return the time of each subgraph of a run."""
    stages = record.pipeline.stages
    times: dict[tuple[int, str], list[int]] = {}
    for event in record.events:
        times.setdefault((event.task.subgraph, event.processor), []).append(event.end_ns - event.start_ns)
    columns = [
        Column(name="subgraph", form="text"),
        Column(name="work", form="text"),
        Column(name="processor", form="text"),
        Column(name="tasks", form="setting"),
        Column(name="total, ms", scale=1e-6),
        Column(name="mean, ms", scale=1e-6),
        Column(name="longest, ms", scale=1e-6),
    ]
    rows = [
        Row(
            origin=record.pipeline.origin,
            values=(
                *(stages[subgraph].name, stages[subgraph].work, processor.upper(), len(found)),
                *(sum(found), sum(found) / len(found), max(found)),
            ),
        )
        for (subgraph, processor), found in sorted(times.items())
    ]
    return Table(caption="Time of each subgraph", columns=columns, rows=rows)
