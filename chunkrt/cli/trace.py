"""`chunkrt trace`: break down the time of a recorded run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

import click

from chunkrt.backends.fallback import NpuState
from chunkrt.cli.command import GroupedCommand
from chunkrt.cli.shared_options import verbose_option
from chunkrt.runtime.record import WORKS
from chunkrt.runtime.tasks import SPANS, Span
from chunkrt.runtime.trace.file import read_trace_file
from chunkrt.runtime.trace.groups import Group, group_runs, shares
from chunkrt.runtime.trace.idle import CAUSES
from chunkrt.runtime.trace.shared import with_others

SPAN_MEANINGS: Mapping[Span, str] = {
    "entering": "inputs converted",
    "waiting": "waiting for its turn",
    "computing": "computing",
    "leaving": "outputs converted",
}


@click.command(cls=GroupedCommand)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    help="Draw the timeline of the longest prefill as .svg or .html.",
)
@verbose_option
def trace(file: Path, as_json: bool, plot: Path | None) -> None:
    """Show a time breakdown of FILE, a trace that `run` or `bench` wrote with --trace.

    For runs that shared chunks, it also shows how full these were; each chunk counts once. The last lines show the
    state of the NPU after the runs, with its failures.

    Perfetto's viewer (ui.perfetto.dev) opens FILE, too.
    """
    _, records, npu = read_trace_file(file)
    groups = group_runs(records)
    if plot is not None:
        from chunkrt.runtime.trace.timeline import draw

        draw(with_others(max(records, key=lambda record: record.num_tokens), records), plot)
    if as_json:
        states = [asdict(state) for state in npu]
        click.echo(json.dumps({"groups": [group.as_dict() for group in groups], "npu": states}, indent=1))
    else:
        click.echo("\n\n".join([*map(_text, groups), *map(_health, npu)]))


def _health(npu: NpuState) -> str:
    error = f"; last error: {npu.error}" if npu.error else ""
    return (
        f"NPU: {npu.status}, {npu.failures} failures, restored {npu.restored} times, {npu.fallbacks} tasks computed by "
        f"the CPU{error}"
    )


def _text(group: Group) -> str:
    """Return a table with one column per processor and one line per share."""
    record = group.records[0]
    runs = f"{len(group.records)} run{'s' if len(group.records) > 1 else ''}"
    speed = group.num_tokens / (group.wall_ns / 1e9) if group.wall_ns else 0.0
    shared = group.packing
    num_chunks = shared["chunks"] if shared else record.num_chunks
    cached = f"{group.num_cached} tokens cached, " if group.num_cached else ""
    lines = [
        f"{group.name}: {runs}, {cached}{group.wall_ns / 1e6:.1f} ms, {speed:.1f} tokens/s, "
        f"policy {record.pipeline.policy}, {num_chunks} chunk{'s' if num_chunks > 1 else ''}, "
        f"{record.pipeline.num_slots} chunk slots"
    ]
    if shared:
        padding = "" if shared["padding"] is None else f", {shared['padding']:.1%} of the NPU's rows were padding"
        lines.append(
            f"{shared['rows_per_chunk']:.1f} of {record.pipeline.chunk_length} rows a chunk on average, "
            f"{shared['packed']:.1%} of the chunks held more than one of {shared['sequences']} sequences{padding}"
        )
    processors = [time for time in group.processors if time.name != "link"]
    columns = [shares(time) for time in processors]
    heads = [f"{time.name} x {time.workers}" if time.workers > 1 else time.name for time in processors]
    link = group.link
    of_link = [100 * link["busy_ns"] / group.wall_ns] if link and group.wall_ns else []
    none, no_link = [0.0] * len(columns), [0.0] * len(of_link)
    if of_link:
        heads.append("link")
    lines.append(f"{'':36}" + "".join(f"{head:>10}" for head in heads))
    lines.append(_line("busy", [column["busy"] for column in columns] + of_link))
    for work in WORKS:
        parts = [100 * t.busy_ns.get(work, 0) / t.total_ns if t.total_ns else 0.0 for t in processors]
        if any(parts):
            lines.append(_line(f"  {'embedding and LM head' if work == 'embedding' else work}", parts + no_link))
    for span in SPANS:
        parts = [100 * t.span_ns.get(span, 0) / t.total_ns if t.total_ns else 0.0 for t in processors]
        if any(parts):
            lines.append(_line(f"  of that {SPAN_MEANINGS[span]}", parts + no_link))
    if link and of_link:
        lines.append(_line("  sums, hidden by other work", [*none, of_link[0] * link["hidden"]]))
        lines.append(_line("  sums, not hidden", [*none, of_link[0] * (1 - link["hidden"])]))
    for cause, meaning in CAUSES.items():
        if any(column[cause] for column in columns):
            lines.append(_line(f"idle: {meaning}", [column[cause] for column in columns] + no_link))
    if link and of_link:
        lines.append(_line("idle: no sum in progress", [*none, 100 - of_link[0]]))
        lines.append(
            f"{link['num_sums']} sums over ranks were in progress for {link['busy_ns'] / 1e6:.1f} ms; other work hid "
            f"{link['hidden']:.1%} of that"
        )
    return "\n".join(lines)


def _line(name: str, percents: Iterable[float]) -> str:
    return f"{name:36}" + "".join(f"{percent:>8.1f} %" if percent else f"{'-':>10}" for percent in percents)
