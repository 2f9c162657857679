"""Pictures for `--plot`. They are drawn with matplotlib, which is imported on first use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from chunkrt.errors import ConfigError, cause_of
from chunkrt.files import written_aside

FORMATS = (".png", ".svg")

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#f0e442")
"""Okabe and Ito's colours, which colour-blind people can distinguish."""


class PlotPoint(NamedTuple):
    """A point of a line. If `deviation` is set, it is drawn as a vertical bar."""

    x: float
    y: float
    deviation: float = 0.0


class Panel(NamedTuple):
    """Axes with named lines. The points of a line are joined in the order of x."""

    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[PlotPoint]]


def check_picture(path: Path) -> None:
    """Check that a picture can be drawn, before anything runs.

    Raises:
        ConfigError: the format is unknown, matplotlib is missing, or the path is not a file.
    """
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"cannot draw {path}: its name must end with one of {', '.join(FORMATS)}")
    if path.exists() and not path.is_file():
        raise ConfigError(f"cannot draw {path}: it is not a file; name a file")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib, which is not installed; run pip install 'chunkrt[plot]'") from error


def draw_panels(panels: Sequence[Panel], path: Path, title: str) -> None:
    """Draw panels next to each other. All axes start at 0.

    Raises:
        ConfigError: the file cannot be written; see also `check_picture`.
    """
    check_picture(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 + 5 * len(panels), 5), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for (name, points), colour in zip(panel.lines.items(), cycle(COLOURS), strict=False):
            ordered = sorted(points)
            xs, ys, deviations = zip(*ordered, strict=True)
            bars = deviations if any(deviations) else None
            axes.errorbar(xs, ys, bars, marker="o", markersize=4, linewidth=1, capsize=2, color=colour, label=name)
        axes.set_xlabel(panel.x_label)
        axes.set_ylabel(panel.y_label)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=9)
        plain(axes)
    figure.suptitle(title, x=0.01, ha="left")
    save_picture(figure, path)


def plain(axes: Any) -> None:
    """Format axes with a faint grid and without a frame."""
    axes.grid(visible=True, which="major", color="#e5e5e5")
    axes.spines[["top", "right"]].set_visible(False)


def save_picture(figure: Any, path: Path) -> None:
    """Write a figure atomically. Equal figures give identical files.

    Args:
        path: path of the file; its suffix selects the format from FORMATS.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        with written_aside(path) as aside:
            metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
            figure.savefig(aside, format=path.suffix[1:].lower(), dpi=100, metadata=metadata)
    except OSError as error:
        raise ConfigError(f"cannot draw {path}: {cause_of(error)}") from error
