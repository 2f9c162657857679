"""Rows of `chunkrt bench`: what they are of, how often they are measured, and the formats that they are written in."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, TypeVar

from chunkrt.engine.engine import Engine

Sample = TypeVar("Sample")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What was measured, as every row tells it."""

    model: str
    backend: str
    scheme: str
    chunk: int
    policy: str
    threads: int
    affinity: str

    TEXTS: ClassVar[tuple[str, ...]] = ("model", "backend", "scheme", "chunk", "policy", "threads")
    """Columns of the Markdown table that stand on the left."""

    def cells(self) -> dict[str, str]:
        """The Markdown table's cells, by its heads."""
        return {name: str(getattr(self, name)) for name in self.TEXTS}


def setup_of(engine: Engine, model: str) -> dict[str, Any]:
    """The fields of `Setup`."""
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
    """What so many runs return, after one that does not count."""
    return [run() for _ in range(repetitions + 1)][1:]


def deviation(speeds: Sequence[float]) -> float:
    """The standard deviation; 0 of a single one."""
    return statistics.stdev(speeds) if len(speeds) > 1 else 0.0


def _markdown(rows: Sequence[Setup]) -> str:
    heads = list(rows[0].cells())
    num_texts = len(rows[0].TEXTS)
    lines = [heads, ["---"] * num_texts + ["---:"] * (len(heads) - num_texts), *(row.cells().values() for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _json(rows: Sequence[Setup]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=1) + "\n"


def _json_lines(rows: Sequence[Setup]) -> str:
    return "".join(json.dumps(asdict(row)) + "\n" for row in rows)


def _csv(rows: Sequence[Setup]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(rows[0])], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        cells = asdict(row).items()
        writer.writerow({name: " ".join(map(str, x)) if isinstance(x, list) else x for name, x in cells})
    return text.getvalue()


FORMATS: dict[str, Callable[[Sequence[Setup]], str]] = {
    "md": _markdown,
    "json": _json,
    "jsonl": _json_lines,
    "csv": _csv,
}
