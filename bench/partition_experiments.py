"""Comparison of partitions: one model, simulated over placements, schemes, chunk lengths and policies.

    python bench/partition_experiments.py gemma-2b --device sd8gen3 --plot partition.png

Prints the fastest choices of every placement. The plot needs matplotlib.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import click

import chunkrt
from chunkrt.graph.placement import Placement
from chunkrt.progress import ShownProgress
from chunkrt.simulate.experiments import Row

PLACEMENTS: dict[str, Placement] = {
    "as it is": {},
    "norms on cpu": {"model.layers.*_layernorm": "cpu", "model.norm": "cpu"},
    "down_proj on cpu": {"model.layers.*.mlp.down_proj": "cpu"},
    "all on cpu": {"": "cpu"},
}


@click.command()
@click.argument("model", default="gemma-2b")
@click.option("--device", default="sd8gen3", show_default=True)
@click.option("-p", "--prompt-length", type=int, default=1024, show_default=True)
@click.option("--best", type=click.IntRange(min=1), default=3, show_default=True, help="Rows of each placement.")
@click.option("--workers", type=int, help="Processes.  [default: the cores]")
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Plot tokens/s by chunk length to this file."
)
def main(model: str, device: str, prompt_length: int, best: int, workers: int | None, plot: Path | None) -> None:
    """Print the fastest choices of MODEL, placement by placement."""
    with ShownProgress() as progress:
        rows = chunkrt.experiment(
            model,
            devices=[device],
            placements=PLACEMENTS.values(),
            schemes=["w8a8", "w8a16"],
            prompt_lengths=[prompt_length],
            chunk_lengths=[32, 64, 128, 256, 512],
            policies=["sequential", "in_order", "out_of_order", "look_ahead"],
            workers=workers,
            progress=progress,
        )
    of_placement = {
        name: sorted((r for r in rows if r.placement == placement), key=lambda r: -r.tokens_per_s)
        for name, placement in PLACEMENTS.items()
    }
    click.echo(f"{model} on {device}, a prompt of {prompt_length} tokens; {len(rows)} simulations")
    click.echo("| placement | scheme | chunk | policy | tokens/s | NPU busy | CPU busy | MB |")
    click.echo("| --- | --- | ---: | --- | ---: | ---: | ---: | ---: |")
    for name, found in of_placement.items():
        for row in found[:best]:
            shares = f"{row.npu_busy:.0%} | {row.cpu_busy:.0%} | {row.peak_memory_bytes / 1e6:.0f}"
            names = f"{name} | {row.scheme} | {row.chunk_length} | {row.policy}"
            click.echo(f"| {names} | {row.tokens_per_s:.1f} | {shares} |")
    if plot:
        draw(of_placement, f"{model} on {device}, prompt of {prompt_length}", plot)


def draw(of_placement: dict[str, list[Row]], title: str, path: Path) -> None:
    """Plot the best tokens/s at each chunk length, a line for each placement."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise click.ClickException("--plot needs matplotlib: pip install 'chunkrt[plot]'") from error
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    lengths = sorted({row.chunk_length for rows in of_placement.values() for row in rows})
    for name, rows in of_placement.items():
        best: dict[int, float] = defaultdict(float)
        for row in rows:
            best[row.chunk_length] = max(best[row.chunk_length], row.tokens_per_s)
        axes.plot(lengths, [best[length] for length in lengths], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_xlabel("chunk length, tokens")
    axes.set_ylabel("tokens/s, simulated")
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
