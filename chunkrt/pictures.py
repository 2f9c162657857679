"""Pictures for `--plot`, drawn with matplotlib, which is imported on first use; and tables for notebooks, which display
objects with `_repr_html_`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from html import escape
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
    """Axes with named lines. The points of a line are joined in the order of x.

    Attributes:
        choices: for each line, the values that tell it apart: lines with the same first value share a colour, and lines
            with the same further values share a line style. Without choices each line has its own colour.
        cloud: further points, drawn small and grey behind the lines.
        labels: texts next to points, by point; a text that would cover an earlier one is left out.
    """

    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[PlotPoint]]
    choices: Mapping[str, tuple[Hashable, ...]] = {}
    cloud: Sequence[PlotPoint] = ()
    labels: Mapping[PlotPoint, str] = {}


STYLES = ("-", "--", ":", "-.")
MARKERS = "os^Dvx*P"
MOST_IN_LEGEND = 60
"""Maximum number of lines of one picture, so that each has a place in the legend."""
LEAST_RATIO_OF_LOGARITHMS = 4
"""A horizontal axis is logarithmic, with its values as ticks, if its largest value is at least this multiple of its
smallest and the values are whole numbers."""


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
        raise ConfigError('--plot needs matplotlib, which is not installed; run pip install "chunkrt[plot]"') from error


def draw_panels(panels: Sequence[Panel], path: Path, title: str) -> None:
    """Draw panels next to each other, with one legend at the right. Vertical axes start at 0.

    If every line of a panel has one point at the same place, the points are drawn as bars.

    Raises:
        ConfigError: there are too many lines, or the file cannot be written; see also `check_picture`.
    """
    check_picture(path)
    if (most := max(len(panel.lines) for panel in panels)) > MOST_IN_LEGEND:
        raise ConfigError(f"cannot draw {most} lines in one picture, at most {MOST_IN_LEGEND}; choose fewer rows")
    from matplotlib.figure import Figure

    height = max(5.0, 1.0 + 0.2 * most)
    longest = max(len(name) for panel in panels for name in panel.lines)
    figure = Figure(figsize=(1.2 + 5.5 * len(panels) + 0.075 * longest, height), layout="constrained")
    handles: dict[str, Any] = {}
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        if _is_at_one_place(panel):
            _draw_bars(axes, panel)
        else:
            handles |= _draw_lines(axes, panel)
        plain(axes)
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside right center", frameon=False, fontsize=9)
    figure.suptitle(title, x=0.01, ha="left")
    save_picture(figure, path)


def _is_at_one_place(panel: Panel) -> bool:
    """Return whether a panel has several lines, and each has one point at the same x."""
    xs = [point.x for points in panel.lines.values() for point in points]
    return 1 < len(xs) == len(panel.lines) and len(set(xs)) == 1 and not panel.cloud


def _looks(panel: Panel) -> dict[str, tuple[str, str, str]]:
    """Return the colour, the line style and the marker of each line."""
    firsts, others = dict[Hashable, int](), dict[Hashable, int]()
    looks = {}
    for name in panel.lines:
        first, *rest = panel.choices.get(name, (name,))
        colour = firsts.setdefault(first, len(firsts))
        style = others.setdefault(tuple(rest), len(others)) + colour // len(COLOURS)
        looks[name] = (COLOURS[colour % len(COLOURS)], STYLES[style % len(STYLES)], MARKERS[style % len(MARKERS)])
    return looks


def _draw_lines(axes: Any, panel: Panel) -> dict[str, Any]:
    """Draw the lines of a panel, and return their handles by name."""
    if panel.cloud:
        axes.scatter([p.x for p in panel.cloud], [p.y for p in panel.cloud], s=6, color="#bbbbbb", zorder=1)
    handles = {}
    for name, (colour, style, marker) in _looks(panel).items():
        xs, ys, deviations = zip(*sorted(panel.lines[name]), strict=True)
        bars = deviations if any(deviations) else None
        looks = {"marker": marker, "markersize": 4, "linewidth": 1, "linestyle": style, "capsize": 2, "color": colour}
        handles[name] = axes.errorbar(xs, ys, bars, **looks)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.set_ylim(bottom=0)
    _draw_labels(axes, panel.labels)
    _scale(axes, sorted({point.x for points in panel.lines.values() for point in points}), panel)
    return handles


def _draw_labels(axes: Any, labels: Mapping[PlotPoint, str]) -> None:
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    drawn: list[PlotPoint] = []
    for point, text in labels.items():
        if any(abs(p.y - point.y) < 0.04 * (top - bottom) and abs(p.x - point.x) < 0.4 * (right - left) for p in drawn):
            continue
        drawn.append(point)
        is_right = point.x > (left + right) / 2
        axes.annotate(
            text,
            (point.x, point.y),
            xytext=(-5 if is_right else 5, 4),
            textcoords="offset points",
            horizontalalignment="right" if is_right else "left",
            fontsize=8,
        )


def _scale(axes: Any, xs: Sequence[float], panel: Panel) -> None:
    """Give a horizontal axis of whole numbers its values as ticks."""
    if panel.cloud or not all(float(x).is_integer() for x in xs) or len(xs) > 12:
        return
    if len(xs) > 1 and xs[0] > 0 and xs[-1] >= LEAST_RATIO_OF_LOGARITHMS * xs[0]:
        axes.set_xscale("log", base=2)
    axes.set_xticks(xs, [f"{x:.0f}" for x in xs])
    axes.minorticks_off()


def _draw_bars(axes: Any, panel: Panel) -> None:
    names, points = list(panel.lines), [points[0] for points in panel.lines.values()]
    deviations = [point.deviation for point in points]
    colours = [colour for colour, _, _ in _looks(panel).values()]
    axes.barh(
        names, [point.y for point in points], xerr=deviations if any(deviations) else None, color=colours, height=0.7
    )
    axes.invert_yaxis()
    axes.set_xlabel(f"{panel.y_label}; {panel.x_label}: {points[0].x:g}")
    axes.set_xlim(left=0)
    axes.tick_params(axis="y", labelsize=8)


def plain(axes: Any) -> None:
    """Format axes with a faint grid and without a frame."""
    axes.grid(visible=True, which="major", color="#e5e5e5")
    axes.set_axisbelow(True)
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


def html_table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with a caption; all texts are escaped."""
    lines = [_line("th", heads), *(_line("td", row) for row in rows)]
    return f"<table><caption>{escape(caption)}</caption>{''.join(lines)}</table>"


def _line(tag: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
