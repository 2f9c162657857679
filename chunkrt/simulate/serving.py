"""Simulation of serving: the speed of a device when many sequences share chunks.

The batcher, the schedule and the policies are those of the runtime, on a virtual clock; a device profile gives the
durations of tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, get_args

import numpy as np

from chunkrt.errors import ConfigError, unknown_name
from chunkrt.graph.plan import Plan
from chunkrt.pictures import html_table
from chunkrt.quant.scheme import Scheme
from chunkrt.runtime.batcher import DEFAULT_BATCHER, Batcher, find_batcher
from chunkrt.runtime.chunk_slots import check_chunks_in_flight, chunk_slots
from chunkrt.runtime.executor import DecodeOn, parting_step
from chunkrt.runtime.policy import Policy, find_policy
from chunkrt.runtime.record import ChunkRecord, RunRecord, smallest_graph
from chunkrt.runtime.schedule import Schedule
from chunkrt.runtime.tasks import Processor, Task, TaskEvent
from chunkrt.runtime.virtual_clock import run_on_virtual_clock
from chunkrt.simulate.arrivals import Load
from chunkrt.simulate.measured import MeasuredProfile
from chunkrt.simulate.profile import DeviceProfile
from chunkrt.simulate.server import ChunkCosts, Server
from chunkrt.simulate.serving_costs import ServingCosts, has_npu, never, serving_costs
from chunkrt.simulate.serving_records import serving_records
from chunkrt.simulate.simulator import chunk_text, graphs_of, known_scheme
from chunkrt.simulate.work import ChunkWork


class Spread(NamedTuple):
    """The mean, the median and the 95th percentile of a time, in milliseconds."""

    mean: float
    p50: float
    p95: float


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Statistics of a server from the first request to the last token.

    Attributes:
        seconds: the total time.
        time_to_first_token_ms: time from a request's arrival to its first token.
        queue_ms: time from a request's arrival to its admission.
        graph_lengths: numbers of rows of the NPU's graphs, if there are several; see `Simulation`.
        gap_ms: time between two tokens of an answer; None if each answer is one token.
        rows_per_chunk: mean number of rows with a token.
        packed: share of the chunks with more than one sequence.
        on_cpu: share of the chunks that the CPU alone computed.
        padding: share of the NPU's rows without a token; None if the NPU computed no rows.
        busy: share of the time in which each processor was busy.
        requests_cut: number of requests that were clipped to the context.
        records: the records of all runs, like those of an engine's sessions.
    """

    device: str
    scheme: str
    policy: str
    batcher: str
    decode_on: DecodeOn
    sessions: int
    chunk_length: int
    graph_lengths: tuple[int, ...]
    chunks_in_flight: int
    requests: int
    requests_cut: int
    prompt_tokens: int
    generated_tokens: int
    seconds: float
    requests_per_s: float
    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    time_to_first_token_ms: Spread
    queue_ms: Spread
    gap_ms: Spread | None
    chunks: int
    rows_per_chunk: float
    packed: float
    on_cpu: float
    padding: float | None
    busy: Mapping[str, float]
    records: Callable[[], list[RunRecord]]

    @property
    def chunks_text(self) -> str:
        """Lengths of the chunks and of the NPU's graphs; see `chunk_text`."""
        return chunk_text(self.chunk_length, self.graph_lengths)

    def __repr__(self) -> str:
        """Return the choices and the main figures; `to_dict` returns all."""
        first = self.time_to_first_token_ms
        return (
            f"Serving({self.device}, {self.scheme}, policy {self.policy}, batcher {self.batcher}, {self.sessions} "
            f"sessions, chunks of {self.chunks_text}: {self.requests} requests in {self.seconds:.1f} s, "
            f"{self.prompt_tokens_per_s:.1f} prompt and {self.generated_tokens_per_s:.1f} generated tokens/s, time to "
            f"first token {first.p50:.1f} ms (p50), {first.p95:.1f} ms (p95))"
        )

    def _repr_html_(self) -> str:
        """Return a table of the times of requests, with the rates as its caption."""
        spreads = (
            ("time to first token, ms", self.time_to_first_token_ms),
            ("queued, ms", self.queue_ms),
            ("gap between tokens, ms", self.gap_ms),
        )
        rows = [(name, *(f"{value:.1f}" for value in spread)) for name, spread in spreads if spread is not None]
        caption = (
            f"predicted: {self.requests} requests on {self.device}, {self.scheme}, batcher {self.batcher}, chunks of "
            f"{self.chunks_text}: {self.prompt_tokens_per_s:.1f} prompt and {self.generated_tokens_per_s:.1f} new "
            "tokens/s"
        )
        return html_table(caption, ("", "mean", "median", "95th percentile"), rows)

    def to_dict(self) -> dict[str, Any]:
        """Return all statistics except the records, for JSON."""
        figures = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "records"}
        spreads = {name: value._asdict() for name, value in figures.items() if isinstance(value, Spread)}
        return figures | spreads | {"graph_lengths": list(self.graph_lengths)}


def simulate_serving(
    plan: Plan,
    device: DeviceProfile | MeasuredProfile,
    load: Load,
    *,
    sessions: int,
    chunk_length: int,
    policy: str | Policy,
    scheme: str | Scheme,
    batcher: str | Batcher = DEFAULT_BATCHER,
    decode_on: DecodeOn = "auto",
    graph_lengths: Collection[int] = (),
    chunks_in_flight: int | None = None,
    threads: int | None = None,
) -> Serving:
    """Serve requests on a virtual clock.

    Args:
        plan: a complete decoder.
        device: costs of the tasks.
        load: the requests.
        sessions: number of requests that are admitted at once, at least 1; further requests wait.
        chunk_length: number of tokens of a chunk, 1 to the plan's context.
        policy: the order of tasks, or its name.
        scheme: quantisation of linears, by name or fixed by a checkpoint.
        batcher: the rule that picks the rows of a chunk, or its name.
        decode_on: processor of single tokens if an NPU exists: the CPU alone, the NPU with the CPU, or the one that is
            expected to be faster for all waiting sequences.
        graph_lengths: chunk lengths for which the NPU has graphs, in addition to `chunk_length`; see `simulate`.
        chunks_in_flight: maximum number if an NPU exists, at least 1; by default the executor's. Without an NPU, and
            under a policy that runs one task at a time, shared chunks run one after the other and include the single
            tokens.
        threads: for a measured profile, one of the measured thread budgets; by default the largest.

    Raises:
        ConfigError: an argument is out of range, or does not fit the profile.
    """
    if not 1 <= chunk_length <= plan.context_length:
        raise ConfigError(f"chunk length {chunk_length} is outside 1..{plan.context_length}, the model's context")
    if not load.requests:
        raise ConfigError("there are no requests to serve")
    if sessions < 1:
        raise ConfigError(f"{sessions} sessions, expected at least 1")
    if decode_on not in get_args(DecodeOn):
        raise unknown_name("way to decode", decode_on, get_args(DecodeOn))
    if chunks_in_flight is not None:
        check_chunks_in_flight(chunks_in_flight)
    if any(subgraph.device == "link" for subgraph in plan.subgraphs):
        raise ConfigError(
            "the plan is one rank's share of a decoder; servers of several ranks cannot be simulated, use the complete "
            "decoder"
        )
    found_scheme = known_scheme(scheme)
    costs = serving_costs(
        plan,
        device,
        found_scheme,
        chunk_length=chunk_length,
        graph_lengths=graphs_of(graph_lengths, chunk_length, found_scheme),
        threads=threads,
        decode_on=decode_on,
    )
    most_in_flight = 1
    if has_npu(costs.processors) and find_policy(policy).is_concurrent:
        most_in_flight = chunks_in_flight or chunk_slots(plan, chunk_length, costs.processors)
    elif chunks_in_flight not in (None, 1):
        raise ConfigError(
            "shared chunks run one at a time without an NPU, or under a policy that runs one task at a time; "
            "omit --in-flight"
        )
    else:
        costs = replace(costs, decodes_apart=never)
    found = serve(
        costs,
        load,
        batcher=batcher,
        policy=policy,
        chunk_length=chunk_length,
        sessions=sessions,
        chunks_in_flight=most_in_flight,
        step=parting_step(plan, chunk_length),
    )
    return replace(found, device=device.name, scheme=found_scheme.name, decode_on=decode_on)


def serve(
    costs: ServingCosts,
    load: Load,
    *,
    batcher: str | Batcher,
    policy: str | Policy,
    chunk_length: int,
    sessions: int,
    chunks_in_flight: int,
    step: int = 1,
) -> Serving:
    """Serve requests with given costs; see `simulate_serving`."""
    order, rule = find_policy(policy), find_batcher(batcher)
    schedule = Schedule(costs.plan, chunks_in_flight=chunks_in_flight + 1, processors=costs.processors, policy=order)
    ways: list[str] = []
    """The way of every chunk through the decoder."""

    size = len(costs.plan.subgraphs)
    routes = {
        (name, has_logits): way.route(size, with_logits=has_logits)
        for name, way in costs.ways.items()
        for has_logits in (False, True)
    }

    def admit(chunk: ChunkRecord, num_rows: int, is_apart: bool) -> ChunkCosts:
        costs.chunks.append(ChunkWork.shared([(s.position, s.num_tokens) for s in chunk.segments], num_rows))
        ways.append(costs.way_of(costs.chunks[-1], is_apart=is_apart))
        route = routes[ways[-1], num_rows > 0]
        durations = [0] * size
        for subgraph in route.subgraphs:
            durations[subgraph] = costs.work_of(Task(subgraph, chunk.number)).ns
        return ChunkCosts(route, durations)

    server = Server(
        schedule,
        load.requests,
        rule,
        chunk_length=chunk_length,
        most_sessions=sessions,
        most_in_flight=chunks_in_flight,
        step=step,
        prompt_ns=costs.prompt_ns,
        step_ns=costs.step_ns,
        token_ns=costs.token_ns,
        admit=admit,
        decodes_apart=costs.decodes_apart,
    )
    events = run_on_virtual_clock(schedule, schedule.duration, costs.speeds, server)
    clients = server.clients
    end_ns = max(client.token_ns[-1] for client in clients)
    seconds = max(end_ns - min(client.arrival_ns for client in clients), 1) / 1e9
    prompt_tokens = sum(client.request.prompt for client in clients)
    generated_tokens = sum(client.request.generate for client in clients)
    gaps = [later - token for c in clients for token, later in zip(c.token_ns, c.token_ns[1:], strict=False)]
    rows = [chunk.num_tokens for chunk in server.chunks]
    on_npu = [count for count, way in zip(rows, ways, strict=True) if way == "npu"]
    computed = sum(smallest_graph(count, costs.graph_lengths, chunk_length) for count in on_npu)
    return Serving(
        device="",
        scheme="",
        policy=order.name,
        batcher=rule.name,
        decode_on="auto",
        sessions=sessions,
        chunk_length=chunk_length,
        graph_lengths=costs.graph_lengths,
        chunks_in_flight=chunks_in_flight,
        requests=len(clients),
        requests_cut=load.num_cut,
        prompt_tokens=prompt_tokens,
        generated_tokens=generated_tokens,
        seconds=seconds,
        requests_per_s=len(clients) / seconds,
        prompt_tokens_per_s=prompt_tokens / seconds,
        generated_tokens_per_s=generated_tokens / seconds,
        time_to_first_token_ms=_spread([client.time_to_first_token_ns for client in clients]),
        queue_ms=_spread([client.start_ns - client.arrival_ns for client in clients]),
        gap_ms=_spread(gaps) if gaps else None,
        chunks=len(rows),
        rows_per_chunk=sum(rows) / len(rows),
        packed=sum(len(chunk.segments) > 1 for chunk in server.chunks) / len(rows),
        on_cpu=1 - len(on_npu) / len(rows),
        padding=1 - sum(on_npu) / computed if on_npu else None,
        busy={p.name: _busy_ns(p, events) / (1e9 * seconds * p.workers) for p in costs.processors},
        records=lambda: serving_records(
            costs, server, events, ways, policy=order.name, chunk_length=chunk_length, chunks_in_flight=chunks_in_flight
        ),
    )


def _busy_ns(processor: Processor, events: Sequence[TaskEvent]) -> int:
    return sum(event.end_ns - event.start_ns for event in events if event.processor == processor.name)


def _spread(nanoseconds: Sequence[float]) -> Spread:
    p50, p95 = np.percentile(nanoseconds, [50, 95]) / 1e6
    return Spread(float(np.mean(nanoseconds)) / 1e6, float(p50), float(p95))
