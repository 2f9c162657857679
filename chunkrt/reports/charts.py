"""Charts of a report as SVG: Pareto fronts, and bars of rates. Their colours are those of the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from chunkrt.reports.results import Result, groups_of, short_name
from chunkrt.reports.tables import MARKS, decimals_for

WIDTH, HEIGHT = 460, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 14, 46

MOST_FRONTS = 24
"""Maximum number of groups with charts of their fronts; the table marks the fronts of all groups."""

MOST_RATES = 40
"""Maximum number of bars of one chart of rates; the table has all rates."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart with its title."""

    title: str
    svg: str


def fronts(results: Sequence[Result]) -> tuple[list[Chart], str]:
    """Return a chart of time over memory for each group, and of time over energy if all results of the group have it;
    and a note about groups without charts.
    """
    groups = groups_of(results)
    charts = []
    for (model, place, length), members in list(groups.items())[:MOST_FRONTS]:
        own = [results[index] for index in members]
        prompt = "" if length is None else f", {length} tokens"
        title = f"{short_name(model) or 'a model'} on {place}{prompt}"
        charts.append(Chart(title=title, svg=_front(own, "memory, MB", lambda r: (r.memory_bytes or 0) / 1e6)))
        if all(result.energy_joules is not None for result in own):
            charts.append(Chart(title=title, svg=_front(own, "energy, J", lambda r: r.energy_joules or 0.0)))
    note = ""
    if len(groups) > MOST_FRONTS:
        note = f"Charts show the first {MOST_FRONTS} of {len(groups)} groups; the table marks the fronts of all."
    return charts, note


def describe(result: Result, results: Sequence[Result]) -> str:
    """Return the choices of a result that are not equal in all results."""
    parts = [
        ("model", short_name(result.model)),
        ("place", result.place),
        ("scheme", result.scheme),
        ("partition", result.partition),
        ("policy", result.policy),
        ("prompt_length", f"prompt {result.prompt_length}"),
        ("chunk_length", f"chunk {result.chunk_length}"),
        ("chunks_in_flight", f"{result.chunks_in_flight} in flight"),
        ("threads", f"{result.threads} threads"),
        ("source", short_name(result.source)),
    ]
    varying = [
        text
        for name, text in parts
        if getattr(result, name) not in (None, "") and len({getattr(other, name) for other in results}) > 1
    ]
    always = f"{short_name(result.model) or short_name(result.source)} on {result.place or 'this machine'}"
    return ", ".join([*varying, *([result.mark] if result.mark else [])]) or always


def _front(results: Sequence[Result], x_label: str, x_of: Callable[[Result], float]) -> str:
    """Return a scatter of time over another figure, with the front as a line."""
    points = [(x_of(result), result.ttft_ms or 0.0) for result in results]
    front: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    x_axis, y_axis = _Axis.of([x for x, _ in points]), _Axis.of([y for _, y in points])

    def at(point: tuple[float, float]) -> tuple[float, float]:
        right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
        return LEFT + x_axis.share(point[0]) * (right - LEFT), bottom - y_axis.share(point[1]) * (bottom - TOP)

    parts = list(_axes(x_axis, y_axis, x_label, "time to first token, ms"))
    steps = []
    for index, point in enumerate(front):
        x, y = at(point)
        steps.append(f"M{x:.1f} {y:.1f}" if not index else f"H{x:.1f}V{y:.1f}")
    parts.append(f'<path class="front-line" d="{"".join(steps)}"/>')
    on_front = set(front)
    order = sorted(range(len(points)), key=lambda index: points[index] in on_front)
    for index in order:
        result, point = results[index], points[index]
        x, y = at(point)
        mark = MARKS[result.origin]
        time, other = (f"{v:,.{axis.decimals}f}" for v, axis in ((point[1], y_axis), (point[0], x_axis)))
        unit = x_label.rpartition(" ")[2]
        tip = f"{describe(result, results)}\n{time} ms {mark}, {other} {unit} {mark}\n{result.origin}"
        is_on = point in on_front
        focus = ' tabindex="0"' if is_on else ""
        parts.append(
            f'<circle class="{result.origin}{" on" if is_on else ""}" cx="{x:.1f}" cy="{y:.1f}" '
            f'r="{5 if is_on else 3}" data-tip="{_clean(tip)}"{focus}/>'
        )
    label = f"{len(points)} points, {len(front)} on the front of time to first token and {x_label.split(',')[0]}"
    return _svg(WIDTH, HEIGHT, label, parts)


LOGARITHMIC_FROM = 20.0
"""An axis is logarithmic if the largest value is at least this multiple of the smallest."""


@dataclass(frozen=True, kw_only=True)
class _Axis:
    """An axis that holds some values, with ticks at round numbers."""

    low: float
    high: float
    ticks: Sequence[float]
    decimals: int
    is_logarithmic: bool

    @staticmethod
    def of(values: Sequence[float]) -> _Axis:
        least, most = min(values), max(values)
        decimals = decimals_for(values)
        if least > 0 and most >= LOGARITHMIC_FROM * least:
            low, high = least / 1.25, most * 1.25
            decades = range(floor(log10(low)), ceil(log10(high)) + 1)
            factors = (1, 2, 5) if len(decades) <= 4 else (1,)
            ticks = [factor * 10.0**decade for decade in decades for factor in factors]
            shown = [tick for tick in ticks if low <= tick <= high]
            return _Axis(low=low, high=high, ticks=shown, decimals=decimals, is_logarithmic=True)
        margin = (most - least) * 0.06 or abs(most) * 0.1 or 1.0
        low, high = (max(0.0, least - margin) if least >= 0 else least - margin), most + margin
        raw = (high - low) / 5
        decade = 10.0 ** floor(log10(raw))
        step = next(factor * decade for factor in (1, 2, 5, 10) if factor * decade >= raw)
        ticks = [tick * step for tick in range(ceil(low / step), floor(high / step) + 1)]
        return _Axis(low=low, high=high, ticks=ticks, decimals=decimals, is_logarithmic=False)

    def share(self, value: float) -> float:
        """Return the place of a value on the axis, from 0 to 1."""
        if self.is_logarithmic:
            return log10(value / self.low) / log10(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def text(self, tick: float) -> str:
        """Return a tick's label."""
        step = tick if self.is_logarithmic else self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else tick
        return f"{tick:,.{max(0, -floor(log10(abs(step) or 1.0) + 1e-9))}f}"


def _axes(x_axis: _Axis, y_axis: _Axis, x_label: str, y_label: str) -> Iterator[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for tick in y_axis.ticks:
        y = bottom - y_axis.share(tick) * (bottom - TOP)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>'
        yield f'<text class="end" x="{LEFT - 7}" y="{y + 4:.1f}">{y_axis.text(tick)}</text>'
    for tick in x_axis.ticks:
        x = LEFT + x_axis.share(tick) * (right - LEFT)
        yield f'<path class="grid" d="M{x:.1f} {TOP}V{bottom}"/>'
        yield f'<text class="mid" x="{x:.1f}" y="{bottom + 17}">{x_axis.text(tick)}</text>'
    yield f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>'
    x_label, y_label = (
        f"{label} (logarithmic)" if axis.is_logarithmic else label
        for label, axis in ((x_label, x_axis), (y_label, y_axis))
    )
    yield f'<text class="mid label" x="{(LEFT + right) / 2:.1f}" y="{HEIGHT - 8}">{_clean(x_label)}</text>'
    middle = (TOP + bottom) / 2
    yield f'<text class="mid label" transform="translate(13 {middle:.1f})rotate(-90)">{_clean(y_label)}</text>'


@dataclass(frozen=True, kw_only=True)
class RateBar:
    """A bar of a chart of rates. `share` is its length relative to the longest bar of the report, 0 to 1."""

    name: str
    rate: str
    share: float
    result: Result


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The rates of one prompt length, the fastest first, and a note about rates that are not drawn."""

    title: str
    bars: Sequence[RateBar]
    note: str


def rates(results: Sequence[Result]) -> list[Rates]:
    """Return a chart of rates for every prompt length."""
    known = [result for result in results if result.tokens_per_s is not None and result.prompt_length is not None]
    by_length: dict[int, list[Result]] = {}
    for result in known:
        by_length.setdefault(result.prompt_length or 0, []).append(result)
    charts = []
    for length, own in sorted(by_length.items()):
        own.sort(key=lambda result: -(result.tokens_per_s or 0.0))
        most = own[0].tokens_per_s or 1.0
        decimals = decimals_for([result.tokens_per_s or 0.0 for result in own])
        bars = [
            RateBar(
                name=describe(result, own),
                rate=f"{result.tokens_per_s:,.{decimals}f}",
                share=(result.tokens_per_s or 0.0) / most,
                result=result,
            )
            for result in own[:MOST_RATES]
        ]
        left = len(own) - len(bars)
        note = f"the {len(bars)} fastest of {len(own)} prefills; the table below has all" if left else ""
        charts.append(Rates(title=f"{length} prompt tokens", bars=bars, note=note))
    return charts


def _svg(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{_clean(label)}">'
        + "".join(parts)
        + "</svg>"
    )


def _clean(text: str) -> str:
    """Return escaped text, without control characters other than line breaks."""
    return escape("".join(c if c >= " " or c == "\n" else "\ufffd" for c in text), quote=True).replace("\n", "&#10;")
