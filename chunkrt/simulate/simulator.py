"""The simulator: the schedule and the policies that run a prompt, on a virtual clock, with a device's costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from chunkrt.errors import ConfigError
from chunkrt.graph.plan import SHADOW_OP, Plan
from chunkrt.quant.figures import FLOAT16_BYTES, weight_bytes
from chunkrt.quant.scheme import MIXED, Scheme, find_scheme
from chunkrt.runtime.buffers import BufferLayout
from chunkrt.runtime.events import TaskEvent, utilisation
from chunkrt.runtime.idle import Cause, where_time_went
from chunkrt.runtime.policy import Task, find_policy
from chunkrt.runtime.record import Pipeline, RunRecord, stages_of
from chunkrt.runtime.ring import ring_slots
from chunkrt.runtime.schedule import Schedule
from chunkrt.simulate.measured import MeasuredProfile, SubgraphCost, ThreadsCost, twins
from chunkrt.simulate.profile import DeviceProfile
from chunkrt.simulate.shared_clock import Speeds, crowd_speeds, memory_speeds, run_on_shared_clock
from chunkrt.simulate.work import ModelledWork, WorkOf, cut, measured_work


@dataclass(frozen=True, kw_only=True)
class ProcessorShares:
    """How one processor spent the makespan, in shares of its workers' time; `busy` and all of `idle` sum to 1.

    idle: by its cause; see `runtime/idle.py`.
    """

    busy: float
    idle: Mapping[Cause, float]


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """One simulated prompt.

    time_to_first_token_ms: from the prompt to its last token's logits. tokens_per_s: prompt tokens over that time.
    makespan_ms: from the first task's start to the last one's end. npu_busy, cpu_busy: shares of it in which a task of
    that role ran. overlap: in which two tasks or more ran.
    peak_memory_bytes: weights, keys and values of the prompt, chunks in flight. energy_joules: None if the profile
    does not know power. record: of every task, as the executor makes it of a run; traces are drawn from it.
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
    peak_memory_bytes: int
    energy_joules: float | None
    record: RunRecord

    def to_dict(self) -> dict[str, Any]:
        """All but the record, for JSON."""
        figures = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "record"}
        return figures | {"processors": {name: asdict(shares) for name, shares in self.processors.items()}}


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
) -> Simulation:
    """Run one prompt on a virtual clock.

    Args:
        plan: the decoder.
        device: what its tasks cost.
        prompt_length: tokens, 1 to the plan's context.
        chunk_length: C, tokens, 1 to the plan's context.
        policy: the order of tasks, by name. It goes by the durations that tasks have alone.
        scheme: how linears are quantised; by name, or as a checkpoint lets it be.
        chunks_in_flight: ring slots, at least 1; by default as many as the executor takes.
        threads: for a measured profile: one of the thread budgets that were measured, by default the largest.

    Raises:
        ConfigError: an argument is out of range, or does not go with the profile.
    """
    for name, value in (("prompt length", prompt_length), ("chunk length", chunk_length)):
        if not 1 <= value <= plan.context_length:
            raise ConfigError(f"{name} {value} is outside 1..{plan.context_length}, the model's context")
    if chunks_in_flight is not None and chunks_in_flight < 1:
        raise ConfigError(f"{chunks_in_flight} chunks in flight: at least 1 is needed")
    found_scheme = find_scheme(scheme) if isinstance(scheme, str) else scheme
    if found_scheme.name == MIXED or any(
        node.op == SHADOW_OP for subgraph in plan.subgraphs for node in subgraph.nodes
    ):
        raise ConfigError("the simulator does not know what shadows and mixed schemes cost; simulate w8a8 or w8a16")
    chunks = cut(prompt_length, chunk_length)
    work_of: WorkOf
    if isinstance(device, DeviceProfile):
        if threads is not None:
            raise ConfigError(f"{device.name} is modelled as it is; leave the number of threads away")
        processors, prompt_us = device.processors, device.prompt_us
        work_of = ModelledWork(plan, found_scheme, device, chunk_length=chunk_length, chunks=chunks)
        speeds = memory_speeds(device.memory.gb_per_s)
    else:
        budget = device.budget(threads)
        processors, prompt_us = device.processors(budget.threads), budget.prompt_us
        costs = _measured(plan, device, budget, chunk_length, found_scheme.name)
        work_of = measured_work(plan, costs, budget, chunks)
        speeds = crowd_speeds(lambda task: costs[plan.subgraphs[task.subgraph].name].speeds)
    record = RunRecord(
        pipeline=Pipeline(
            stages=stages_of(plan),
            processors=processors,
            policy=policy,
            chunk_length=chunk_length,
            num_slots=chunks_in_flight or ring_slots(plan, chunk_length, processors),
            slot_bytes=BufferLayout(plan, chunk_length).num_bytes,
        ),
        num_tokens=prompt_length,
        position=0,
        position_bytes=sum(t.num_bytes(P=1) // 4 * FLOAT16_BYTES for t in plan.state_tensors if "P" in t.shape),
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
        **asdict(utilisation(events, plan)),
        peak_memory_bytes=_memory(plan, found_scheme, record),
        energy_joules=_energy(device, events, work_of, ttft_ns) if isinstance(device, DeviceProfile) else None,
        record=record,
    )


def _run(plan: Plan, record: RunRecord, work_of: WorkOf, speeds: Speeds) -> list[TaskEvent]:
    num_chunks = record.num_chunks
    durations = [[work_of(Task(s, c)).ns for c in range(num_chunks)] for s in range(len(plan.subgraphs))]
    schedule = Schedule(
        plan,
        num_chunks=num_chunks,
        logit_chunks=range(num_chunks - 1, num_chunks),
        chunks_in_flight=record.pipeline.num_slots,
        processors=record.pipeline.processors,
        policy=find_policy(record.pipeline.policy),
        durations=durations,
    )
    return run_on_shared_clock(schedule, work_of, speeds)


def _shares(record: RunRecord) -> dict[str, ProcessorShares]:
    shares = {}
    for time in where_time_went([record]):
        total = max(1, time.total_ns)
        idle = {cause: ns / total for cause, ns in time.idle_ns.items()}
        shares[time.name] = ProcessorShares(busy=sum(time.busy_ns.values()) / total, idle=idle)
    return shares


def _measured(
    plan: Plan, profile: MeasuredProfile, budget: ThreadsCost, chunk_length: int, scheme: str
) -> dict[str, SubgraphCost]:
    """The measured cost of every subgraph; raises ConfigError if it was measured for something else."""
    if (scheme, chunk_length) != (profile.scheme, profile.chunk_length):
        raise ConfigError(
            f"{profile.name} was measured with scheme {profile.scheme} and chunks of {profile.chunk_length}, not "
            f"{scheme} and {chunk_length}; run `chunkrt profile` with these"
        )
    first = twins(plan)
    for name in first.values():
        if name not in budget.subgraphs:
            raise ConfigError(
                f"{profile.name} was measured with {profile.model} and knows no subgraph {name} of this model; "
                "run `chunkrt profile` with it"
            )
    return {name: budget.subgraphs[twin] for name, twin in first.items()}


def _memory(plan: Plan, scheme: Scheme, record: RunRecord) -> int:
    """Bytes at the peak: the CPU keeps all weights, to decode from; an NPU its linears once more."""
    stored, pipeline = weight_bytes(plan, scheme), record.pipeline
    weights = sum(stored.values())
    if any(processor.devices == {"npu"} for processor in pipeline.processors):
        weights += sum(stored[name] for s in plan.subgraphs if s.device == "npu" for name in s.weights)
    ring = min(pipeline.num_slots, record.num_chunks) * pipeline.slot_bytes
    slots = plan.slots(record.num_tokens, pipeline.chunk_length)
    fixed = sum(
        tensor.num_bytes(**slots) // 4 * FLOAT16_BYTES for tensor in plan.state_tensors if "P" not in tensor.shape
    )
    return weights + record.num_tokens * record.position_bytes + fixed + ring


def _energy(device: DeviceProfile, events: Sequence[TaskEvent], work_of: WorkOf, ttft_ns: float) -> float:
    joules = device.idle_watts * ttft_ns / 1e9
    for event in events:
        watts = device.npu.busy_watts if event.processor == "npu" else device.cpu.busy_watts
        joules += watts * (event.end_ns - event.start_ns) / 1e9
        joules += work_of(event.task).num_bytes * device.memory.pj_per_byte / 1e12
    return joules
