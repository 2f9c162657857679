"""Tables for notebooks, which display objects with `_repr_html_`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def html_table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with a caption; all texts are escaped."""
    lines = [_line("th", heads), *(_line("td", row) for row in rows)]
    return f"<table><caption>{escape(caption)}</caption>{''.join(lines)}</table>"


def _line(tag: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
