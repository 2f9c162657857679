"""Costs of serving: all ways of a chunk through a decoder, and the durations of its tasks.

If an NPU exists, decoding sequences may bypass it. For this, the plan contains the same subgraphs a second time, all on
the CPU, so that one schedule covers both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from chunkrt.errors import ConfigError
from chunkrt.graph.flow import Route
from chunkrt.graph.plan import Plan
from chunkrt.quant.scheme import Scheme
from chunkrt.runtime.executor import DecodeOn
from chunkrt.runtime.tasks import Processor, Task
from chunkrt.runtime.virtual_clock import Speeds
from chunkrt.simulate.measured import MeasuredProfile, decode_plan
from chunkrt.simulate.profile import DeviceProfile
from chunkrt.simulate.simulator import measured_costs
from chunkrt.simulate.speeds import crowd_speeds, memory_speeds
from chunkrt.simulate.work import ChunkWork, MeasuredWork, ModelledWork, Work, WorkOf


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way through a decoder.

    Attributes:
        plan: a plan of only the subgraphs of this way.
        first: index of its first subgraph in the plan of all ways.
        processors: the processors of this way.
    """

    plan: Plan
    first: int
    processors: tuple[Processor, ...]

    def route(self, num_subgraphs: int, *, with_logits: bool) -> Route:
        """Return the route of a chunk in a plan of `num_subgraphs` subgraphs."""
        route = self.plan.flow.with_logits if with_logits else self.plan.flow.without_logits
        followers = [tuple(index + self.first for index in of_one) for of_one in route.followers]
        behind = num_subgraphs - self.first - len(followers)
        return Route(
            subgraphs=tuple(index + self.first for index in route.subgraphs),
            first=tuple(index + self.first for index in route.first),
            followers=((),) * self.first + tuple(followers) + ((),) * behind,
        )


@dataclass(frozen=True, kw_only=True)
class ServingCosts:
    """Costs of a decoder's tasks.

    Attributes:
        plan: the subgraphs of all ways, one way after the other.
        ways: the ways by name. Chunks with rows of prompts take the first: "npu" with an NPU, otherwise "prompts" or
            "cpu". Chunks of single tokens take "cpu", unless the NPU computes them.
        prompt_ns: overhead of a prompt before its tasks.
        step_ns, token_ns: overhead after a chunk that ends tokens of answers: a constant time, and a time for each of
            these tokens.
        chunks: receives every chunk; `work_of` and `speeds` read it.
        graph_lengths: see `Pipeline.graph_lengths`.
        decodes_apart: if both ways exist, returns True if single tokens at the given positions bypass the NPU.
    """

    plan: Plan
    ways: Mapping[str, Way]
    processors: tuple[Processor, ...]
    prompt_ns: float
    chunks: list[ChunkWork]
    work_of: WorkOf
    speeds: Speeds
    decodes_apart: Callable[[Sequence[int]], bool]
    step_ns: float = 0.0
    token_ns: float = 0.0
    graph_lengths: tuple[int, ...] = ()

    def way_of(self, chunk: ChunkWork, *, is_apart: bool) -> str:
        """Return the name of a chunk's way; `is_apart` is true for a chunk that bypasses the NPU."""
        is_decode = all(num_tokens == 1 for _, num_tokens in chunk.parts)
        return "cpu" if is_apart or ("npu" not in self.ways and is_decode) else next(iter(self.ways))


def serving_costs(
    plan: Plan,
    device: DeviceProfile | MeasuredProfile,
    scheme: Scheme,
    *,
    chunk_length: int,
    graph_lengths: tuple[int, ...] = (),
    threads: int | None,
    decode_on: DecodeOn,
) -> ServingCosts:
    """Return the costs of a decoder's tasks on a device. `graph_lengths` are those of `Pipeline`.

    Raises:
        ConfigError: the arguments do not fit the profile.
    """
    if isinstance(device, MeasuredProfile):
        return _measured(plan, device, scheme, chunk_length, graph_lengths, threads, decode_on)
    if threads is not None:
        raise ConfigError(f"{device.name} has a fixed cost model; omit the number of threads")
    chunks: list[ChunkWork] = []
    if not device.uses_npu:
        plan = plan.on_cpu()
    processors = device.processors(plan)
    whole = ModelledWork(plan, scheme, device, chunk_length=chunk_length, chunks=chunks, graph_lengths=graph_lengths)
    work_of: WorkOf = whole
    decodes_apart = never
    if not has_npu(processors):
        graph_lengths = ()
        if decode_on == "npu":
            raise ConfigError("all of the model runs on the CPU; remove --decode-on npu")
        ways = {"cpu": Way(plan=plan, first=0, processors=processors)}
    else:
        ways = {"npu": Way(plan=plan, first=0, processors=processors)}
        if decode_on != "npu":
            on_cpu = plan.on_cpu()
            alone = ModelledWork(on_cpu, scheme, device, chunk_length=chunk_length, chunks=chunks)
            ways["cpu"] = Way(plan=on_cpu, first=len(plan.subgraphs), processors=processors[1:])
            work_of = _either(whole, alone, len(plan.subgraphs))

            def decodes_apart(positions: Sequence[int]) -> bool:
                return decode_on == "cpu" or _together(alone, plan, positions) <= _together(whole, plan, positions)

    work_of = cache(work_of)
    return ServingCosts(
        plan=replace(plan, subgraphs=tuple(subgraph for way in ways.values() for subgraph in way.plan.subgraphs)),
        ways=ways,
        processors=processors,
        prompt_ns=1000 * device.prompt_us,
        chunks=chunks,
        work_of=work_of,
        speeds=memory_speeds(device.memory.gb_per_s, work_of),
        decodes_apart=decodes_apart,
        graph_lengths=graph_lengths,
    )


def never(positions: Sequence[int]) -> bool:
    """Run single tokens the same way as all others."""
    return False


def _together(work: ModelledWork | MeasuredWork, plan: Plan, positions: Sequence[int]) -> int:
    """Return the nanoseconds of a chunk of single tokens at some positions, without overlap."""
    chunk = ChunkWork.shared([(position, 1) for position in positions], len(positions))
    return sum(work.of(index, chunk).ns for index in range(len(plan.subgraphs)))


def has_npu(processors: Sequence[Processor]) -> bool:
    """Return True if an NPU is among the processors."""
    return any(processor.devices == {"npu"} for processor in processors)


def _measured(
    plan: Plan,
    device: MeasuredProfile,
    scheme: Scheme,
    chunk_length: int,
    graph_lengths: tuple[int, ...],
    threads: int | None,
    decode_on: DecodeOn,
) -> ServingCosts:
    budget = device.budget(threads)
    if decode_on == "npu" and not device.has_npu:
        raise ConfigError(
            f"{device.name} was measured without an NPU, so it cannot predict decode on the NPU; remove --decode-on npu"
        )
    chunks: list[ChunkWork] = []
    processors = device.processors(budget.threads)
    size = len(plan.subgraphs)
    costs = measured_costs(plan, device, budget.subgraphs, chunk_length, scheme.name, graph_lengths)
    work_of: WorkOf
    work_of = whole = MeasuredWork(plan, costs, budget.task_us, chunks, graph_lengths)
    by_task = [costs[subgraph.name] for subgraph in plan.subgraphs]
    ways = {"npu" if device.has_npu else "prompts": Way(plan=plan, first=0, processors=processors)}
    decodes_apart = never
    if decode_on != "npu":
        if not budget.decode:
            raise ConfigError(
                f"{device.name} has no costs of decode on the CPU; run `chunkrt profile` with the CPU's weights, or "
                "add --decode-on npu"
            )
        on_cpu = decode_plan(plan, budget.decode)
        of_decode = measured_costs(on_cpu, device, budget.decode, chunk_length, scheme.name, graph_lengths)
        ways["cpu"] = Way(plan=on_cpu, first=size, processors=processors[-1:])
        alone = MeasuredWork(on_cpu, of_decode, budget.task_us, chunks)
        work_of = _either(whole, alone, size)
        by_task += [of_decode[subgraph.name] for subgraph in on_cpu.subgraphs]

        def decodes_apart(positions: Sequence[int]) -> bool:
            if decode_on == "cpu" or not device.has_npu:
                return device.has_npu
            return _together(alone, on_cpu, positions) <= _together(whole, plan, positions)

    return ServingCosts(
        plan=replace(plan, subgraphs=tuple(subgraph for way in ways.values() for subgraph in way.plan.subgraphs)),
        ways=ways,
        processors=processors,
        prompt_ns=1000 * budget.prompt_us,
        step_ns=1000 * budget.step_us,
        token_ns=1000 * budget.token_us,
        chunks=chunks,
        work_of=work_of,
        speeds=crowd_speeds(lambda task: by_task[task.subgraph].speeds),
        decodes_apart=decodes_apart,
        graph_lengths=graph_lengths,
    )


def _either(first: WorkOf, second: WorkOf, size: int) -> WorkOf:
    """Combine the work of two ways, the first of which has `size` subgraphs, one after the other."""

    def work_of(task: Task) -> Work:
        if task.subgraph < size:
            return first(task)
        return second(Task(task.subgraph - size, task.chunk))

    return work_of
