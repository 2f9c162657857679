"""Records of simulated serving, like those of an engine's sessions: one for every prompt and every generated token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from chunkrt.runtime.buffers import BufferLayout
from chunkrt.runtime.record import ChunkRecord, Pipeline, RunRecord, stages_of
from chunkrt.runtime.state_tensors import state_bytes
from chunkrt.runtime.tasks import Task, TaskEvent
from chunkrt.simulate.server import Server, SimulatedClient
from chunkrt.simulate.serving_costs import ServingCosts, Way, has_npu


def serving_records(
    costs: ServingCosts,
    server: Server,
    events: Sequence[TaskEvent],
    ways: Sequence[str],
    *,
    policy: str,
    chunk_length: int,
    chunks_in_flight: int,
) -> list[RunRecord]:
    """Return the records of all runs.

    Args:
        costs: costs of the simulated tasks.
        server: the server, after the simulation.
        events: events of all tasks.
        ways: the way of each chunk.
        policy: name of the policy.
        chunk_length: number of tokens of a chunk.
        chunks_in_flight: maximum number of chunks in flight.
    """

    def pipeline(way: Way) -> Pipeline:
        return Pipeline(
            stages=stages_of(way.plan),
            processors=way.processors,
            policy=policy,
            chunk_length=chunk_length,
            num_slots=chunks_in_flight,
            slot_bytes=BufferLayout(way.plan, chunk_length).num_bytes,
            graph_lengths=costs.graph_lengths if has_npu(way.processors) else (),
            origin="predicted",
        )

    pipelines = {name: pipeline(way) for name, way in costs.ways.items()}
    of_chunk: list[list[TaskEvent]] = [[] for _ in server.chunks]
    for event in events:
        subgraph = event.task.subgraph - costs.ways[ways[event.task.chunk]].first
        of_chunk[event.task.chunk].append(event._replace(task=Task(subgraph, 0)))
    one_way = next(iter(costs.ways.values())).plan
    position_bytes = sum(state_bytes(t, {"P": 1}) for t in one_way.state_tensors if "P" in t.shape)
    records = []
    for client, chunks in _runs(server):
        own = [
            event._replace(task=Task(event.task.subgraph, place))
            for place, chunk in enumerate(chunks)
            for event in of_chunk[chunk.number]
        ]
        segments = [s for chunk in chunks for s in chunk.segments if s.sequence == client.number]
        records.append(
            RunRecord(
                pipeline=pipelines[ways[chunks[0].number]],
                num_tokens=sum(segment.num_tokens for segment in segments),
                position=segments[0].position,
                position_bytes=position_bytes,
                start_ns=min(event.start_ns for event in own),
                end_ns=max(event.end_ns for event in own),
                events=own,
                chunks=tuple(chunks),
                sequence=client.number,
            )
        )
    return records


def _runs(server: Server) -> Iterator[tuple[SimulatedClient, list[ChunkRecord]]]:
    """Return the chunks of every prompt, and of every generated token."""
    chunks: dict[int, list[ChunkRecord]] = {client.number: [] for client in server.clients}
    for chunk in server.chunks:
        for segment in chunk.segments:
            chunks[segment.sequence].append(chunk)
    for client in server.clients:
        num_of_prompt = len(chunks[client.number]) - (client.request.generate - 1)
        yield client, chunks[client.number][:num_of_prompt]
        for chunk in chunks[client.number][num_of_prompt:]:
            yield client, [chunk]
