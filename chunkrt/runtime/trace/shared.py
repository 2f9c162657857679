"""Activity of workers during runs that shared chunks, in which every chunk occurs once.

The record of a run contains the tasks of all its chunks, so a chunk that three sequences shared occurs in three
records. Code that draws or sums up the workers' activity uses the records that this module creates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from chunkrt.runtime.record import ChunkRecord, Pipeline, RunRecord
from chunkrt.runtime.tasks import Task, TaskEvent

MOST_NAMED = 4
"""Largest number of sequences that are named individually."""


class _SharedChunk(NamedTuple):
    """A chunk that several runs shared, with the events of its tasks and copies."""

    record: ChunkRecord
    events: Sequence[TaskEvent]
    copies: Sequence[TaskEvent]

    @property
    def start_ns(self) -> int:
        """Start of the chunk's first task."""
        return min(event.start_ns for event in (*self.events, *self.copies))

    @property
    def end_ns(self) -> int:
        """End of the chunk's last task."""
        return max(event.end_ns for event in self.events)


def joined(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Return records of the workers' activity in some runs, with every task once.

    Records of runs that shared no chunks are returned unchanged. Records of other runs are replaced by one record for
    every period in which at least one chunk of a pipeline was in flight.
    """
    found = [record for record in records if not record.chunks]
    for pipeline, position_bytes, chunks in _by_pipeline(records):
        together: list[_SharedChunk] = []
        end_ns = 0
        for chunk in sorted(chunks, key=lambda chunk: (chunk.start_ns, chunk.record.number)):
            if together and chunk.start_ns > end_ns:
                found.append(_joint(pipeline, position_bytes, together))
                together = []
            end_ns = max(end_ns, chunk.end_ns) if together else chunk.end_ns
            together.append(chunk)
        found.append(_joint(pipeline, position_bytes, together))
    return found


def with_others(record: RunRecord, records: Sequence[RunRecord]) -> RunRecord:
    """Return a record of the workers' activity during a run. It contains all chunks of the pipeline within the time of
    the run, including chunks of other runs. The record of a run that shared no chunks is returned unchanged.
    """
    for pipeline, position_bytes, chunks in _by_pipeline(records):
        if pipeline is record.pipeline:
            within = [c for c in chunks if c.start_ns <= record.end_ns and c.end_ns >= record.start_ns]
            return _joint(pipeline, position_bytes, within)
    return record


def packing(records: Sequence[RunRecord]) -> dict[str, Any] | None:
    """Return the fill of the shared chunks of some runs, or None if the runs shared no chunks. Every chunk counts once.

    Returns:
        "sequences", "chunks", "rows": their numbers; "rows_per_chunk": mean number of rows with a token; "packed":
        share of the chunks that contained more than one sequence; "padding": share of the rows computed on an NPU that
        contained no token, or None without an NPU.
    """
    sequences: set[int] = set()
    num_chunks = num_rows = num_packed = num_on_npu = num_padded = 0
    for pipeline, _, chunks in _by_pipeline(records):
        has_npu = any(processor.devices == {"npu"} for processor in pipeline.processors)
        for chunk in chunks:
            rows = chunk.record.num_tokens
            sequences.update(segment.sequence for segment in chunk.record.segments)
            num_chunks, num_rows = num_chunks + 1, num_rows + rows
            num_packed += len(chunk.record.segments) > 1
            if has_npu:
                num_on_npu += pipeline.rows_on_npu(rows)
                num_padded += pipeline.rows_on_npu(rows) - rows
    if not num_chunks:
        return None
    return {
        "sequences": len(sequences),
        "chunks": num_chunks,
        "rows": num_rows,
        "rows_per_chunk": num_rows / num_chunks,
        "packed": num_packed / num_chunks,
        "padding": num_padded / num_on_npu if num_on_npu else None,
    }


def chunk_numbers(record: RunRecord) -> list[int]:
    """Return the display numbers of a record's chunks. For a chunk that is not shared this is its index in the run."""
    return [chunk.number for chunk in record.chunks] or list(range(record.num_chunks))


def rows_of(chunk: ChunkRecord) -> dict[str, str]:
    """Describe the rows of a chunk: by sequence, in the order of the rows."""
    found, row = {}, 0
    for sequence, position, num_tokens in chunk.segments:
        rows = f"row {row}" if num_tokens == 1 else f"rows {row} to {row + num_tokens - 1}"
        found[f"sequence {sequence}"] = f"{rows}, from position {position}"
        row += num_tokens
    return found


def sequence_names(chunks: Iterable[ChunkRecord]) -> str:
    """Return a short text that names the sequences of some chunks."""
    sequences = sorted({segment.sequence for chunk in chunks for segment in chunk.segments})
    if len(sequences) > MOST_NAMED:
        return f"{len(sequences)} sequences"
    return f"sequence{'s' if len(sequences) > 1 else ''} {', '.join(map(str, sequences))}"


def pipeline_numbers(records: Iterable[RunRecord]) -> dict[int, int]:
    """Number the pipelines by identity, because equal pipelines may have different chunks."""
    return {identity: number for number, identity in enumerate(dict.fromkeys(id(r.pipeline) for r in records))}


def _by_pipeline(records: Iterable[RunRecord]) -> list[tuple[Pipeline, int, list[_SharedChunk]]]:
    """Return the shared chunks of every pipeline, and the bytes of its caches for each position."""
    found: dict[int, tuple[Pipeline, int, dict[int, _SharedChunk]]] = {}
    for record in records:
        if not record.chunks:
            continue
        _, _, chunks = found.setdefault(id(record.pipeline), (record.pipeline, record.position_bytes, {}))
        for chunk, events, copies in zip(
            record.chunks, _by_chunk(record, record.events), _by_chunk(record, record.copies), strict=True
        ):
            chunks.setdefault(chunk.number, _SharedChunk(chunk, events, copies))
    return [(pipeline, size, list(chunks.values())) for pipeline, size, chunks in found.values()]


def _by_chunk(record: RunRecord, events: Iterable[TaskEvent]) -> list[list[TaskEvent]]:
    found: list[list[TaskEvent]] = [[] for _ in record.chunks]
    for event in events:
        found[event.task.chunk].append(event)
    return found


def _joint(pipeline: Pipeline, position_bytes: int, chunks: Sequence[_SharedChunk]) -> RunRecord:
    """Return one record of some chunks, in the order of their numbers."""
    chunks = sorted(chunks, key=lambda chunk: chunk.record.number)
    return RunRecord(
        pipeline=pipeline,
        num_tokens=sum(chunk.record.num_tokens for chunk in chunks),
        position=0,
        position_bytes=position_bytes,
        start_ns=min(chunk.start_ns for chunk in chunks),
        end_ns=max(chunk.end_ns for chunk in chunks),
        events=[_placed(event, place) for place, chunk in enumerate(chunks) for event in chunk.events],
        copies=[_placed(copy, place) for place, chunk in enumerate(chunks) for copy in chunk.copies],
        chunks=tuple(chunk.record for chunk in chunks),
    )


def _placed(event: TaskEvent, chunk: int) -> TaskEvent:
    return event._replace(task=Task(event.task.subgraph, chunk))
