"""Measured profiles: durations of all subgraphs of one model on this machine, written by `chunkrt profile`.

A subgraph's duration is linear in its rows and in the positions that these rows attend to. Subgraphs of the same shape
share one measurement, under the name of the first such subgraph. A profile also contains the mutual slowdown of tasks
when all workers are busy, because tasks share memory, caches and, if both roles run on the CPU, its threads.

Tokens of decoding sequences run on the CPU alone, through fewer subgraphs (`runtime/executor.py`), so these have costs
of their own.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from chunkrt.errors import ConfigError, unknown_name
from chunkrt.graph.plan import Plan, Subgraph
from chunkrt.graph.rewrites import merged_on_cpu
from chunkrt.runtime.tasks import Processor, processors_for


@dataclass(frozen=True, kw_only=True)
class SubgraphCost:
    """Microseconds of one subgraph: fixed_us + row_us * rows + pair_us * (pairs of a row and a position it attends to).

    The costs are measured with all threads of the budget and without other load.

    Attributes:
        speeds: entry k-1 is the speed of the subgraph as one of k concurrent tasks, relative to its speed alone.
    """

    subgraph: str
    fixed_us: float
    row_us: float
    pair_us: float
    speeds: tuple[float, ...] = (1.0,)


@dataclass(frozen=True, kw_only=True)
class ThreadsCost:
    """Measurements of one thread budget.

    Attributes:
        prompt_us: overhead of a prompt in addition to its tasks.
        task_us: overhead between two tasks.
        step_us, token_us: overhead between two chunks of decoding sequences: a constant time, and a time for each
            token, such as that of sampling.
        subgraphs: costs in chunks with rows of prompts.
        decode: costs of the subgraphs of `decode_plan` in chunks of decoding sequences. It is empty if the CPU does not
            decode.
    """

    threads: int
    prompt_us: float
    task_us: float
    step_us: float
    token_us: float
    subgraphs: Mapping[str, SubgraphCost]
    decode: Mapping[str, SubgraphCost]


@dataclass(frozen=True, kw_only=True)
class MeasuredProfile:
    """Measurements of one model on one machine.

    Attributes:
        graph_lengths: see `Pipeline.graph_lengths`.
        has_npu: True if an NPU ran the static subgraphs, and the CPU ran the others.
        conditions: machine and date of the measurement.
    """

    name: str
    model: str
    scheme: str
    chunk_length: int
    has_npu: bool
    conditions: str
    budgets: Mapping[int, ThreadsCost] = field(repr=False)
    graph_lengths: tuple[int, ...] = ()

    def processors(self, threads: int) -> tuple[Processor, ...]:
        """Return the processors under a thread budget."""
        return processors_for(1 if self.has_npu else None, threads)

    @property
    def accuracy(self) -> str:
        """Comparison of predictions of such profiles with runs, from bench/predict.py."""
        return "measured with this model; medians of other prompts and of decode were within 16 % in comparisons"

    def budget(self, threads: int | None) -> ThreadsCost:
        """Return the measurements of a thread budget, by default of the largest.

        Raises:
            ConfigError: the budget was not measured.
        """
        threads = threads or max(self.budgets)
        if threads not in self.budgets:
            raise ConfigError(
                f"{self.name} was measured with {', '.join(map(str, self.budgets))} threads, not {threads}; "
                f"run `chunkrt profile` with --threads {threads}"
            )
        return self.budgets[threads]


def decode_plan(plan: Plan, names: Container[str]) -> Plan:
    """Return the plan of decoding sequences, given the names of its subgraphs: a plan of fused subgraphs, as the native
    backend runs it, or the same subgraphs on the CPU."""
    merged = merged_on_cpu(plan)
    return merged if merged.subgraphs[0].name in names else plan.on_cpu()


def twins(plan: Plan) -> dict[str, str]:
    """Map each subgraph to its representative, the first subgraph with the same operators and shapes."""
    first: dict[Any, str] = {}
    return {s.name: first.setdefault(_signature(s, plan), s.name) for s in plan.subgraphs}


def _signature(subgraph: Subgraph, plan: Plan) -> Any:
    nodes = tuple(
        (
            node.op,
            node.domain,
            node.attributes.get("window"),
            tuple(plan.tensors[name].shape for name in (*node.inputs, *node.outputs) if name),
        )
        for node in subgraph.nodes
    )
    return subgraph.device, subgraph.rows, nodes


def read_measured(table: Mapping[str, Any], path: Path) -> MeasuredProfile:
    """Parse a profile that `write_measured` wrote.

    Raises:
        ConfigError: a key is unknown, missing or of the wrong type.
    """
    _check_keys(table, ("name", "measured"), path)
    head = table["measured"]
    kinds = {"model": str, "scheme": str, "chunk_length": int, "has_npu": bool, "conditions": str, "threads": list}
    _check_keys(head, tuple(kinds), path, "measured.", also=("graph_lengths",))
    graph_lengths = head.get("graph_lengths", [])
    if type(graph_lengths) is not list or not all(type(length) is int and length > 0 for length in graph_lengths):
        raise ConfigError(f"{path}: measured.graph_lengths is {graph_lengths!r}, expected numbers of at least 1")
    for key, kind in kinds.items():
        if type(head[key]) is not kind:
            raise ConfigError(f"{path}: measured.{key} is {head[key]!r}, expected {kind.__name__}")
    if head["chunk_length"] < 1:
        raise ConfigError(f"{path}: measured.chunk_length is {head['chunk_length']}, expected at least 1")
    budgets = [_budget(entry, path) for entry in head["threads"]]
    if not budgets:
        raise ConfigError(f"{path}: the profile contains no measurement; run `chunkrt profile` again")
    return MeasuredProfile(
        name=str(table["name"]),
        budgets={budget.threads: budget for budget in budgets},
        graph_lengths=tuple(sorted(graph_lengths)),
        **{key: head[key] for key in kinds if key != "threads"},
    )


def write_measured(profile: MeasuredProfile) -> str:
    """Return the profile as TOML."""
    lines = [
        "# Written by `chunkrt profile`: every number was measured, in microseconds, on the machine and under the",
        "# conditions below.",
        f"name = {_text(profile.name)}",
        "",
        "[measured]",
        *(f"{key} = {_text(getattr(profile, key))}" for key in ("model", "scheme", "chunk_length", "has_npu")),
        f"conditions = {_text(profile.conditions)}",
        *([f"graph_lengths = {list(profile.graph_lengths)}"] if profile.graph_lengths else []),
    ]
    for budget in profile.budgets.values():
        lines += ["", "[[measured.threads]]"]
        lines += [f"{key} = {_text(getattr(budget, key))}" for key in ("threads", *_OVERHEADS)]
        lines += [f"{kind} = []" for kind in _COSTS if not getattr(budget, kind)]
        for kind in _COSTS:
            for cost in getattr(budget, kind).values():
                lines += ["", f"[[measured.threads.{kind}]]"]
                lines += [f"{key} = {_text(value)}" for key, value in asdict(cost).items()]
    return "\n".join(lines) + "\n"


_OVERHEADS = ("prompt_us", "task_us", "step_us", "token_us")
_COSTS = ("decode", "subgraphs")


def _budget(entry: Any, path: Path) -> ThreadsCost:
    place = "measured.threads."
    _check_keys(entry, ("threads", *_OVERHEADS, *_COSTS), path, place)
    threads = entry["threads"]
    if type(threads) is not int or threads < 1:
        raise ConfigError(f"{path}: {place}threads is {threads!r}, expected at least 1")
    overheads = {key: _number(entry, key, path, place) for key in _OVERHEADS}
    costs = {kind: _subgraph_costs(entry[kind], path, place + kind) for kind in _COSTS}
    return ThreadsCost(
        threads=threads,
        prompt_us=overheads["prompt_us"],
        task_us=overheads["task_us"],
        step_us=overheads["step_us"],
        token_us=overheads["token_us"],
        subgraphs=costs["subgraphs"],
        decode=costs["decode"],
    )


def _subgraph_costs(costs: Any, path: Path, place: str) -> dict[str, SubgraphCost]:
    if not isinstance(costs, list):
        raise ConfigError(f"{path}: {place} is {costs!r}, expected a list of tables")
    return {cost.subgraph: cost for cost in (_subgraph_cost(entry, path, f"{place}.") for entry in costs)}


def _subgraph_cost(entry: Any, path: Path, place: str) -> SubgraphCost:
    _check_keys(entry, tuple(SubgraphCost.__dataclass_fields__), path, place)
    speeds = entry["speeds"]
    if not isinstance(speeds, list) or not speeds or not all(_is_number(s) and s > 0 for s in speeds):
        raise ConfigError(f"{path}: {place}speeds is {speeds!r}, expected a list of numbers above 0")
    return SubgraphCost(
        subgraph=str(entry["subgraph"]),
        fixed_us=_number(entry, "fixed_us", path, place),
        row_us=_number(entry, "row_us", path, place),
        pair_us=_number(entry, "pair_us", path, place),
        speeds=tuple(float(speed) for speed in speeds),
    )


def _check_keys(table: Any, keys: Sequence[str], path: Path, place: str = "", *, also: Sequence[str] = ()) -> None:
    """Raise ConfigError if a table lacks one of the keys, or has a key that is neither one of them nor of `also`."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{path}: {place.rstrip('.')} is {table!r}, expected a table")
    for key in table:
        if key not in (*keys, *also):
            raise ConfigError(f"{path}: {unknown_name('key', place + key, [place + name for name in (*keys, *also)])}")
    for key in keys:
        if key not in table:
            raise ConfigError(f"{path}: the key {place + key!r} is missing")


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value < float("inf")


def _number(table: Mapping[str, Any], key: str, path: Path, place: str) -> float:
    if not _is_number(table[key]):
        raise ConfigError(f"{path}: {place}{key} is {table[key]!r}, expected a number of at least 0")
    return float(table[key])


def _text(value: str | float | tuple[float, ...]) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(f'{number:.4f}' for number in value)}]"
    if isinstance(value, bool) or not isinstance(value, float):
        return json.dumps(value)
    return f"{value:.6g}" if value else "0.0"
