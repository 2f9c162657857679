"""Errors of layers and linears as a picture, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from chunkrt.evaluation.layers import LayersRun, LinearFigures
from chunkrt.pictures import COLOURS, check_picture, plain, save_picture

MARKERS = {8: "o", 16: "s"}
"""Markers by bits of activations."""


def draw_layers(run: LayersRun, path: Path, title: str) -> None:
    """Draw two logarithmic panels over the layers: errors and outliers. Rings mark shadows, and squares mark 16 bits.

    Args:
        path: path of the picture; its suffix is the format, one of FORMATS.

    Raises:
        ConfigError: see `check_picture`; or the file cannot be written.
    """
    check_picture(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    errors, outliers = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    errors.set_title(title, loc="left")
    head = 1 + max((layer.layer for layer in run.layers), default=-1)
    kinds: dict[str, list[LinearFigures]] = {}
    for linear in run.linears:
        kinds.setdefault(linear.kind, []).append(linear)
    for (kind, linears), colour in zip(kinds.items(), cycle(COLOURS), strict=False):
        places = [head if linear.layer is None else linear.layer for linear in linears]
        _draw(errors, places, linears, lambda linear: linear.error, colour, kind)
        _draw(outliers, places, linears, lambda linear: linear.outlier_ratio, colour, kind)
        for place, linear in zip(places, linears, strict=True):
            if linear.error_unshadowed is not None:
                errors.plot(
                    [place, place], [linear.error, linear.error_unshadowed], color=colour, linewidth=1, alpha=0.6
                )
                errors.plot([place], [linear.error_unshadowed], "x", color=colour, markersize=6)
    residuals = [layer for layer in run.layers if layer.error > 0]
    errors.plot(
        [layer.layer for layer in residuals], [layer.error for layer in residuals], "--", color="#000", linewidth=1.5
    )
    errors.set_ylabel("relative error")
    outliers.set_ylabel("largest input / median channel")
    outliers.set_xlabel("layer")
    step = max(1, -(-head // 16))
    outliers.set_xticks([*range(0, head, step), head], [*map(str, range(0, head, step)), "head"])
    for axes in (errors, outliers):
        axes.set_yscale("log")
        plain(axes)
    figure.legend(handles=_legend(run, kinds), loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    save_picture(figure, path)


def _draw(
    axes: Any,
    places: Sequence[int],
    linears: Sequence[LinearFigures],
    value: Callable[[LinearFigures], float | None],
    colour: str,
    kind: str,
) -> None:
    """Plot one line. Missing values are omitted, and so are zeros, which a logarithmic scale cannot show."""
    points = [(place, value(linear), linear) for place, linear in zip(places, linears, strict=True)]
    points = [point for point in points if point[1]]
    axes.plot([place for place, _, _ in points], [y for _, y, _ in points], color=colour, linewidth=1, label=kind)
    for place, y, linear in points:
        axes.plot(place, y, MARKERS[linear.activation_bits], color=colour, markersize=4)
        if linear.has_shadow:
            axes.plot(place, y, "o", color=colour, fillstyle="none", markersize=10, markeredgewidth=1.5)


def _legend(run: LayersRun, kinds: Iterable[str]) -> list[Any]:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour, label=kind) for kind, colour in zip(kinds, cycle(COLOURS), strict=False)]
    handles.append(Line2D([], [], color="#000", linestyle="--", label="residual stream, whole run"))
    marks: dict[str, Any] = {"color": "#666", "linestyle": "none"}
    for bits, marker in MARKERS.items():
        if any(linear.activation_bits == bits for linear in run.linears):
            handles.append(Line2D([], [], marker=marker, markersize=4, label=f"{bits}-bit input", **marks))
    if any(linear.has_shadow for linear in run.linears):
        handles.append(Line2D([], [], marker="o", fillstyle="none", markersize=10, label="has a shadow", **marks))
        handles.append(Line2D([], [], marker="x", markersize=6, label="without its shadow", **marks))
    return handles
