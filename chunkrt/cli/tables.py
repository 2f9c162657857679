"""Tables whose last column is prose: whole where they are piped, folded in a terminal that is narrower."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

import click

LEAST_ROOM = 24
"""Columns of a terminal that prose takes beside the others; with fewer it goes below them."""


def print_table(rows: Sequence[Sequence[str]], *, right: Sequence[str] = (), between: str = "  ") -> None:
    """Print rows, the first of which is the head, each column as wide as it must be.

    Args:
        right: heads of the columns that stand on the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    is_right = [head in right for head in rows[0]]
    columns = shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else None
    for *cells, prose in rows:
        places = zip(cells, widths, is_right, strict=False)
        first = between.join(cell.rjust(width) if on_right else cell.ljust(width) for cell, width, on_right in places)
        whole = (first + between + prose).rstrip()
        if columns is None or len(whole) <= columns:
            click.echo(whole)
            continue
        indent = len(first + between)
        if columns - indent < LEAST_ROOM:
            click.echo(first.rstrip())
            first, indent = "", 4
        begin, then = (first + between).ljust(indent)[:indent] if first else " " * indent, " " * indent
        click.echo(textwrap.fill(prose, columns, initial_indent=begin, subsequent_indent=then))
