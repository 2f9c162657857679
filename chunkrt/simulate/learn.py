"""Compute measured profiles from recorded runs.

A profile contains the duration of every subgraph alone, and the slowdown of concurrent tasks.

Costs come from runs of one task at a time, in which the other subgraphs determine the content of the processor's
caches. Costs are means within a run, because the time of a run is a sum, and medians over runs, because these are
robust against other load.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median

import numpy as np

from chunkrt.graph.operators import attended_pairs
from chunkrt.graph.plan import Plan
from chunkrt.runtime.record import RunRecord
from chunkrt.runtime.tasks import TaskEvent
from chunkrt.runtime.trace.idle import where_time_went
from chunkrt.simulate.measured import SubgraphCost, ThreadsCost, twins
from chunkrt.simulate.work import cut

SLOWEST = 0.05
"""Lower limit of the speed of a task among others, relative to its speed alone."""


def learn_budget(
    plan: Plan,
    *,
    threads: int,
    alone: Sequence[RunRecord],
    crowded: Sequence[RunRecord],
) -> ThreadsCost:
    """Return the measurements of one thread budget.

    Args:
        plan: the decoder.
        threads: the thread budget.
        alone: runs under the policy "sequential", some for a prompt of two or more complete chunks, and some for half a
            chunk.
        crowded: runs of the prompt of complete chunks under the policy to be predicted.
    """
    costs = learn_costs(plan, alone)
    workers = sum(processor.workers for processor in crowded[0].pipeline.processors)
    speeds = learn_speeds(plan, costs, crowded, workers)
    return ThreadsCost(
        threads=threads,
        prompt_us=median((r.end_ns - r.start_ns - _makespan(r.events)) / 1000 for r in crowded),
        task_us=median(_overhead_ns(record) / len(record.events) / 1000 for record in crowded),
        subgraphs={name: replace(cost, speeds=speeds[name]) for name, cost in costs.items()},
    )


def learn_costs(plan: Plan, runs: Sequence[RunRecord]) -> dict[str, SubgraphCost]:
    """Return the costs of all representative subgraphs by name; `learn_budget` describes the runs."""
    first = twins(plan)
    whole: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    short: dict[str, list[float]] = defaultdict(list)
    chunk_length = runs[0].pipeline.chunk_length
    for record in runs:
        samples: dict[tuple[str, int], list[int]] = defaultdict(list)
        for event in record.events:
            name = first[plan.subgraphs[event.task.subgraph].name]
            samples[name, event.task.chunk].append(event.end_ns - event.start_ns)
        for (name, chunk), durations in samples.items():
            us = fmean(durations) / 1000
            (short[name] if record.num_tokens < chunk_length else whole[name][chunk]).append(us)
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
            half = chunk_length // 2
            rest = median(short[subgraph.name]) - pair_us * attended_pairs(0, half, subgraph.window)
            row_us = min(max(0.0, (base - rest) / (chunk_length - half)), base / chunk_length)
        costs[subgraph.name] = SubgraphCost(
            subgraph=subgraph.name, fixed_us=base - row_us * chunk_length, row_us=row_us, pair_us=pair_us
        )
    return costs


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
            us = costs[name].fixed_us + costs[name].row_us * chunk.rows(subgraph) + costs[name].pair_us * pairs
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
