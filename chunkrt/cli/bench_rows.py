"""Rows of `chunkrt bench`: their set-up columns, repetitions, and output formats."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from chunkrt.engine.engine import Engine

Sample = TypeVar("Sample")
WIDTH = 80
"""Widest Markdown table."""


@dataclass(frozen=True, kw_only=True)
class BenchSetup:
    """Columns that describe the model and its settings in every row."""

    model: str
    backend: str
    scheme: str
    chunk: int
    policy: str
    threads: int
    affinity: str

    TEXTS: ClassVar[tuple[str, ...]] = ("model", "backend", "scheme", "chunk", "policy", "threads")
    """Left-aligned columns of the Markdown table."""

    def cells(self) -> dict[str, str]:
        """Return the cells of the Markdown table by header."""
        texts = {name: str(getattr(self, name)) for name in self.TEXTS}
        return texts | {"model": Path(self.model).name if Path(self.model).exists() else self.model}


def setup_of(engine: Engine, model: str) -> dict[str, Any]:
    """Return the fields of `BenchSetup`."""
    return {
        "model": model,
        "backend": engine.npu_backend.name,
        "scheme": engine.scheme.name,
        "chunk": engine.chunk_length,
        "policy": engine.options.policy,
        "threads": engine.options.num_threads,
        "affinity": engine.options.affinity,
    }


def repeat(repetitions: int, run: Callable[[], Sample]) -> list[Sample]:
    """Return the results of `repetitions` runs, after one warm-up run."""
    return [run() for _ in range(repetitions + 1)][1:]


def deviation(speeds: Sequence[float]) -> float:
    """Return the standard deviation; 0 for a single value."""
    return statistics.stdev(speeds) if len(speeds) > 1 else 0.0


def _markdown(rows: Sequence[BenchSetup]) -> str:
    """Return a Markdown table; if it is too wide, columns with one value are moved to a line above it."""
    heads = list(rows[0].cells())
    table = [[row.cells().get(head, "-") for head in heads] for row in rows]
    texts = set(rows[0].TEXTS)
    common = [head for i, head in enumerate(heads) if head in texts and len({cells[i] for cells in table}) == 1]
    common = [head for head in common if head not in ("test", heads[-1])]
    text = _table(heads, table, texts)
    if len(text.partition("\n")[0]) <= WIDTH or not common:
        return text
    shown = [i for i, head in enumerate(heads) if head not in common]
    above = ", ".join(f"{head} {table[0][heads.index(head)]}" for head in common)
    return f"{above}\n\n" + _table([heads[i] for i in shown], [[cells[i] for i in shown] for cells in table], texts)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], texts: set[str]) -> str:
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    rule = ["-" * max(w, 3) if h in texts else "-" * max(w - 1, 3) + ":" for h, w in zip(heads, widths, strict=True)]
    align = [str.ljust if head in texts else str.rjust for head in heads]
    lines = [
        [put(cell, width) for put, cell, width in zip(align, line, widths, strict=True)]
        for line in (heads, rule, *rows)
    ]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _json(rows: Sequence[BenchSetup]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=1) + "\n"


def _json_lines(rows: Sequence[BenchSetup]) -> str:
    return "".join(json.dumps(asdict(row)) + "\n" for row in rows)


def _csv(rows: Sequence[BenchSetup]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(rows[0])], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        cells = asdict(row).items()
        writer.writerow({name: " ".join(map(str, x)) if isinstance(x, list) else x for name, x in cells})
    return text.getvalue()


def _sql(rows: Sequence[BenchSetup]) -> str:
    """Return SQL that creates llama-bench's table and inserts the rows; lists become text."""
    columns = [(f.name, getattr(rows[0], f.name)) for f in fields(rows[0])]
    kinds = {bool: "INTEGER", int: "INTEGER", float: "REAL"}
    declared = ",\n".join(f"  {name} {kinds.get(type(value), 'TEXT')}" for name, value in columns)
    names = ", ".join(name for name, _ in columns)
    lines = [f"CREATE TABLE IF NOT EXISTS llama_bench (\n{declared}\n);\n"]
    lines += [
        f"INSERT INTO llama_bench ({names}) VALUES ({', '.join(map(_literal, asdict(row).values()))});\n"
        for row in rows
    ]
    return "\n".join(lines)


def _literal(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, int | float):
        return str(int(value) if isinstance(value, bool) else value)
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return "'" + text.replace("'", "''") + "'"


FORMATS: dict[str, Callable[[Sequence[BenchSetup]], str]] = {
    "md": _markdown,
    "json": _json,
    "jsonl": _json_lines,
    "csv": _csv,
    "sql": _sql,
}
