"""A run's record as a table for notebooks: a breakdown of the time of each processor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chunkrt.html_tables import html_table
from chunkrt.runtime.trace.idle import CAUSES, times_of

if TYPE_CHECKING:
    from chunkrt.runtime.record import RunRecord


def record_html(record: RunRecord) -> str:
    """Return a table with a column for each processor, and a row for each kind of work and each cause of idleness, in
    percent."""
    from chunkrt.runtime.record import WORKS

    times = times_of([record])
    parts = [{**time.busy_ns, **{f"idle: {CAUSES[cause]}": ns for cause, ns in time.idle_ns.items()}} for time in times]
    names = [
        name
        for name in (*WORKS, *(f"idle: {meaning}" for meaning in CAUSES.values()))
        if any(name in part for part in parts)
    ]
    rows = [
        (
            name,
            *(
                f"{100 * part.get(name, 0) / max(time.total_ns, 1):.1f} %"
                for time, part in zip(times, parts, strict=True)
            ),
        )
        for name in names
    ]
    seconds = (record.end_ns - record.start_ns) / 1e9
    speed = f", {record.num_tokens / seconds:.1f} tokens/s" if seconds else ""
    caption = f"{record.name}: {1e3 * seconds:.1f} ms{speed}, policy {record.pipeline.policy}"
    return html_table(caption, ("", *(f"{t.name} x {t.workers}" if t.workers > 1 else t.name for t in times)), rows)
