"""Tables of a report: columns with units, and rows whose figures have an origin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import floor, log10
from typing import Literal

from chunkrt.runtime.record import Origin

Value = str | int | float | None

MARKS: dict[Origin, str] = {"measured": "M", "emulated": "E", "predicted": "P", "unknown": "?"}
"""Letters that label each figure."""

MEANINGS: dict[Origin, str] = {
    "measured": "measured: a run on this machine's processors",
    "emulated": "emulated: a run in which an emulated NPU took part; its times mean nothing for a device",
    "predicted": "predicted: a simulation, not a run",
    "unknown": "unknown: the file does not state the origin, because an older version of chunkrt wrote it",
}


MOST_COLUMNS_OF_ONE_ROW = 12
"""Number of columns up to which a table of one row keeps its texts and settings as columns."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table.

    Attributes:
        form: "text"; "setting", a number that was chosen; "figure", a number that was measured or predicted; or
            "share", a figure that is shown in percent.
        scale: factor by which figures are multiplied, so that they have the unit of the heading.
    """

    name: str
    form: Literal["text", "setting", "figure", "share"] = "figure"
    scale: float = 1.0

    @property
    def is_figure(self) -> bool:
        """True if the cells are labelled with an origin."""
        return self.form in ("figure", "share")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table, with the origin of its figures."""

    origin: Origin
    values: Sequence[Value]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell as it is shown. `key` is the value to sort by; it is empty for a missing value."""

    text: str
    key: str
    is_number: bool
    origin: Origin | None


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table. Columns in which every row has the same text or setting are moved to `common` by `narrowed`."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    common: Sequence[tuple[str, str]] = field(default=())

    def narrowed(self) -> Table:
        """Return the table without empty columns, and without columns of texts and settings that do not vary. A narrow
        table of one row keeps its columns.
        """
        kept, common = [], []
        for index, column in enumerate(self.columns):
            values = {row.values[index] for row in self.rows}
            if values <= {None, ""}:
                continue
            is_wide = len(self.columns) > MOST_COLUMNS_OF_ONE_ROW
            if (len(self.rows) > 1 or is_wide) and len(values) == 1 and not column.is_figure:
                common.append((column.name, str(next(iter(values)))))
            else:
                kept.append(index)
        return Table(
            caption=self.caption,
            columns=[self.columns[index] for index in kept],
            rows=[Row(origin=row.origin, values=[row.values[index] for index in kept]) for row in self.rows],
            common=common,
        )

    def cells(self) -> list[list[Cell]]:
        """Return the cells of all rows. The figures of one column have the same number of decimals."""
        decimals = [
            _decimals([row.values[index] for row in self.rows], column) for index, column in enumerate(self.columns)
        ]
        return [
            [
                _cell(value, column, places, row.origin)
                for value, column, places in zip(row.values, self.columns, decimals, strict=True)
            ]
            for row in self.rows
        ]


def _decimals(values: Sequence[Value], column: Column) -> int:
    if column.form == "share":
        return 1
    numbers = [abs(value * column.scale) for value in values if isinstance(value, int | float) and value]
    if all(isinstance(value, int) for value in values if value is not None) and column.scale == 1:
        return 0
    return decimals_for(numbers)


def decimals_for(numbers: Sequence[float]) -> int:
    """Return the number of decimals of figures: at most three, so that the largest has up to five significant digits
    and the smallest at least three. Figures that are all below 0.1 have three significant digits.
    """
    known = [abs(number) for number in numbers if number]
    if not known:
        return 0
    most, least = (floor(log10(number)) + 1 for number in (max(known), min(known)))
    return min(3 - most, 12) if most < 0 else min(max(5 - most, 3 - least, 0), 3)


def _cell(value: Value, column: Column, decimals: int, origin: Origin) -> Cell:
    if value is None or value == "":
        return Cell(text="", key="", is_number=column.form != "text", origin=None)
    if isinstance(value, str):
        return Cell(text=value, key=value, is_number=False, origin=origin if column.is_figure else None)
    scaled = value * (100 if column.form == "share" else column.scale)
    text = str(value) if column.form == "setting" else f"{scaled:,.{decimals}f}"
    if column.form == "share":
        text += " %"
    return Cell(text=text, key=repr(scaled), is_number=True, origin=origin if column.is_figure else None)
