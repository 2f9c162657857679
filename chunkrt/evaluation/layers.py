"""Quantisation error by layer: the error of each linear alone, and the growth of errors from layer to layer.

Two runs are computed in parallel: one in float, and one with every linear rounded under the scheme. The runs proceed
subgraph by subgraph over all windows, so a model of any size needs only the memory of its largest subgraph. The error
of a single linear is measured on its input in the float run. Values between linears are float32 in both runs; on an NPU
they are float16.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.compile.calibrate import first_values, run_node, run_subgraph
from chunkrt.compile.trials import LOSS_EVERY, Float32, RelativeError, RoundedLinears
from chunkrt.engine_directory.weights import LoadBlocks
from chunkrt.errors import ConfigError
from chunkrt.graph.plan import Node, Plan, linear_nodes
from chunkrt.pictures import COLOURS, check_picture, plain, save_picture
from chunkrt.quant.calibration import Calibration
from chunkrt.quant.scheme import LEVELS, Scheme

NUM_LAYER_WINDOWS = 4
"""Number of windows to measure. Errors of layers need fewer tokens than perplexities."""

NUM_SHOWN = 16
LAYERS_A_LINE = 6

_IN_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")


@dataclass(frozen=True, kw_only=True)
class LinearFigures:
    """Measurements of one linear over all rows of the windows, or for the LM head over every LOSS_EVERY-th row.

    Attributes:
        kind: the last part of the linear's name, such as "down_proj".
        layer: index of its layer; None for a linear outside all layers, such as the LM head.
        error: root mean square of the output's error, relative to that of the float output.
        has_shadow: True if the linear has a shadow.
        error_unshadowed: error without the shadow, on the grid that the linear would then have; None if it has no
            shadow.
        input_peak: the largest magnitude of the input.
        outlier_ratio: input_peak divided by the median of the channels' largest magnitudes; None if the median is 0.
        share_beyond_grid: share of the input's values that exceed the quantisation range, 0 to 1; None under a dynamic
            scheme, whose range depends on the row.
    """

    weight: str
    kind: str
    layer: int | None
    weight_bits: int
    activation_bits: int
    error: float
    has_shadow: bool
    error_unshadowed: float | None
    input_peak: float
    outlier_ratio: float | None
    share_beyond_grid: float | None


@dataclass(frozen=True, kw_only=True)
class LayerFigures:
    """The residual stream after one layer of the rounded run: its relative root mean square error."""

    layer: int
    error: float


@dataclass(frozen=True, kw_only=True)
class LayersRun:
    """Measurements of all linears, in the plan's order, and of all layers, with the amount of text."""

    windows: int
    tokens: int
    linears: Sequence[LinearFigures]
    layers: Sequence[LayerFigures]

    def lines(self) -> Iterator[str]:
        """Return a readable report: the linears with the largest errors, and all layers."""
        ranking = sorted(self.linears, key=lambda linear: -linear.error)
        names = [linear.weight.removesuffix(".weight") for linear in ranking[:NUM_SHOWN]]
        width = max(map(len, names))
        yield f"by layer, {self.windows} windows, {self.tokens} tokens; errors are relative, root mean square"
        head = f"{'largest errors':{width}}  {'bits':>6}  {'error':>8}"
        yield f"  {head}  {'no shadow':>9}  {'outliers':>9}  {'beyond grid':>11}"
        for name, linear in zip(names, ranking, strict=False):
            bits = f"w{linear.weight_bits}a{linear.activation_bits}"
            yield (
                f"  {name:{width}}  {bits:>6}  {_percent(linear.error):>8}  {_percent(linear.error_unshadowed):>9}  "
                f"{_times(linear.outlier_ratio):>9}  {_percent(linear.share_beyond_grid):>11}"
            )
        if len(ranking) > NUM_SHOWN:
            yield f"  ... and {len(ranking) - NUM_SHOWN} more; --json has all"
        yield "  residual stream after layer"
        cells = [f"{layer.layer:4}: {_percent(layer.error):>8}" for layer in self.layers]
        for start in range(0, len(cells), LAYERS_A_LINE):
            yield "  " + "".join(cells[start : start + LAYERS_A_LINE])


def evaluate_layers(
    plan: Plan,
    load: Callable[[str], Float32],
    scheme: Scheme,
    calibration: Calibration | None,
    windows: Sequence[Sequence[int]],
    *,
    load_blocks: LoadBlocks = lambda name: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> LayersRun:
    """Measure every linear and layer.

    Args:
        plan: the decoder in its default partition, without shadows.
        load: returns a weight's float32 values by its plan name, folded according to the calibration; it is called once
            per subgraph.
        calibration: calibration of a static scheme.
        windows: lists of tokens; each window starts at position 0.
        load_blocks: see `write_weights`; the scheme is one that `Planned.settle` returned.
        progress: called with the number of finished subgraphs and the number of all subgraphs.

    Raises:
        ConfigError: the scheme quantises nothing.
        QuantizationError: the calibration belongs to another decoder.
    """
    if scheme.weight_bits is None:
        raise ConfigError(
            f"the scheme {scheme.name!r} quantises nothing, so layers have no errors; choose another --scheme"
        )
    tokens = [np.array(window, np.int64) for window in windows]
    in_float: list[Mapping[str, Any]] = [first_values(ids, np.arange(0, len(ids), LOSS_EVERY)) for ids in tokens]
    rounded = list(in_float)
    found = _LayerSums(plan, scheme)
    for index, subgraph in enumerate(plan.subgraphs):
        progress(index, len(plan.subgraphs))
        weights = {name: load(name) for name in subgraph.weights}
        run = _Runs(found, RoundedLinears(weights, calibration, load_blocks))
        for window in range(len(tokens)):
            in_float[window] = run_subgraph(plan, index, in_float[window], weights, run.in_float)
            rounded[window] = run_subgraph(plan, index, rounded[window], weights, run.rounded)
    progress(len(plan.subgraphs), len(plan.subgraphs))
    return LayersRun(
        windows=len(tokens),
        tokens=sum(map(len, tokens)),
        linears=[found.linear(weight) for weight in found.linears],
        layers=[LayerFigures(layer=layer, error=error.relative) for layer, error in found.residuals.items()],
    )


@dataclass
class _Seen:
    """Observations of one linear."""

    whole: RelativeError = field(default_factory=RelativeError)
    unshadowed: RelativeError = field(default_factory=RelativeError)
    channel_peaks: NDArray[np.float32] | None = None
    num_values: int = 0
    num_beyond: int = 0


class _LayerSums:
    """Results so far."""

    def __init__(self, plan: Plan, scheme: Scheme) -> None:
        self.scheme = scheme
        self.linears = {weight: _Seen() for weight in linear_nodes(plan)}
        self.residuals: dict[int, RelativeError] = {}

    def linear(self, weight: str) -> LinearFigures:
        seen, scheme = self.linears[weight], self.scheme
        assert seen.channel_peaks is not None
        peak, median = float(seen.channel_peaks.max()), float(np.median(seen.channel_peaks))
        in_layer = _IN_LAYER.fullmatch(weight)
        weight_bits, has_shadow = scheme.weight_bits_of(weight), scheme.is_shadowed(weight)
        assert weight_bits is not None
        return LinearFigures(
            weight=weight,
            kind=weight.removesuffix(".weight").rpartition(".")[2],
            layer=int(in_layer[1]) if in_layer else None,
            weight_bits=weight_bits,
            activation_bits=scheme.activation_bits_of(weight),
            error=seen.whole.relative,
            has_shadow=has_shadow,
            error_unshadowed=seen.unshadowed.relative if has_shadow else None,
            input_peak=peak,
            outlier_ratio=peak / median if median else None,
            share_beyond_grid=seen.num_beyond / seen.num_values if scheme.is_static else None,
        )


class _Runs:
    """Functions that compute a node of one subgraph in the two runs. For each window, `in_float` is called first."""

    def __init__(self, found: _LayerSums, linears: RoundedLinears) -> None:
        self._found = found
        self._linears = linears
        self._residuals: dict[int, Float32] = {}

    def in_float(self, node: Node, values: Mapping[str, Any]) -> Any:
        result = run_node(node, values)
        if self._is_linear(node):
            self._see(node, values[node.inputs[0]], result)
        if (layer := _residual_layer(node)) is not None:
            self._residuals[layer] = result
        return result

    def rounded(self, node: Node, values: Mapping[str, Any]) -> Any:
        if self._is_linear(node):
            return self._linears.multiply(node, values[node.inputs[0]], self._found.scheme)
        result = run_node(node, values)
        if (layer := _residual_layer(node)) is not None:
            self._found.residuals.setdefault(layer, RelativeError()).see(result, self._residuals.pop(layer))
        return result

    def _is_linear(self, node: Node) -> bool:
        return node.op == "MatMul" and node.inputs[1] in self._found.linears

    def _see(self, node: Node, x: Float32, expected: Float32) -> None:
        name, scheme = node.inputs[1], self._found.scheme
        seen = self._found.linears[name]
        seen.whole.see(self._linears.multiply(node, x, scheme), expected)
        if scheme.is_shadowed(name):
            seen.unshadowed.see(self._linears.multiply(node, x, replace(scheme, shadowed=())), expected)
        peaks = np.abs(x).max(axis=0)
        seen.channel_peaks = peaks if seen.channel_peaks is None else np.maximum(seen.channel_peaks, peaks)
        if scheme.is_static:
            levels = LEVELS[scheme.activation_bits_of(name)]
            step = self._linears.grids(node, scheme).input_step
            seen.num_beyond += int((np.abs(np.rint(x / step)) > levels).sum())
            seen.num_values += x.size


def _residual_layer(node: Node) -> int | None:
    """Return the layer whose output a node computes."""
    found = _IN_LAYER.fullmatch(node.outputs[0])
    return int(found[1]) if found and found[2] == "output" else None


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.3g} %"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.4g}x"


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
