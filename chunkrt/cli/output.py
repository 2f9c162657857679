"""Text output: messages in the terms of the command line, and tables.

The last column of a table is prose, which is wrapped in a narrow terminal and unwrapped in a pipe.
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence

import click

from chunkrt.engine.options import DECLARED

_OPTION = re.compile(r"(?<![\w/'\"])`(\w+)(?:=(True|'[^'`]*'|[\w.-]+))?`(?![\w/'\"])")


def in_flags(message: str) -> str:
    """Replace options in backquotes by their flags: `npu='native'` becomes --npu native.

    Names that are no options of an engine are left unchanged.
    """

    def flag(found: re.Match[str]) -> str:
        if found[1] not in DECLARED or not (name := DECLARED[found[1]][2].main_flag):
            return found[0]
        value = (found[2] or "True").strip("'")
        if value == "True":
            return name
        return f"{name}={value}" if value.startswith("-") else f"{name} {value}"

    return _OPTION.sub(flag, message)


class FlagFormatter(logging.Formatter):
    """Formatter of log lines whose messages name options by their flags."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        return in_flags(super().format(record))


LEAST_ROOM = 24
"""Least width of the prose column; in a narrower terminal, prose is printed below the other columns."""


def print_table(rows: Sequence[Sequence[str]], *, right: Sequence[str] = (), between: str = "  ") -> None:
    """Print rows, the first of which is the header; columns are as wide as their widest cell.

    Args:
        right: headers of right-aligned columns.
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
