"""Groups of the runs of a trace, each with a breakdown of its time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from chunkrt.runtime.record import RunRecord
from chunkrt.runtime.trace.idle import CAUSES, ProcessorTime, where_time_went
from chunkrt.runtime.trace.shared import joined, packing
from chunkrt.runtime.trace.utilisation import link_time


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs with a common breakdown: prefills of one length, all decoding steps, or runs that shared chunks."""

    name: str
    records: Sequence[RunRecord]
    processors: Sequence[ProcessorTime]

    @property
    def wall_ns(self) -> int:
        """Nanoseconds of all runs; for shared chunks, time in which at least one chunk was in flight."""
        return sum(record.end_ns - record.start_ns for record in joined(self.records))

    @property
    def packing(self) -> dict[str, Any] | None:
        """Statistics of shared chunks; see `packing`. None for other runs."""
        return packing(self.records)

    @property
    def link(self) -> dict[str, float] | None:
        """Breakdown of the link's time; see `link_time`. None without other ranks."""
        return link_time(self.records)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all runs, including tokens in shared chunks of sequences that are not in the trace."""
        return sum(record.num_tokens for record in joined(self.records))

    @property
    def num_cached(self) -> int:
        """Number of tokens that came from the prefix cache."""
        return sum(record.num_cached for record in self.records)

    def as_dict(self) -> dict[str, Any]:
        """Return the group for JSON: nanoseconds, and shares of each processor's time in percent."""
        return {
            "name": self.name,
            "runs": len(self.records),
            "tokens": self.num_tokens,
            "cached": self.num_cached,
            "policy": self.records[0].pipeline.policy,
            "wall_ns": self.wall_ns,
            "processors": [asdict(time) | {"percent": shares(time)} for time in self.processors],
            "link": self.link,
            "shared_chunks": self.packing,
        }


def group_runs(records: Iterable[RunRecord]) -> list[Group]:
    """Sort runs into groups, and break down the time of each group."""
    groups: dict[str, list[RunRecord]] = {}
    for record in records:
        groups.setdefault(_group(record), []).append(record)
    return [Group(name=name, records=runs, processors=where_time_went(runs)) for name, runs in groups.items()]


def _group(record: RunRecord) -> str:
    if record.chunks:
        names = [processor.name.upper() for processor in record.pipeline.processors if processor.name != "link"]
        return f"shared chunks on {' and '.join(names)}"
    return "decode" if record.is_decode else record.name


def shares(time: ProcessorTime) -> Mapping[str, float]:
    """Return a processor's busy time and its idle times by cause, in percent; they sum to 100."""
    parts: dict[str, int] = {"busy": sum(time.busy_ns.values())}
    parts.update((cause, time.idle_ns.get(cause, 0)) for cause in CAUSES)
    return {name: 100 * part / time.total_ns if time.total_ns else 0.0 for name, part in parts.items()}
