"""The simulator: runs a prompt through the real schedule and policies on a virtual clock, with the costs of a
device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from chunkrt.engine_directory.figures import weight_bytes
from chunkrt.errors import ConfigError
from chunkrt.graph.plan import MOST_RANKS, SHADOW_OP, Plan
from chunkrt.quant.scheme import MIXED, Scheme, find_scheme
from chunkrt.runtime.buffers import BufferLayout
from chunkrt.runtime.chunk_slots import check_chunks_in_flight, chunk_slots
from chunkrt.runtime.policy import find_policy
from chunkrt.runtime.record import Pipeline, RunRecord, stages_of
from chunkrt.runtime.schedule import Schedule
from chunkrt.runtime.state_tensors import state_bytes
from chunkrt.runtime.tasks import Task, TaskEvent, with_link
from chunkrt.runtime.trace.idle import Cause, where_time_went
from chunkrt.runtime.trace.utilisation import link_time, utilisation
from chunkrt.runtime.virtual_clock import Speeds, run_on_virtual_clock
from chunkrt.simulate.link import LinkProfile
from chunkrt.simulate.measured import MeasuredProfile, SubgraphCost, ThreadsCost, twins
from chunkrt.simulate.profile import DeviceProfile
from chunkrt.simulate.speeds import crowd_speeds, link_speeds, memory_speeds, slowest
from chunkrt.simulate.work import ModelledWork, WorkOf, cut, measured_work, with_sums


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
        peak_memory_bytes: weights, keys and values of the prompt, and chunks in flight.
        energy_joules: None if the profile has no power figures, or with several ranks.
        record: record of all tasks, like the executor's record of a run; traces are drawn from it.
    """

    device: str
    scheme: str
    policy: str
    prompt_length: int
    chunk_length: int
    chunks_in_flight: int
    time_to_first_token_ms: float
    tokens_per_s: float
    makespan_ms: float
    processors: Mapping[str, ProcessorShares]
    npu_busy: float
    cpu_busy: float
    overlap: float
    link: LinkShares | None
    peak_memory_bytes: int
    energy_joules: float | None
    record: RunRecord

    def __repr__(self) -> str:
        """Return the choices and the main figures; `to_dict` returns all."""
        return (
            f"Simulation({self.device}, {self.scheme}, policy {self.policy}, {self.prompt_length} tokens in chunks "
            f"of {self.chunk_length}, {self.chunks_in_flight} in flight: {self.time_to_first_token_ms:.1f} ms to the "
            f"first token, {self.tokens_per_s:.1f} tokens/s, NPU {self.npu_busy:.0%} and CPU {self.cpu_busy:.0%} busy, "
            f"{self.peak_memory_bytes / 2**20:.0f} MiB)"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all fields except the record, for JSON."""
        figures = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "record"}
        processors = {name: asdict(shares) for name, shares in self.processors.items()}
        return figures | {"processors": processors, "link": None if self.link is None else asdict(self.link)}


def simulate(
    plan: Plan,
    device: DeviceProfile | MeasuredProfile,
    *,
    prompt_length: int,
    chunk_length: int,
    policy: str,
    scheme: str | Scheme,
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
        policy: name of the policy that orders tasks; it uses only the durations of tasks.
        scheme: quantisation of linears, by name or fixed by a checkpoint.
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
    found_scheme = find_scheme(scheme) if isinstance(scheme, str) else scheme
    check_costs_are_known(plan, found_scheme)
    _check_ranks(plan, device, found_scheme, ranks, link)
    if link is not None:
        plan = plan.on_cpu()
    chunks = cut(prompt_length, chunk_length)
    work_of: WorkOf
    if isinstance(device, DeviceProfile):
        if threads is not None:
            raise ConfigError(f"{device.name} has a fixed cost model; omit the number of threads")
        processors = device.processors(plan, overlaps_conversion=overlaps_conversion)
        prompt_us = device.prompt_us
        work_of = ModelledWork(plan, found_scheme, device, chunk_length=chunk_length, chunks=chunks)
        speeds = memory_speeds(device.memory.gb_per_s, work_of)
    else:
        if overlaps_conversion:
            raise ConfigError(
                f"{device.name} was measured with conversion included and has no duration of conversion alone"
            )
        budget = device.budget(threads)
        processors, prompt_us = device.processors(budget.threads), budget.prompt_us
        costs = measured_costs(plan, device, budget, chunk_length, found_scheme.name)
        work_of = measured_work(plan, costs, budget, chunks)
        speeds = crowd_speeds(lambda task: costs[plan.subgraphs[task.subgraph].name].speeds)
    if link is not None:
        work_of = with_sums(work_of, plan, chunks, link, ranks)
        speeds = slowest(speeds, link_speeds(link.gb_per_s, work_of))
    num_slots = chunks_in_flight or chunk_slots(plan, chunk_length, processors)
    record = RunRecord(
        pipeline=Pipeline(
            stages=stages_of(plan),
            processors=with_link(processors, plan, num_slots),
            policy=policy,
            chunk_length=chunk_length,
            num_slots=num_slots,
            slot_bytes=BufferLayout(plan, chunk_length).num_bytes,
        ),
        num_tokens=prompt_length,
        position=0,
        position_bytes=sum(state_bytes(t, {"P": 1}) for t in plan.state_tensors if "P" in t.shape),
        start_ns=0,
        end_ns=0,
        events=(),
    )
    events = _run(plan, record, work_of, speeds)
    record = replace(record, events=events, end_ns=events[-1].end_ns)
    ttft_ns = record.end_ns + 1000 * prompt_us
    return Simulation(
        device=device.name,
        scheme=found_scheme.name,
        policy=policy,
        prompt_length=prompt_length,
        chunk_length=chunk_length,
        chunks_in_flight=min(record.pipeline.num_slots, len(chunks)),
        time_to_first_token_ms=ttft_ns / 1e6,
        tokens_per_s=1e9 * prompt_length / max(ttft_ns, 1),
        makespan_ms=record.end_ns / 1e6,
        processors=_shares(record),
        **asdict(utilisation(events, record.pipeline.stages)),
        link=None if link is None else _link_shares(record, link, ranks, work_of),
        peak_memory_bytes=_memory(plan, found_scheme, record),
        energy_joules=_energy(device, record, work_of, ttft_ns) if isinstance(device, DeviceProfile) else None,
        record=record,
    )


def check_costs_are_known(plan: Plan, scheme: Scheme) -> None:
    """Raise ConfigError if no profile can have costs for some task of a decoder."""
    if scheme.name == MIXED or any(node.op == SHADOW_OP for subgraph in plan.subgraphs for node in subgraph.nodes):
        raise ConfigError("the simulator has no costs of shadows and mixed schemes; simulate w8a8 or w8a16")


def _run(plan: Plan, record: RunRecord, work_of: WorkOf, speeds: Speeds) -> list[TaskEvent]:
    num_chunks = record.num_chunks
    durations = [[work_of(Task(s, c)).ns for c in range(num_chunks)] for s in range(len(plan.subgraphs))]
    schedule = Schedule(
        plan,
        routes=plan.flow.routes(num_chunks, range(num_chunks - 1, num_chunks)),
        chunks_in_flight=record.pipeline.num_slots,
        processors=record.pipeline.processors,
        policy=find_policy(record.pipeline.policy),
        durations=durations,
    )
    return run_on_virtual_clock(schedule, schedule.duration, speeds, edges=lambda task: work_of(task).edges_ns)


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


def _link_shares(record: RunRecord, link: LinkProfile, ranks: int, work_of: WorkOf) -> LinkShares:
    time = link_time([record])
    assert time is not None
    return LinkShares(
        name=link.name,
        ranks=ranks,
        sent_bytes=sum(work_of(event.task).sent_bytes for event in record.events),
        busy_ms=time.busy_ns / 1e6,
        busy=time.busy_ns / max(record.end_ns, 1),
        hidden=time.hidden,
    )


def _shares(record: RunRecord) -> dict[str, ProcessorShares]:
    shares = {}
    for time in where_time_went([record]):
        if time.name == "link":
            continue
        total = max(1, time.total_ns)
        idle = {cause: ns / total for cause, ns in time.idle_ns.items()}
        shares[time.name] = ProcessorShares(busy=sum(time.busy_ns.values()) / total, idle=idle)
    return shares


def measured_costs(
    plan: Plan, profile: MeasuredProfile, budget: ThreadsCost, chunk_length: int, scheme: str
) -> dict[str, SubgraphCost]:
    """Return the measured costs of all subgraphs; raise ConfigError if the profile was measured on another
    configuration."""
    if (scheme, chunk_length) != (profile.scheme, profile.chunk_length):
        raise ConfigError(
            f"{profile.name} was measured with scheme {profile.scheme} and chunks of {profile.chunk_length}, not "
            f"{scheme} and {chunk_length}; run `chunkrt profile` with these"
        )
    first = twins(plan)
    for name in first.values():
        if name not in budget.subgraphs:
            raise ConfigError(
                f"{profile.name} was measured with {profile.model} and has no subgraph {name} of this model; "
                "run `chunkrt profile` with it"
            )
    return {name: budget.subgraphs[twin] for name, twin in first.items()}


def _memory(plan: Plan, scheme: Scheme, record: RunRecord) -> int:
    """Return the peak memory in bytes. The CPU keeps all weights for decode, and an NPU keeps a copy of its linears."""
    stored, pipeline = weight_bytes(plan, scheme), record.pipeline
    weights = sum(stored.values())
    if any(processor.devices == {"npu"} for processor in pipeline.processors):
        weights += sum(stored[name] for s in plan.subgraphs if s.device == "npu" for name in s.weights)
    in_flight = min(pipeline.num_slots, record.num_chunks) * pipeline.slot_bytes
    slots = plan.slots(record.num_tokens, pipeline.chunk_length)
    fixed = sum(state_bytes(tensor, slots) for tensor in plan.state_tensors if "P" not in tensor.shape)
    return weights + record.num_tokens * record.position_bytes + fixed + in_flight


def _energy(device: DeviceProfile, record: RunRecord, work_of: WorkOf, ttft_ns: float) -> float | None:
    if any(stage.device == "link" for stage in record.pipeline.stages):
        return None
    joules = device.idle_watts * ttft_ns / 1e9
    for event in record.events:
        watts = device.npu.busy_watts if event.processor == "npu" else device.cpu.busy_watts
        joules += watts * event.own_ns / 1e9
        joules += work_of(event.task).num_bytes * device.memory.pj_per_byte / 1e12
    return joules
