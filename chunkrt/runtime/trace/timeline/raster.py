"""A timeline as PNG, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chunkrt.errors import ConfigError
from chunkrt.runtime.trace.timeline.picture import COLOURS, LABELS, Picture, Row, ink


def write_png(picture: Picture, path: Path) -> None:
    """Draw a timeline.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ConfigError(
            "drawing a .png needs matplotlib: pip install 'chunkrt[plot]', or name a .svg or .html file"
        ) from error
    heights = [0.45 * len(picture.workers), min(4.0, 0.25 * len(picture.chunks)), 0.4 * len(picture.shares)]
    figure = Figure(figsize=(12, sum(heights) + 2.4), layout="constrained")
    workers, chunks, shares = figure.subplots(3, 1, height_ratios=heights)
    workers.set_title(picture.title, loc="left")
    _draw(workers, picture.workers, picture.milliseconds)
    _draw(chunks, picture.chunks, picture.milliseconds)
    chunks.set_xlabel("ms")
    _draw(shares, picture.shares, 100)
    shares.set_xlabel("% of the processor's time")
    for index, row in enumerate(picture.shares):
        for bar in row.bars:
            if bar.end - bar.start >= 4:
                share = f"{bar.end - bar.start:.1f} %"
                shares.text((bar.start + bar.end) / 2, index, share, ha="center", va="center", color=ink(bar.kind))
    handles = [Patch(color=COLOURS[kind], label=LABELS[kind]) for kind in picture.kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, format="png", dpi=100)


def _draw(axes: Any, rows: Sequence[Row], width: float) -> None:
    for index, row in enumerate(rows):
        for lane, lanes in sorted({(bar.lane, bar.lanes) for bar in row.bars}):
            bars = [bar for bar in row.bars if (bar.lane, bar.lanes) == (lane, lanes)]
            spans = [(bar.start, bar.end - bar.start) for bar in bars]
            place = index - 0.42 + 0.84 * lane / lanes, 0.84 / lanes
            axes.broken_barh(spans, place, facecolors=[COLOURS[bar.kind] for bar in bars], linewidth=0)
    step = max(1, len(rows) // 16)
    axes.set_yticks(range(0, len(rows), step), [row.name for row in rows[::step]])
    axes.set_xlim(0, width or 1)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
