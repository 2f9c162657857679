"""Gain of attention on the NPU, simulated: prompts with and without, on every device that comes with chunkrt.

    python bench/npu_attention.py --plot docs/images/npu-attention.png

prints the table of docs/scheduling.md. Each chunk uses the shortest sufficient window of 64, 512 and 2048.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from chunkrt.cli.plan import read_model
from chunkrt.engine.npu_attention import near_by_reach
from chunkrt.engine.options import EngineOptions
from chunkrt.graph.plan import Plan
from chunkrt.pictures import Panel, PlotPoint, draw_panels
from chunkrt.quant.scheme import find_scheme
from chunkrt.simulate import find_device, find_shape, shapes, simulate

LENGTHS = (64, 512, 2048)
DEVICES = ("sd8gen2", "sd8gen3", "sd8elite", "sdxelite")
MODELS = {"smollm2-135m-instruct": 32, "qwen1.5-1.8b": 128}
"""Models with their chunk lengths."""
DRAWN = "sd8gen3"
SCHEME = "w8a16"


def rate(plan: Plan, near: Mapping[int, Plan], device: str, prompt_length: int, chunk_length: int) -> float:
    """Return the predicted prompt tokens a second, with the plans `near` for attention on the NPU."""
    return simulate(
        plan,
        find_device(device),
        prompt_length=prompt_length,
        chunk_length=chunk_length,
        policy="look_ahead",
        scheme=find_scheme(SCHEME),
        near=near,
    ).tokens_per_s


@click.command()
@click.option("--plot", type=click.Path(path_type=Path), help=f"Draw the rates of {DRAWN} to this file.")
def main(plot: Path | None) -> None:
    """Print rates with attention on the CPU, and on the NPU."""
    click.echo(f"| model | device | {' | '.join(f'{length} tokens' for length in LENGTHS)} |")
    click.echo(f"| --- | --- |{' ---: |' * len(LENGTHS)}")
    panels = []
    for model, chunk in MODELS.items():
        far = find_shape(model).plan() if model in shapes() else read_model(model, EngineOptions(scheme=SCHEME))[0]
        options = EngineOptions(npu="qnn", attention="npu", npu_window=",".join(map(str, LENGTHS)))
        near = near_by_reach(far, {}, options, far.context_length)
        lines: dict[str, list[PlotPoint]] = {"attention on the CPU": [], "attention on the NPU": []}
        for device in DEVICES:
            cells = []
            for length in LENGTHS:
                rates = [rate(far, plans, device, length, chunk) for plans in ({}, near)]
                cells.append(" / ".join(f"{each:.0f}" for each in rates))
                if device == DRAWN:
                    for line, each in zip(lines.values(), rates, strict=True):
                        line.append(PlotPoint(length, each))
            click.echo(f"| {model} | {device} | {' | '.join(cells)} |")
        panels.append(Panel("prompt tokens", f"{model}, tokens/s", lines))
    if plot is not None:
        draw_panels(panels, plot, f"Snapdragon 8 Gen 3, scheme {SCHEME}, simulated")


if __name__ == "__main__":
    main()
