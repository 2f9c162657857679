"""Compute measured profiles from recorded runs.

A profile contains the duration of every subgraph alone, and the slowdown of concurrent tasks.

Costs come from runs of one task at a time, in which the other subgraphs determine the content of the processor's
caches. Costs are means within a run, because the time of a run is a sum, and medians over runs, because these are
robust against other load. Costs of decode come from chunks of one and of several sequences, and of short and of long
histories.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from chunkrt.graph.plan import Plan
from chunkrt.runtime.record import RunRecord
from chunkrt.runtime.tasks import TaskEvent
from chunkrt.runtime.trace.idle import where_time_went
from chunkrt.simulate.measured import SubgraphCost, ThreadsCost, decode_plan, twins
from chunkrt.simulate.work import ChunkWork, cut, measured_rows

SLOWEST = 0.05
"""Lower limit of the speed of a task among others, relative to its speed alone."""


def learn_budget(
    plan: Plan,
    *,
    threads: int,
    alone: Sequence[RunRecord],
    crowded: Sequence[RunRecord],
    decoded: Sequence[Sequence[RunRecord]],
) -> ThreadsCost:
    """Return the measurements of one thread budget.

    Args:
        plan: the decoder.
        threads: the thread budget.
        alone: runs under the policy "sequential", some for a prompt of two or more complete chunks, and some for
            shorter prompts, such as half a chunk, or with several graphs on the NPU the length of each.
        crowded: runs of the prompt of complete chunks under the policy to be predicted.
        decoded: see `learn_decode`.
    """
    costs = learn_costs(plan, alone)
    workers = sum(processor.workers for processor in crowded[0].pipeline.processors)
    speeds = learn_speeds(plan, costs, crowded, workers)
    decode, step_us, token_us = learn_decode(plan, decoded)
    return ThreadsCost(
        threads=threads,
        prompt_us=median((r.end_ns - r.start_ns - _makespan(r.events)) / 1000 for r in crowded),
        task_us=median(_overhead_ns(record) / len(record.events) / 1000 for record in crowded),
        step_us=step_us,
        token_us=token_us,
        subgraphs={name: replace(cost, speeds=speeds[name]) for name, cost in costs.items()},
        decode=decode,
    )


def learn_costs(plan: Plan, runs: Sequence[RunRecord]) -> dict[str, SubgraphCost]:
    """Return the costs of all representative subgraphs by name; `learn_budget` describes the runs."""
    first = twins(plan)
    whole: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    short: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    chunk_length, graph_lengths = runs[0].pipeline.chunk_length, runs[0].pipeline.graph_lengths
    for record in runs:
        samples: dict[tuple[str, int], list[int]] = defaultdict(list)
        for event in record.events:
            name = first[plan.subgraphs[event.task.subgraph].name]
            samples[name, event.task.chunk].append(event.end_ns - event.start_ns)
        for (name, chunk), durations in samples.items():
            us = fmean(durations) / 1000
            is_short = record.num_tokens < chunk_length
            (short[name][record.num_tokens] if is_short else whole[name][chunk]).append(us)
    chunks = cut(max(record.num_tokens for record in runs), chunk_length)
    costs = {}
    for subgraph in plan.subgraphs:
        if first[subgraph.name] != subgraph.name:
            continue
        medians = {chunk: median(samples) for chunk, samples in whole[subgraph.name].items()}
        pairs = np.array([chunks[chunk].pairs(subgraph.window) for chunk in medians], np.float64)
        if subgraph.all_state and np.ptp(pairs):
            slope, base = np.polyfit(pairs, list(medians.values()), 1)
            pair_us = max(0.0, float(slope))
            base = max(0.0, float(base) if slope > 0 else fmean(medians.values()))
        else:
            pair_us, base = 0.0, fmean(medians.values())
        row_us = 0.0
        if subgraph.rows == "T" and short[subgraph.name]:
            least = min(short[subgraph.name])
            shortest = ChunkWork(num_tokens=least, num_rows=1, position=0)
            rows = measured_rows(plan, subgraph, shortest, graph_lengths)
            rest = median(short[subgraph.name][least]) - pair_us * shortest.pairs(subgraph.window)
            if rows < chunk_length:
                row_us = min(max(0.0, (base - rest) / (chunk_length - rows)), base / chunk_length)
        costs[subgraph.name] = SubgraphCost(
            subgraph=subgraph.name, fixed_us=base - row_us * chunk_length, row_us=row_us, pair_us=pair_us
        )
    return costs


class _DecodeChunk(NamedTuple):
    """A chunk of decoding sequences: its work, and its events in the order of time."""

    work: ChunkWork
    events: Sequence[TaskEvent]


def learn_decode(plan: Plan, runs: Sequence[Sequence[RunRecord]]) -> tuple[dict[str, SubgraphCost], float, float]:
    """Return the costs of all subgraphs of `decode_plan` by name, and `step_us` and `token_us` of `ThreadsCost`.

    Args:
        plan: the decoder.
        runs: for each run of one or several sequences the records of all its tokens, which the CPU computed. The
            numbers of sequences and their positions must differ between runs, otherwise their costs are not separated.
    """
    steps = [_steps(records) for records in runs]
    if not any(steps):
        return {}, 0.0, 0.0
    pipeline = next(record.pipeline for records in runs for record in records if record.is_decode)
    plan = decode_plan(plan, {stage.name for stage in pipeline.stages})
    costs = {}
    first = twins(plan)
    for subgraph in plan.subgraphs:
        if first[subgraph.name] != subgraph.name:
            continue
        samples: dict[tuple[float, ...], list[float]] = defaultdict(list)
        for work, events in (step for of_run in steps for step in of_run):
            own = [
                e.end_ns - e.start_ns for e in events if first[plan.subgraphs[e.task.subgraph].name] == subgraph.name
            ]
            pairs = work.pairs(subgraph.window) if subgraph.all_state else 0
            samples[1.0, work.num_tokens, pairs].append(fmean(own) / 1000)
        fixed_us, row_us, pair_us = _fit(samples)
        costs[subgraph.name] = SubgraphCost(subgraph=subgraph.name, fixed_us=fixed_us, row_us=row_us, pair_us=pair_us)
    gaps: dict[tuple[float, ...], list[float]] = defaultdict(list)
    for of_run in steps:
        for step, following in pairwise(of_run):
            gap_us = (following.events[0].start_ns - step.events[-1].end_ns) / 1000
            gaps[1.0, step.work.num_tokens].append(gap_us)
    step_us, token_us = _fit(gaps)
    return costs, step_us, token_us


def _steps(records: Sequence[RunRecord]) -> list[_DecodeChunk]:
    """Return the chunks of decoding sequences in the order of time, without those that only some sequences share."""
    found: dict[int, _DecodeChunk] = {}
    for record in sorted(records, key=lambda record: record.start_ns):
        if record.is_decode:
            key, segments = len(found), [(record.position, 1)]
            if record.chunks:
                key, segments = record.chunks[0].number, [segment[1:] for segment in record.chunks[0].segments]
            found[key] = _DecodeChunk(ChunkWork.shared(segments, len(segments)), record.events)
    most = max((len(step.work.segments) for step in found.values()), default=0)
    return [step for step in found.values() if step.work.num_tokens == len(step.work.segments) == most]


def _fit(samples: Mapping[tuple[float, ...], Sequence[float]]) -> tuple[float, ...]:
    """Return the factors, at least 0, whose sums of products with the keys are nearest to the medians of the samples,
    by their relative errors."""
    terms = np.array(list(samples), np.float64)
    values = np.array([median(of_key) for of_key in samples.values()])
    weights = 1 / np.maximum(values, 1e-3)
    used = [column for column in range(terms.shape[1]) if column == 0 or np.ptp(terms[:, column])]
    while True:
        found = np.linalg.lstsq(terms[:, used] * weights[:, None], values * weights, rcond=None)[0]
        if len(used) == 1 or found.min() >= 0:
            break
        del used[int(found.argmin())]
    factors = [0.0] * terms.shape[1]
    for column, factor in zip(used, found, strict=True):
        factors[column] = max(0.0, float(factor))
    return tuple(factors)


def learn_speeds(
    plan: Plan, costs: Mapping[str, SubgraphCost], runs: Sequence[RunRecord], workers: int
) -> dict[str, tuple[float, ...]]:
    """Return the speeds of every representative subgraph as one of 1, 2, ... `workers` concurrent tasks.

    Tasks that mostly ran as one of k concurrent tasks form a group. The speed of a group is the duration of its tasks
    alone, minus the time in which a task ran alone, divided by the remaining time of the group. The result is the
    median over the runs.
    """
    first = twins(plan)
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for record in runs:
        chunks = cut(record.num_tokens, record.pipeline.chunk_length)
        sums: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for event, times in zip(record.events, _times_by_crowd(record.events, workers), strict=True):
            subgraph, chunk = plan.subgraphs[event.task.subgraph], chunks[event.task.chunk]
            name = first[subgraph.name]
            pairs = chunk.pairs(subgraph.window)
            rows = measured_rows(plan, subgraph, chunk, record.pipeline.graph_lengths)
            us = costs[name].fixed_us + costs[name].row_us * rows + costs[name].pair_us * pairs
            total = sums[name, 1 + int(times.argmax())]
            total[0] += us - times[0] / 1000
            total[1] += times[1:].sum() / 1000
        for key, (work, time) in sums.items():
            if time > 0:
                found[key].append(work / time)
    speeds = {name: [1.0] for name in costs}
    for number in range(2, workers + 1):
        for name, of_subgraph in speeds.items():
            samples = found[name, number]
            speed = median(samples) if samples else of_subgraph[-1]
            of_subgraph.append(min(of_subgraph[-1], max(SLOWEST, speed)))
    return {name: tuple(of_subgraph) for name, of_subgraph in speeds.items()}


def _times_by_crowd(events: Sequence[TaskEvent], workers: int) -> list[np.ndarray]:
    """Return for every event the nanoseconds that it spent as one of 1, 2, ... `workers` tasks."""
    cuts = sorted({event.start_ns for event in events} | {event.end_ns for event in events})
    index = {moment: i for i, moment in enumerate(cuts)}
    change = np.zeros(len(cuts), np.int64)
    for event in events:
        change[index[event.start_ns]] += 1
        change[index[event.end_ns]] -= 1
    crowd = np.cumsum(change)[:-1]
    lengths = np.diff(np.array(cuts, np.float64))
    times = []
    for event in events:
        span = slice(index[event.start_ns], index[event.end_ns])
        sums = np.bincount(np.clip(crowd[span], 1, workers) - 1, lengths[span], minlength=workers)
        times.append(sums)
    return times


def _makespan(events: Sequence[TaskEvent]) -> int:
    return max(event.end_ns for event in events) - min(event.start_ns for event in events)


def _overhead_ns(record: RunRecord) -> int:
    """Return the time that workers lost between tasks although one was ready, up to the run's last task."""
    inner = min(event.start_ns for event in record.events), max(event.end_ns for event in record.events)
    lost = sum(time.idle_ns.get("overhead", 0) for time in where_time_went([record]))
    outside = (inner[0] - record.start_ns) + (record.end_ns - inner[1])
    workers = sum(processor.workers for processor in record.pipeline.processors)
    return max(0, lost - outside * workers)
