"""The simulator: runs a prompt through the real schedule and policies on a virtual clock, with the costs of a
device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from math import exp, hypot
from types import MappingProxyType
from typing import Any

from chunkrt.backends.base import Passage
from chunkrt.backends.qnn.htp_support import distinct_graphs
from chunkrt.engine_directory.figures import weight_bytes
from chunkrt.errors import ConfigError
from chunkrt.graph.plan import MOST_RANKS, Plan
from chunkrt.pictures import html_table
from chunkrt.quant.scheme import MIXED, Scheme, find_scheme
from chunkrt.runtime.buffers import BufferLayout
from chunkrt.runtime.chunk_slots import check_chunks_in_flight, chunk_slots
from chunkrt.runtime.policy import Policy, find_policy
from chunkrt.runtime.record import Pipeline, RunRecord, stages_of
from chunkrt.runtime.schedule import Schedule
from chunkrt.runtime.state_tensors import state_bytes
from chunkrt.runtime.tasks import Task, TaskEvent, with_link
from chunkrt.runtime.trace.idle import CAUSES, Cause, where_time_went
from chunkrt.runtime.trace.utilisation import link_time, utilisation
from chunkrt.runtime.virtual_clock import run_on_virtual_clock
from chunkrt.simulate.link_profile import LinkProfile
from chunkrt.simulate.measured import MeasuredProfile, SubgraphCost, decode_plan, twins
from chunkrt.simulate.profile import DeviceProfile
from chunkrt.simulate.speeds import crowd_speeds, link_speeds, memory_speeds, slowest
from chunkrt.simulate.toml_tables import ENDS
from chunkrt.simulate.work import ChunkWork, MeasuredWork, ModelledWork, WorkOf, cut, with_sums


@dataclass(frozen=True, kw_only=True)
class ProcessorShares:
    """Usage of one processor, in shares of the makespan of its workers; `busy` and all of `idle` sum to 1.

    Attributes:
        idle: idle shares by cause; see `runtime/trace/idle.py`. The link is reported separately.
    """

    busy: float
    idle: Mapping[Cause, float]


@dataclass(frozen=True, kw_only=True)
class LinkShares:
    """The link between ranks, and its usage.

    Attributes:
        name: name of the link.
        ranks: number of ranks.
        sent_bytes: number of bytes that each rank sends.
        busy_ms: time with at least one sum in progress.
        busy: share of busy_ms in the makespan.
        hidden: share of busy_ms in which this rank computed other tasks.
    """

    name: str
    ranks: int
    sent_bytes: float
    busy_ms: float
    busy: float
    hidden: float


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Ends between which the true values lie with a probability of 80 %.

    The errors of the profile's parameters and of the model are independent. A parameter's error counts by the share of
    the tasks' time that it causes. The model's error is `DeviceProfile.model_error`.
    """

    time_to_first_token_ms: tuple[float, float]
    tokens_per_s: tuple[float, float]
    energy_joules: tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Result of one simulated prompt.

    With several ranks, all values are those of one rank.

    Attributes:
        time_to_first_token_ms: time from the arrival of the prompt to the logits of its last token.
        tokens_per_s: number of prompt tokens divided by that time.
        makespan_ms: time from the start of the first task to the end of the last task.
        npu_busy, cpu_busy: share of the makespan in which a task of that role ran.
        overlap: share of the makespan in which two or more tasks of these roles ran.
        link: usage of the link; None for a decoder on one rank.
        graph_lengths: numbers of rows of the NPU's graphs, if there are several; a chunk runs the smallest one that
            holds its rows. Empty if there is one graph, for the chunk length.
        contexts: number of graphs that are compiled for the NPU: one for each of its subgraphs and lengths, in all
            plans.
        padding: share of the NPU's rows without a token; None if the NPU computes none.
        peak_memory_bytes: weights, keys and values of the prompt, and chunks in flight. Every graph contains its
            weights.
        interval: None for a measured profile.
        energy_joules: None if the profile has no power figures, or with several ranks.
        joules: the energy by processor and state: "npu busy", "cpu busy", "memory" and "idle"; the last one is the
            constant power of the complete device. Empty if there are no power figures.
        ms_by_parameter: milliseconds of all tasks by the parameter of the profile that causes them, the longest first;
            empty for a measured profile. Tasks that run at once all count.
        records: records of all tasks, like the executors' records of runs; traces are drawn from them. A prompt without
            attention on the NPU has one record. A chunk with attention on the NPU has its own record, because an engine
            computes such chunks one after another.
    """

    device: str
    scheme: str
    policy: str
    prompt_length: int
    chunk_length: int
    graph_lengths: tuple[int, ...]
    contexts: int
    padding: float | None
    chunks_in_flight: int
    time_to_first_token_ms: float
    tokens_per_s: float
    makespan_ms: float
    interval: Interval | None
    processors: Mapping[str, ProcessorShares]
    npu_busy: float
    cpu_busy: float
    overlap: float
    link: LinkShares | None
    peak_memory_bytes: int
    energy_joules: float | None
    joules: Mapping[str, float]
    ms_by_parameter: Mapping[str, float]
    records: tuple[RunRecord, ...]

    @property
    def chunks_text(self) -> str:
        """Lengths of the chunks and of the NPU's graphs; see `chunk_text`."""
        return chunk_text(self.chunk_length, self.graph_lengths)

    def __repr__(self) -> str:
        """Return the choices and the main figures; `to_dict` returns all."""
        return (
            f"Simulation({self.device}, {self.scheme}, policy {self.policy}, {self.prompt_length} tokens in chunks "
            f"of {self.chunks_text}, {self.chunks_in_flight} in flight: {self.time_to_first_token_ms:.1f} ms to the "
            f"first token, {self.tokens_per_s:.1f} tokens/s, NPU {self.npu_busy:.0%} and CPU {self.cpu_busy:.0%} busy, "
            f"{self.peak_memory_bytes / 2**20:.0f} MiB)"
        )

    def _repr_html_(self) -> str:
        """Return a table with a column for each processor, and rows for its busy time and each cause of idleness."""
        causes = [cause for cause in CAUSES if any(cause in shares.idle for shares in self.processors.values())]
        rows = [("busy", *(f"{shares.busy:.1%}" for shares in self.processors.values()))]
        for cause in causes:
            idle = (shares.idle.get(cause, 0.0) for shares in self.processors.values())
            rows.append((f"idle: {CAUSES[cause]}", *(f"{share:.1%}" for share in idle)))
        energy = "" if self.energy_joules is None else f", {self.energy_joules:.2f} J"
        caption = (
            f"predicted: {self.prompt_length} tokens on {self.device}, {self.scheme}, policy {self.policy}, chunks of "
            f"{self.chunks_text}: {self.time_to_first_token_ms:.1f} ms to the first token, {self.tokens_per_s:.1f} "
            f"tokens/s, {self.peak_memory_bytes / 1e6:.0f} MB{energy}"
        )
        return html_table(caption, ("", *(name.upper() for name in self.processors)), rows)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields except the records, for JSON."""
        figures = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "records"}
        processors = {name: asdict(shares) for name, shares in self.processors.items()}
        return figures | {
            "processors": processors,
            "graph_lengths": list(self.graph_lengths),
            "interval": None if self.interval is None else asdict(self.interval),
            "ms_by_parameter": dict(self.ms_by_parameter),
            "link": None if self.link is None else asdict(self.link),
        }


def simulate(
    plan: Plan,
    device: DeviceProfile | MeasuredProfile,
    *,
    prompt_length: int,
    chunk_length: int,
    policy: str | Policy,
    scheme: str | Scheme,
    near: Mapping[int, Plan] = MappingProxyType({}),
    graph_lengths: Collection[int] = (),
    chunks_in_flight: int | None = None,
    threads: int | None = None,
    ranks: int = 1,
    link: LinkProfile | None = None,
    overlaps_conversion: bool = False,
) -> Simulation:
    """Run one prompt on a virtual clock.

    Args:
        plan: the decoder; or one rank's share of it, which stands for all ranks, because every rank has subgraphs of
            the same shapes. All ranks are assumed to be identical devices and to begin at once. A share runs on the CPU
            alone.
        device: costs of the tasks.
        prompt_length: number of tokens, 1 to the plan's context.
        chunk_length: number of tokens of a chunk, 1 to the plan's context.
        policy: the policy that orders tasks, or its name; it uses only the durations of tasks.
        scheme: quantisation of linears, by name or fixed by a checkpoint.
        near: plans with attention on the NPU, by the last position at which a chunk may begin. As in an engine, each
            chunk uses the plan of the shortest reach that suffices, and otherwise `plan`.
        graph_lengths: chunk lengths for which the NPU has graphs, in addition to `chunk_length`. Each chunk runs the
            smallest graph that holds its rows. Lengths above `chunk_length` do not count, nor does the shorter of two
            lengths whose graphs have the same number of rows.
        chunks_in_flight: number of chunk slots, at least 1; by default the executor's number.
        threads: for a measured profile, one of the measured thread budgets; by default the largest.
        ranks: number of ranks that share the decoder.
        link: the link between the ranks, if there are several.
        overlaps_conversion: a modelled NPU computes while the values of another task are converted, as in the qnn
            backend; otherwise an NPU takes one task at a time, including conversion.

    Raises:
        ConfigError: an argument is out of range, or does not fit the profile.
    """
    for name, value in (("prompt length", prompt_length), ("chunk length", chunk_length)):
        if not 1 <= value <= plan.context_length:
            raise ConfigError(f"{name} {value} is outside 1..{plan.context_length}, the model's context")
    if chunks_in_flight is not None:
        check_chunks_in_flight(chunks_in_flight)
    found_scheme, rule = known_scheme(scheme), find_policy(policy)
    _check_ranks(plan, device, found_scheme, ranks, link)
    if link is not None:
        plan = plan.on_cpu()
    if isinstance(device, DeviceProfile) and not device.uses_npu:
        if near:
            raise ConfigError(f"{device.name} leaves the NPU idle; omit attention on the NPU")
        plan = plan.on_cpu()
    if near and link is not None:
        raise ConfigError("attention on the NPU is simulated on one machine only; omit the link and the ranks")
    plans = [*near.values(), *([] if plan.context_length in near else [plan])] if near else [plan]
    has_npu = device.has_npu if isinstance(device, MeasuredProfile) else device.uses_npu
    on_npu = sum(has_npu and subgraph.device == "npu" for of in plans for subgraph in of.subgraphs)
    graphs = graphs_of(graph_lengths, chunk_length, found_scheme) if on_npu else ()
    runs: list[_SimulatedRun] = []
    for used, chunks in _parts(plan, near, cut(prompt_length, chunk_length)):
        runs.append(
            _run(
                used,
                device,
                chunks,
                begin_ns=runs[-1].record.end_ns if runs else 0,
                chunk_length=chunk_length,
                graph_lengths=graphs,
                policy=rule,
                scheme=found_scheme,
                chunks_in_flight=chunks_in_flight,
                threads=threads,
                ranks=ranks,
                link=link,
                overlaps_conversion=overlaps_conversion,
            )
        )
    records = tuple(run.record for run in runs)
    prompt_us = device.prompt_us if isinstance(device, DeviceProfile) else device.budget(threads).prompt_us
    end_ns = records[-1].end_ns
    ttft_ns = end_ns + 1000 * prompt_us
    by_parameter = _ms_by_parameter(runs, prompt_us)
    joules: dict[str, float] = {}
    interval: Interval | None = None
    if isinstance(device, DeviceProfile):
        joules = _joules(device, runs, ttft_ns)
        interval = _interval(device, by_parameter, joules, ttft_ns, prompt_length)
    num_graphs = max(1, len(graphs))
    return Simulation(
        device=device.name,
        scheme=found_scheme.name,
        policy=rule.name,
        prompt_length=prompt_length,
        chunk_length=chunk_length,
        graph_lengths=graphs,
        contexts=num_graphs * on_npu,
        padding=_padding(runs),
        chunks_in_flight=max(min(record.pipeline.num_slots, record.num_chunks) for record in records),
        time_to_first_token_ms=ttft_ns / 1e6,
        tokens_per_s=1e9 * prompt_length / max(ttft_ns, 1),
        makespan_ms=end_ns / 1e6,
        interval=interval,
        processors=_shares(records),
        **_utilisation(records),
        link=None if link is None else _link_shares(runs[0], link, ranks),
        peak_memory_bytes=_memory(plan, plans, num_graphs, found_scheme, records, prompt_length),
        energy_joules=sum(joules.values()) if joules else None,
        joules=joules,
        ms_by_parameter=by_parameter if isinstance(device, DeviceProfile) else {},
        records=records,
    )


def graphs_of(graph_lengths: Collection[int], chunk_length: int, scheme: Scheme) -> tuple[int, ...]:
    """Return the numbers of rows of the NPU's graphs, shortest first, given those that are compiled in addition to the
    chunk length; an empty tuple if there is only one. Raise ConfigError for a length below 1.
    """
    if graph_lengths and min(graph_lengths) < 1:
        raise ConfigError(f"a graph length is {min(graph_lengths)}, expected at least 1")
    found = distinct_graphs([length for length in {*graph_lengths, chunk_length} if length <= chunk_length], scheme)
    return found if len(found) > 1 else ()


def graphs_text(graph_lengths: Sequence[int]) -> str:
    """Return the lengths of several graphs as for `--chunk`, such as "1,8,32"; empty if there are not several."""
    return ",".join(map(str, graph_lengths))


def chunk_text(chunk_length: int, graph_lengths: Sequence[int] = ()) -> str:
    """Return the lengths of the NPU's graphs as for `--chunk`: "32", or "1,8,32" if there are several."""
    return graphs_text(graph_lengths) or str(chunk_length)


def known_scheme(scheme: str | Scheme) -> Scheme:
    """Return a scheme that a profile can have costs for. Raise ConfigError for an unknown name, and for "mixed"."""
    if scheme == MIXED:
        raise ConfigError(
            "the scheme 'mixed' depends on a search over a model's weights; compile the model with it, and give the "
            "engine directory"
        )
    return find_scheme(scheme) if isinstance(scheme, str) else scheme


def _parts(plan: Plan, near: Mapping[int, Plan], chunks: Sequence[ChunkWork]) -> list[tuple[Plan, list[ChunkWork]]]:
    """Return the runs of a prompt: each chunk with attention on the NPU by itself, and all later chunks together."""

    def reach_of(chunk: ChunkWork) -> int | None:
        return min((reach for reach in near if chunk.position <= reach), default=None)

    parts: list[tuple[Plan, list[ChunkWork]]] = []
    for reach, group in groupby(chunks, key=reach_of):
        if reach is None:
            parts.append((plan, list(group)))
        else:
            parts += [(near[reach], [chunk]) for chunk in group]
    return parts


@dataclass(frozen=True, kw_only=True)
class _SimulatedRun:
    """The record of a part of a prompt, and the work of its tasks."""

    record: RunRecord
    work_of: WorkOf
    chunks: Sequence[ChunkWork]


def _run(
    plan: Plan,
    device: DeviceProfile | MeasuredProfile,
    chunks: Sequence[ChunkWork],
    *,
    begin_ns: int,
    chunk_length: int,
    graph_lengths: tuple[int, ...],
    policy: Policy,
    scheme: Scheme,
    chunks_in_flight: int | None,
    threads: int | None,
    ranks: int,
    link: LinkProfile | None,
    overlaps_conversion: bool,
) -> _SimulatedRun:
    """Run consecutive chunks of a prompt, from `begin_ns` on. Other arguments and errors are those of `simulate`."""
    work_of: WorkOf
    if isinstance(device, DeviceProfile):
        if threads is not None:
            raise ConfigError(f"{device.name} has a fixed cost model; omit the number of threads")
        processors = device.processors(plan, overlaps_conversion=overlaps_conversion)
        work_of = ModelledWork(
            plan, scheme, device, chunk_length=chunk_length, chunks=chunks, graph_lengths=graph_lengths
        )
        speeds = memory_speeds(device.memory.gb_per_s, work_of)
    else:
        if overlaps_conversion:
            raise ConfigError(
                f"{device.name} was measured with conversion included and has no duration of conversion alone"
            )
        budget = device.budget(threads)
        processors = device.processors(budget.threads)
        costs = measured_costs(plan, device, budget.subgraphs, chunk_length, scheme.name, graph_lengths)
        task_us = budget.task_us
        if len(chunks) == 1 and not device.has_npu and policy.is_concurrent:  # see `ExecutorSet.for_one`
            is_fused = len(decode_plan(plan, budget.decode).subgraphs) < len(plan.subgraphs)
            task_us = 0.0 if is_fused else task_us
        work_of = MeasuredWork(plan, costs, task_us, chunks, graph_lengths)
        speeds = crowd_speeds(lambda task: costs[plan.subgraphs[task.subgraph].name].speeds)
    if link is not None:
        work_of = with_sums(work_of, plan, chunks, link, ranks)
        speeds = slowest(speeds, link_speeds(link.gb_per_s, work_of))
    num_slots = chunks_in_flight or chunk_slots(plan, chunk_length, processors)
    pipeline = Pipeline(
        stages=stages_of(plan),
        processors=with_link(processors, plan, num_slots),
        policy=policy.name,
        chunk_length=chunk_length,
        num_slots=num_slots,
        slot_bytes=BufferLayout(plan, chunk_length).num_bytes,
        graph_lengths=graph_lengths,
        origin="predicted",
    )
    durations = [[work_of(Task(s, c)).ns for c in range(len(chunks))] for s in range(len(plan.subgraphs))]
    schedule = Schedule(
        plan,
        routes=plan.flow.routes(len(chunks), [c for c, chunk in enumerate(chunks) if chunk.num_rows]),
        chunks_in_flight=num_slots,
        processors=pipeline.processors,
        policy=policy,
        durations=durations,
    )
    events = run_on_virtual_clock(schedule, schedule.duration, speeds, edges=lambda task: work_of(task).edges_ns)
    events = [_later(event, begin_ns) for event in events] if begin_ns else events
    record = RunRecord(
        pipeline=pipeline,
        num_tokens=sum(chunk.num_tokens for chunk in chunks),
        position=chunks[0].position,
        position_bytes=sum(state_bytes(t, {"P": 1}) for t in plan.state_tensors if "P" in t.shape),
        start_ns=begin_ns,
        end_ns=events[-1].end_ns,
        events=tuple(events),
    )
    return _SimulatedRun(record=record, work_of=work_of, chunks=chunks)


def _later(event: TaskEvent, ns: int) -> TaskEvent:
    passage = None if event.passage is None else Passage(*(time + ns for time in event.passage))
    return event._replace(start_ns=event.start_ns + ns, end_ns=event.end_ns + ns, passage=passage)


def _check_ranks(
    plan: Plan, device: DeviceProfile | MeasuredProfile, scheme: Scheme, ranks: int, link: LinkProfile | None
) -> None:
    """Raise ConfigError unless ranks, link, plan, profile and scheme fit together."""
    if not 1 <= ranks <= MOST_RANKS:
        raise ConfigError(f"{ranks} ranks, expected 1 to {MOST_RANKS}")
    if ranks > 1 and link is None:
        raise ConfigError(f"{ranks} ranks need a link; choose one (--link 1GbE)")
    if ranks == 1 and link is not None:
        raise ConfigError("a link needs several ranks, found 1; set their number (--ranks 2), or omit the link")
    has_sums = any(subgraph.device == "link" for subgraph in plan.subgraphs)
    if has_sums and ranks == 1:
        raise ConfigError(
            "the plan is one rank's share of a decoder; set the number of ranks and their link (--ranks 2 --link 1GbE)"
        )
    if ranks > 1:
        if not has_sums:
            raise ConfigError(f"the plan is that of a complete decoder, expected the share of one of {ranks} ranks")
        if isinstance(device, MeasuredProfile):
            raise ConfigError(
                f"{device.name} was measured on a complete decoder and has no costs of a share of it; simulate "
                "ranks on a device with a cost model"
            )
        if scheme.is_static:
            raise ConfigError(
                f"the scheme {scheme.name!r} is static, and the simulation of {ranks} ranks has no NPU; use a dynamic "
                "scheme or 'float'"
            )


DEFAULT_MODEL_ERROR = 0.3
"""Error of the model for a profile that was not compared with any run: about that of the profiles that were."""


def _ms_by_parameter(runs: Sequence[_SimulatedRun], prompt_us: float) -> dict[str, float]:
    """Return the milliseconds of all tasks by parameter, the longest first."""
    found: dict[str, float] = defaultdict(float, {"prompt_us": prompt_us / 1000})
    for run in runs:
        for event in run.record.events:
            for name, us in run.work_of(event.task).us_by_parameter.items():
                found[name] += us / 1000
    return dict(sorted(found.items(), key=lambda item: -item[1]))


POWER_PARAMETERS = {
    "npu busy": "npu.busy_watts",
    "cpu busy": "cpu.busy_watts",
    "memory": "memory.pj_per_byte",
    "idle": "idle_watts",
}


def _interval(
    device: DeviceProfile, ms: Mapping[str, float], joules: Mapping[str, float], ttft_ns: float, prompt_length: int
) -> Interval:
    """Return the intervals of a time and an energy, given the milliseconds by parameter and the joules by state."""

    def deviations(shares: Mapping[str, float]) -> list[float]:
        total = sum(shares.values()) or 1.0
        known = {name: share for name, share in shares.items() if name in device.sources}
        return [device.sources[name].log_deviation * share / total for name, share in known.items()]

    model = DEFAULT_MODEL_ERROR if device.model_error is None else device.model_error
    deviation = hypot(model, *deviations(ms))
    factor = exp(ENDS * deviation)
    times = ttft_ns / factor, ttft_ns * factor
    energy: tuple[float, float] | None = None
    if joules:
        total = sum(joules.values())
        by_time = deviation * (1 - joules["memory"] / (total or 1.0))  # the bytes do not depend on the time
        factor = exp(
            ENDS * hypot(by_time, *deviations({POWER_PARAMETERS[name]: of_one for name, of_one in joules.items()}))
        )
        energy = total / factor, total * factor
    return Interval(
        time_to_first_token_ms=(times[0] / 1e6, times[1] / 1e6),
        tokens_per_s=(1e9 * prompt_length / max(times[1], 1), 1e9 * prompt_length / max(times[0], 1)),
        energy_joules=energy,
    )


def _link_shares(run: _SimulatedRun, link: LinkProfile, ranks: int) -> LinkShares:
    time = link_time([run.record])
    assert time is not None
    return LinkShares(
        name=link.name,
        ranks=ranks,
        sent_bytes=sum(run.work_of(event.task).sent_bytes for event in run.record.events),
        busy_ms=time["busy_ns"] / 1e6,
        busy=time["busy_ns"] / max(run.record.end_ns, 1),
        hidden=time["hidden"],
    )


def _utilisation(records: Sequence[RunRecord]) -> dict[str, float]:
    """Return the shares of a prompt's time, of which each record covers a part."""
    total_ns = sum(record.end_ns - record.start_ns for record in records)
    found: dict[str, float] = {}
    for record in records:
        part = (record.end_ns - record.start_ns) / max(total_ns, 1)
        for name, share in utilisation([record]).items():
            found[name] = found.get(name, 0.0) + part * share
    return found


def _shares(records: Sequence[RunRecord]) -> dict[str, ProcessorShares]:
    shares = {}
    for time in where_time_went(records):
        if time.name == "link":
            continue
        total = max(1, time.total_ns)
        idle = {cause: ns / total for cause, ns in time.idle_ns.items()}
        shares[time.name] = ProcessorShares(busy=sum(time.busy_ns.values()) / total, idle=idle)
    return shares


def measured_costs(
    plan: Plan,
    profile: MeasuredProfile,
    known: Mapping[str, SubgraphCost],
    chunk_length: int,
    scheme: str,
    graph_lengths: Sequence[int] = (),
) -> dict[str, SubgraphCost]:
    """Return the costs of all subgraphs, given those that a profile knows; raise ConfigError if the profile was
    measured on another configuration."""
    wanted, own = chunk_text(chunk_length, graph_lengths), chunk_text(profile.chunk_length, profile.graph_lengths)
    if (scheme, wanted) != (profile.scheme, own):
        raise ConfigError(
            f"{profile.name} was measured with scheme {profile.scheme} and chunks of {own}, not {scheme} and {wanted}; "
            "run `chunkrt profile` with these"
        )
    first = twins(plan)
    for name in first.values():
        if name not in known:
            raise ConfigError(
                f"{profile.name} was measured with {profile.model} and has no subgraph {name} of this model; "
                "run `chunkrt profile` with it"
            )
    return {name: known[twin] for name, twin in first.items()}


def _padding(runs: Sequence[_SimulatedRun]) -> float | None:
    """Return the share of the rows of chunks on the NPU that are padding; None if no chunk is on the NPU."""
    rows = [
        (run.record.pipeline.rows_on_npu(chunk.num_tokens), chunk.num_tokens)
        for run in runs
        if any(event.processor == "npu" for event in run.record.events)
        for chunk in run.chunks
    ]
    computed = sum(on_npu for on_npu, _ in rows)
    return 1 - sum(num_tokens for _, num_tokens in rows) / computed if computed else None


def _memory(
    plan: Plan,
    plans: Sequence[Plan],
    num_graphs: int,
    scheme: Scheme,
    records: Sequence[RunRecord],
    prompt_length: int,
) -> int:
    """Return the peak memory in bytes. The CPU keeps all weights for decode. An NPU keeps a copy of its linears for
    each of `plans` and of their graphs.
    """
    stored = weight_bytes(plan, scheme)
    weights = sum(stored.values())
    if any(processor.devices == {"npu"} for record in records for processor in record.pipeline.processors):
        weights += num_graphs * sum(
            stored[name] for p in plans for s in p.subgraphs if s.device == "npu" for name in s.weights
        )
    in_flight = max(min(r.pipeline.num_slots, r.num_chunks) * r.pipeline.slot_bytes for r in records)
    slots = plan.slots(prompt_length, records[0].pipeline.chunk_length)
    fixed = sum(state_bytes(tensor, slots) for tensor in plan.state_tensors if "P" not in tensor.shape)
    return weights + prompt_length * records[0].position_bytes + fixed + in_flight


def _joules(device: DeviceProfile, runs: Sequence[_SimulatedRun], ttft_ns: float) -> dict[str, float]:
    """Return the energy by processor and state. It is empty for several ranks, because links have no power figures."""
    if any(stage.device == "link" for run in runs for stage in run.record.pipeline.stages):
        return {}
    joules = {"npu busy": 0.0, "cpu busy": 0.0, "memory": 0.0, "idle": device.idle_watts * ttft_ns / 1e9}
    for run in runs:
        for event in run.record.events:
            on_npu = event.processor == "npu"
            watts = device.npu.busy_watts if on_npu else device.cpu.busy_watts
            joules["npu busy" if on_npu else "cpu busy"] += watts * event.own_ns / 1e9
            joules["memory"] += run.work_of(event.task).num_bytes * device.memory.pj_per_byte / 1e12
    return joules
