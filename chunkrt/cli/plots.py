"""Plots of `--plot` in bench, simulate and tune."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from chunkrt.cli.bench_tests import BenchRow, BenchSetup, ParallelRow
from chunkrt.pictures import Panel, PlotPoint, draw_panels
from chunkrt.simulate import Simulation
from chunkrt.simulate.partition_search import ON_CPU
from chunkrt.simulate.tune import Setup, Tuned

RATE = "tokens/s"


def draw_bench(rows: Sequence[BenchSetup], path: Path) -> None:
    """Draw rates over lengths, or over depths if there are several, with one panel per kind of test."""
    models = list(dict.fromkeys(row.model for row in rows))
    depths = {row.n_depth for row in rows if isinstance(row, BenchRow)}
    panels: dict[tuple[str, str], dict[str, list[PlotPoint]]] = {}

    def add(kind: str, x_label: str, name: Sequence[str], point: PlotPoint) -> None:
        panels.setdefault((kind, x_label), {}).setdefault(", ".join(filter(None, name)), []).append(point)

    for row in rows:
        name = [row.model, f"{row.threads} threads"]
        if isinstance(row, ParallelRow):
            pairs = (("prefill", row.pp, row.speed_pp, row.stddev_pp), ("decode", row.tg, row.speed_tg, row.stddev_tg))
            for kind, length, speed, deviation in pairs:
                if length:
                    add(kind, "sequences", [*name, f"{length} tokens"], PlotPoint(row.pl, speed, deviation))
        elif isinstance(row, BenchRow):
            kind = "prefill" if not row.n_gen else "prefill and decode" if row.n_prompt else "decode"
            length = row.n_prompt + row.n_gen
            point = PlotPoint(row.n_depth if len(depths) > 1 else length, row.avg_ts, row.stddev_ts)
            several = [f"{length} tokens"] if len(depths) > 1 else []
            add(kind, "tokens before" if several else "tokens", [*name, *several], point)
    drawn = [Panel(x_label, f"{kind}, {RATE}", lines) for (kind, x_label), lines in panels.items()]
    draw_panels(drawn, path, f"chunkrt bench {' '.join(models)}")


def draw_simulations(model: str, rows: Sequence[Simulation], path: Path) -> None:
    """Draw rates and times to first token over prompt lengths, with one line per chunk length and policy."""
    rates: dict[str, list[PlotPoint]] = {}
    times: dict[str, list[PlotPoint]] = {}
    choices: dict[str, tuple[str, str]] = {}
    for row in rows:
        name = f"chunk {row.chunks_text}, {row.policy}"
        choices[name] = (row.chunks_text, row.policy)
        rates.setdefault(name, []).append(PlotPoint(row.prompt_length, row.tokens_per_s))
        times.setdefault(name, []).append(PlotPoint(row.prompt_length, row.time_to_first_token_ms))
    kinds = {RATE: rates, "time to first token, ms": times}
    panels = [Panel("prompt tokens", name, lines, choices) for name, lines in kinds.items()]
    draw_panels(panels, path, f"{model} on {rows[0].device}, scheme {rows[0].scheme}, simulated")


def draw_tuned(tuned: Tuned, path: Path) -> None:
    """Draw choices by memory and time: the Pareto front, the choice that was taken, and the default."""
    front: list[PlotPoint] = []
    cloud = {PlotPoint(choice.peak_memory_bytes / 1e6, choice.time_ms): choice for choice in tuned.choices}
    for point in sorted(cloud):
        if not front or point.y < front[-1].y:
            front.append(point)
    lines = {"least time for its memory": front}
    for name, choice in (("default", tuned.default), ("chosen", tuned.best)):
        lines[name] = [PlotPoint(choice.peak_memory_bytes / 1e6, choice.time_ms)]
    labels = {point: _setup(cloud[point]) for point in front}
    title = f"{tuned.model} on {tuned.device.name}, scheme {tuned.scheme}: {tuned.num_simulated} choices simulated"
    panel = Panel("memory, MB", "time to first token, ms", lines, cloud=list(cloud), labels=labels)
    draw_panels([panel], path, title)


def _setup(choice: Setup) -> str:
    attention = "" if choice.attention == ON_CPU else f", attention {choice.attention}"
    return f"chunk {choice.graphs or choice.chunk_length}, {choice.partition}{attention}"
