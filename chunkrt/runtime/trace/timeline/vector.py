"""Draw a timeline as SVG, alone or in an HTML page. The output contains no scripts, fonts or links.

Bars show their description when the pointer rests on them. Adjacent bars of one kind that are too narrow to be
distinguished are drawn as one bar, so files of long runs stay small.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from math import floor, log10

from chunkrt.runtime.trace.timeline.picture import COLOURS, LABELS, Bar, Picture, Row, ink

WIDTH, LEFT, RIGHT = 1200, 110, 20
PLOT = WIDTH - LEFT - RIGHT
WORKER_HEIGHT, SHARE_HEIGHT, GAP = 34, 26, 6
CHUNKS_HEIGHT, MOST_CHUNK_HEIGHT = 360, 18
NARROW = 0.25
"""Distance in pixels below which gaps and widths are not visible."""


def to_svg(picture: Picture) -> str:
    """Return the timeline as an SVG document."""
    parts: list[str] = [_text(LEFT, 22, picture.title, "title")]
    y = 40.0
    for row in picture.workers:
        parts += _row(row, y, WORKER_HEIGHT, picture.milliseconds)
        y += WORKER_HEIGHT + GAP
    y += GAP
    for panel in filter(None, (picture.chunks, picture.sequences)):
        height = min(MOST_CHUNK_HEIGHT, CHUNKS_HEIGHT / len(panel))
        every = max(1, round(11 / height))
        for index, (name, bars) in enumerate(panel):
            named = name if index % every == 0 else "", bars
            parts += _row(named, y, height * 0.9, picture.milliseconds)
            y += height
        y += GAP if panel is not picture.sequences and picture.sequences else 0
    parts += _axis(y, picture.milliseconds)
    y += 40
    for row in picture.shares:
        parts += _row(row, y, SHARE_HEIGHT, 100)
        parts += _percents(row[1], y)
        y += SHARE_HEIGHT + GAP
    y = y + 18
    parts += _legend(picture.kinds, y)
    y += 20 * -(-len(picture.kinds) // 4)
    style = "".join(f".k{index}{{fill:{colour}}}" for index, colour in enumerate(COLOURS.values()))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:g}" font-family="sans-serif" '
        f'font-size="12">\n<style>.title{{font-size:15px}}.end{{text-anchor:end}}.mid{{text-anchor:middle}}{style}'
        f'</style>\n<rect width="{WIDTH}" height="{y:g}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def to_html(picture: Picture) -> str:
    """Return the timeline as an HTML page."""
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{_clean(picture.title)}</title>\n'
        f'<body style="margin:1em auto;max-width:{WIDTH}px">\n{to_svg(picture)}</body>\n</html>\n'
    )


def _row(row: Row, y: float, height: float, width: float) -> Iterator[str]:
    name, bars = row
    if name:
        yield _text(LEFT - 8, y + height / 2 + 4, name, "end")
    scale = PLOT / width if width else 0.0
    for bar in _visible(bars, NARROW / scale if scale else 0.0):
        left, length = LEFT + bar.start * scale, (bar.end - bar.start) * scale
        top, thickness = y + height * bar.lane / bar.lanes, height / bar.lanes
        kind = list(COLOURS).index(bar.kind)
        yield (
            f'<path class="k{kind}" d="M{left:.2f} {top:.1f}h{length:.2f}v{thickness:.1f}h-{length:.2f}z">'
            f"<title>{_clean(bar.text)}</title></path>"
        )


def _visible(bars: Sequence[Bar], narrow: float) -> Iterator[Bar]:
    """Yield the bars, with narrow ones joined to adjacent bars of the same kind and lane."""
    waiting: Bar | None = None
    for bar in bars:
        is_like = waiting is not None and waiting[2:3] + waiting[4:] == bar[2:3] + bar[4:]
        is_near = waiting is not None and bar.start - waiting.end < narrow
        if waiting is not None and is_like and is_near and bar.end - waiting.start < 4 * narrow:
            waiting = waiting._replace(end=bar.end, text=LABELS[bar.kind])
        else:
            if waiting is not None:
                yield waiting
            waiting = bar
    if waiting is not None:
        yield waiting


def _axis(y: float, milliseconds: float) -> Iterator[str]:
    yield f'<path d="M{LEFT} {y:.1f}h{PLOT}" stroke="#000"/>'
    quarter = max(milliseconds, 1e-6) / 4
    decade = 10.0 ** floor(log10(quarter))
    step = max(factor * decade for factor in (1, 2, 5) if factor == 1 or factor * decade <= quarter)
    for tick in range(int(milliseconds / step) + 1):
        x = LEFT + PLOT * tick * step / (4 * quarter)
        yield f'<path d="M{x:.1f} {y:.1f}v5" stroke="#000"/>'
        yield _text(x, y + 18, f"{tick * step:,.10g}{'' if tick else ' ms'}", "mid")


def _percents(bars: Iterable[Bar], y: float) -> Iterator[str]:
    for bar in bars:
        if bar.end - bar.start >= 4:
            x = LEFT + PLOT * (bar.start + bar.end) / 200
            yield (
                f'<text class="mid" x="{x:.1f}" y="{y + SHARE_HEIGHT / 2 + 4:.1f}" fill="{ink(bar.kind)}" '
                f'pointer-events="none">{bar.end - bar.start:.1f} %</text>'
            )


def _legend(kinds: Iterable[str], y: float) -> Iterator[str]:
    for index, kind in enumerate(kinds):
        x, top = LEFT + index % 4 * 270, y + index // 4 * 20 - 10
        number = list(COLOURS).index(kind)
        yield f'<rect class="k{number}" x="{x}" y="{top:g}" width="12" height="12"/>'
        yield _text(x + 18, top + 10, LABELS[kind])


def _text(x: float, y: float, text: str, style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}">{_clean(text)}</text>'


def _clean(text: str) -> str:
    """Return escaped text, without the control characters that XML forbids."""
    return escape("".join(c if c >= " " and not "\ud800" <= c <= "\udfff" else "\ufffd" for c in text))
