"""Tables for notebooks, which show what has `_repr_html_`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def html_table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with a caption; of all texts nothing is taken for HTML."""
    lines = [_line("th", heads), *(_line("td", row) for row in rows)]
    return f"<table><caption>{escape(caption)}</caption>{''.join(lines)}</table>"


def _line(tag: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
