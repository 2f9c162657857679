"""Search for the best chunk length, partition, attention, policy and number of chunks in flight on a device.

Every point of a grid is simulated; choices within the memory limit are ranked by an objective. The grid has partitions
of whole kinds of modules. Then the partition of every module is searched for the chunk lengths and attentions whose
lower bound is below the best of the grid.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf
from operator import le
from pathlib import Path
from statistics import geometric_mean
from typing import Any, get_args

from chunkrt.backends.qnn.htp_support import npu_support
from chunkrt.engine.arguments import read_size
from chunkrt.engine.options import DEFAULT_CHUNK_LENGTH
from chunkrt.engine.settings import settings_text
from chunkrt.engine_directory.manifest import is_engine_directory, read_manifest
from chunkrt.errors import ConfigError, unknown_name
from chunkrt.files import Progress
from chunkrt.graph.placement import ALL_ON_CPU, Placement
from chunkrt.graph.plan import Plan
from chunkrt.quant.scheme import DEFAULT_NPU_SCHEME, STATIC_SCHEMES, Scheme, find_scheme
from chunkrt.runtime.policy import DEFAULT_POLICY, POLICIES
from chunkrt.simulate import DeviceProfile, MeasuredProfile, Shape, find_device
from chunkrt.simulate.experiments import GridRow, experiment, near_plans_of, plans_of, with_shadow
from chunkrt.simulate.search import ON_CPU, TIE, CutSize, Found, Objective, PartitionSearch, cost_of

NATURAL = "natural"
PARTITIONS: Mapping[str, Placement] = {
    NATURAL: {},
    "qkv_proj on cpu": {"model.layers.*.self_attn.qkv_proj": "cpu"},
    "o_proj on cpu": {"model.layers.*.self_attn.o_proj": "cpu"},
    "attention's linears on cpu": {"model.layers.*.self_attn": "cpu"},
    "down_proj on cpu": {"model.layers.*.down_proj": "cpu"},
    "feed-forward on cpu": {"model.layers.*.mlp": "cpu"},
    "norms on cpu": {"model.*norm": "cpu"},
    "norms, residuals on cpu": {"model": "cpu", "model.layers.*_proj": "npu", "model.layers.*.mlp": "npu"},
    "head on npu": {"lm_head": "npu"},
    "all on cpu": ALL_ON_CPU,
}
"""Partitions to search. By default linears, norms, residuals and activations are on the NPU; attention over the cache,
the embedding and the LM head are on the CPU. The embedding (a look-up) stays on the CPU in all partitions.
Feed-forward networks are called "mlp" here; `partitions_of` inserts a decoder's own name.
"""

CHUNK_LENGTHS = (32, 64, 96, 128, 192, 256, 384, 512)
"""Multiples of 32, because an NPU rounds other lengths up to the next multiple."""

CHUNKS_IN_FLIGHT = (None, 2, 4, 8, 16)
"""None stands for the executor's default."""

SEARCHED_POLICIES = (DEFAULT_POLICY, *(name for name in POLICIES if name not in (DEFAULT_POLICY, "sequential")))
"""All policies except the one without overlap."""

MOST_SEARCHES = 4
"""Number of pairs of an attention and a chunk length for which the partition of every module is searched."""

SEARCHED = "searched"
"""First word of the names of partitions that a search found."""

WINDOWS = (512, 1024, 2048, 4096)
"""Windows of attention on the NPU to search, up to the first that holds the longest prompt."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One choice, and its predicted performance.

    Attributes:
        partition: name of the partition.
        placement: placement of modules in this partition.
        attention: processor of attention, as in `chunkrt.experiment`: "cpu" or "npu:WINDOWS".
        chunks_in_flight: None for the executor's default.
        times_ms: time to the first token of every prompt.
        time_ms: geometric mean of `times_ms`.
        peak_memory_bytes: maximum over all prompts.
        energy_joules: sum over all prompts; None if the profile has no power figures.
    """

    partition: str
    placement: Placement = field(repr=False)
    attention: str
    chunk_length: int
    policy: str
    chunks_in_flight: int | None
    times_ms: tuple[float, ...]
    time_ms: float
    peak_memory_bytes: int
    energy_joules: float | None

    def cost(self, objective: Objective) -> float:
        """Return the quantity to minimise. Without power figures it is the time."""
        return cost_of(objective, self.times_ms, self.energy_joules)


@dataclass(frozen=True, kw_only=True)
class SearchedPartition:
    """Result of the search over partitions for one attention and chunk length.

    Attributes:
        bound: lower bound of the objective over all partitions and orders of tasks.
        rule, found: the partition by the rule and the best one, both with the default policy and number of chunks in
            flight; `rule` is None if it does not fit the attention.
        rule_cut, found_cut: sizes of both cuts.
        is_exact: no partition is better; otherwise only the bound limits the others.
    """

    attention: str
    chunk_length: int
    bound: float
    rule: Setup | None
    found: Setup
    rule_cut: CutSize
    found_cut: CutSize
    num_simulated: int
    is_exact: bool


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """Result of a search.

    Attributes:
        objective: quantity that was minimised.
        choices: choices with different predictions, the fastest first.
        best: the best choice.
        default: the engine's default, with the longest searched chunk length if 32 was not searched.
        num_simulated: number of choices of the grid before duplicates were dropped, and of searched partitions.
        searched: searches over the partitions of all modules, the lowest bound first; empty for measured profiles and
            engine directories.
        bound: lower bound of the objective over all searched axes; None without such searches.
        left_out: reasons by name of partitions that were not simulated.
    """

    model: str
    device: DeviceProfile | MeasuredProfile = field(repr=False)
    scheme: str
    shadow: str | None
    prompt_lengths: tuple[int, ...]
    memory_bytes: int | None
    objective: Objective
    choices: tuple[Setup, ...] = field(repr=False)
    best: Setup
    default: Setup = field(repr=False)
    num_simulated: int
    searched: tuple[SearchedPartition, ...] = field(repr=False)
    bound: float | None
    left_out: Mapping[str, str] = field(repr=False)

    @property
    def gap(self) -> float | None:
        """Share by which the best choice's objective exceeds the lower bound; None without a bound."""
        return None if self.bound is None else self.best.cost(self.objective) / self.bound - 1

    @property
    def pareto(self) -> tuple[Setup, ...]:
        """Choices within the memory that no other choice exceeds in time, memory or energy without being worse in
        another one, the fastest first."""
        able = [choice for choice in self.choices if self.fits(choice)]
        points = [(c.time_ms, c.peak_memory_bytes, c.energy_joules or 0.0) for c in able]
        front: dict[tuple[float, ...], Setup] = {}
        for choice, point in zip(able, points, strict=True):
            if not any(other != point and all(map(le, other, point)) for other in points):
                front.setdefault(point, choice)
        return tuple(front.values())

    def fits(self, choice: Setup) -> bool:
        """Return True if a choice stays within the memory limit."""
        return self.memory_bytes is None or choice.peak_memory_bytes <= self.memory_bytes

    @property
    def settings(self) -> dict[str, Any]:
        """Return the best choice as fields of `EngineOptions`."""
        found: dict[str, Any] = {}
        if isinstance(self.device, DeviceProfile):
            found["soc"] = self.device.soc
        else:
            found["threads"] = max(self.device.budgets)
        found |= {"scheme": self.scheme, "chunk_length": self.best.chunk_length, "policy": self.best.policy}
        if self.shadow is not None:
            found["shadow"] = self.shadow
        if self.best.chunks_in_flight is not None:
            found["chunks_in_flight"] = self.best.chunks_in_flight
        if self.best.attention != ON_CPU:
            _, _, windows = self.best.attention.partition(":")
            found |= {"attention": "npu", "npu_window": windows}
        if self.best.placement:
            found["placement"] = self.best.placement
        return found

    def to_toml(self) -> str:
        """Return a settings file, with the conditions of the choice as comments."""
        prompts = ", ".join(map(str, self.prompt_lengths))
        limit = "no limit" if self.memory_bytes is None else f"at most {self.memory_bytes / 1e6:.0f} MB"
        comments = [
            f"Written by `chunkrt tune`: {Path(self.model).name} on {self.device.name}, chosen from "
            f"{self.num_simulated} that were simulated.",
            f"Prompts of {prompts} tokens; memory: {limit}; objective: {self.objective}.",
            f"Predicted: {_figures(self.best)}.",
            f"Without this file: {_figures(self.default)}.",
        ]
        return settings_text(self.settings, comments)


def tune(
    model: str | os.PathLike[str] | Shape,
    device: str | os.PathLike[str] | DeviceProfile | MeasuredProfile,
    *,
    prompt_lengths: Sequence[int] = (512,),
    scheme: str | None = None,
    chunk_lengths: Sequence[int] | None = None,
    placements: Mapping[str, Placement] | None = None,
    shadow: str | None = None,
    memory_bytes: int | str | None = None,
    objective: Objective = "time",
    workers: int | None = None,
    dask: str | Any = None,
    progress: Progress = lambda what, done, total: None,
) -> Tuned:
    """Find the best way to run a model on a device.

    Args:
        model: a shape or its name; otherwise a catalogue name, a GGUF file, a Hugging Face folder, or an engine
            directory.
        device: a profile, or the name or the file of one.
        prompt_lengths: numbers of tokens; several lengths are ranked by the geometric mean of their times to first
            token.
        scheme: name of the scheme; by default "w8a16", or the scheme of the profile or the engine directory.
        chunk_lengths: lengths to search; by default CHUNK_LENGTHS, or the length of the profile or the engine
            directory.
        placements: partitions by name to search in addition to PARTITIONS.
        shadow: 8-bit linears with shadows, as in `chunkrt.experiment`.
        memory_bytes: limit of the choice's peak memory, in bytes or as text such as "8GB"; by default none.
        objective: quantity to minimise, see `Objective`; with a profile without power figures, only "time".
        workers, dask, progress: see `chunkrt.experiment`.

    Raises:
        ConfigError: a name or a value is invalid, or does not fit the profile or the engine directory; or no choice
            stays within the memory.
        ModelError: the checkpoint is missing, damaged or unsupported.
    """
    device = find_device(device) if isinstance(device, str | os.PathLike) else device
    memory_bytes = None if memory_bytes is None else read_size("memory_bytes", memory_bytes)
    if objective not in get_args(Objective):
        raise unknown_name("objective", objective, get_args(Objective))
    if objective != "time" and isinstance(device, MeasuredProfile):
        raise ConfigError(f"{device.name} has no power figures, which the objective {objective!r} needs; use 'time'")
    fixed = _Fixed.of(model, device)
    scheme = fixed.scheme_or(scheme)
    lengths = fixed.chunk_lengths_or(chunk_lengths)
    prompt_lengths = list(prompt_lengths)
    partitions: dict[str, Placement] = {NATURAL: PARTITIONS[NATURAL]}
    left_out: dict[str, str] = {}
    has_npu = isinstance(device, MeasuredProfile) or device.uses_npu
    if placements and not has_npu:
        raise ConfigError(f"{device.name} leaves the NPU idle, so placements make no difference; omit them")
    if fixed.reason and placements:
        raise ConfigError(f"{fixed.reason}; its placement is fixed too, omit other placements")
    shadowed = with_shadow(scheme, shadow)
    [plan] = plans_of(model, [{}], progress, shadowed)
    plans = {NATURAL: plan}
    if not fixed.reason and has_npu:
        wanted = {**partitions_of(plan), **(placements or {})}
        plans = dict(zip(wanted, plans_of(model, list(wanted.values()), progress, shadowed), strict=True))
        left_out = _refused(plans, shadowed)
        partitions = {name: placement for name, placement in wanted.items() if name not in left_out}
    if chunk_lengths is None:
        lengths = [n for n in lengths if n <= plan.context_length] or [plan.context_length]

    def parts() -> Iterator[_Part]:
        yield ON_CPU, partitions, SEARCHED_POLICIES, CHUNKS_IN_FLIGHT
        if not fixed.is_measured and has_npu:
            for attention in fixed.attentions or _attentions(plan, prompt_lengths):
                if able := _with_attention(partitions, plans, attention, max(lengths), shadowed):
                    yield attention, able, (DEFAULT_POLICY,), (None,)  # the order of tasks is fixed

    def simulated(part: _Part, lengths: Sequence[int]) -> list[Setup]:
        attention, able, policies, in_flight = part
        rows = experiment(
            model,
            devices=[device],
            placements=able,
            schemes=[scheme],
            shadow=shadow,
            attentions=[attention],
            prompt_lengths=prompt_lengths,
            chunk_lengths=lengths,
            policies=policies,
            chunks_in_flight=in_flight,
            workers=workers,
            dask=dask,
            progress=progress,
        )
        grid = product(able, prompt_lengths, lengths, policies, in_flight)
        grouped: dict[tuple[str, int, str, int | None], list[GridRow]] = defaultdict(list)
        for row, (name, _, length, policy, flight) in zip(rows, grid, strict=True):
            grouped[name, length, policy, flight].append(row)
        return [_choice(key, able, found) for key, found in grouped.items()]

    choices = [choice for part in parts() for choice in simulated(part, lengths)]
    searched: list[SearchedPartition] = []
    bound, num_searched = None, 0
    if not fixed.reason and isinstance(device, DeviceProfile) and has_npu:
        search = PartitionSearch(plan, shadowed, device, prompt_lengths, objective, memory_bytes)
        costs = [c.cost(objective) for c in choices if memory_bytes is None or c.peak_memory_bytes <= memory_bytes]
        usable = dict.fromkeys(choice.attention for choice in choices)
        for found in _searches(search, list(product(usable, lengths)), min(costs, default=inf), progress):
            bound = found.bound if bound is None else min(bound, found.bound)
            if found.partition is None:
                continue
            num_searched += found.partition.num_simulated
            name = f"{SEARCHED} {len(searched) + 1}"
            policies, in_flight = (
                (SEARCHED_POLICIES, CHUNKS_IN_FLIGHT) if found.attention == ON_CPU else ((DEFAULT_POLICY,), (None,))
            )
            placement = {name: found.partition.placement}
            made = simulated((found.attention, placement, policies, in_flight), [found.chunk_length])
            of_grid = [c for c in choices if (c.attention, c.chunk_length) == (found.attention, found.chunk_length)]
            searched.append(_compared(search, found, of_grid, made))
            choices += made
    usual = DEFAULT_CHUNK_LENGTH if DEFAULT_CHUNK_LENGTH in lengths else max(lengths)
    default = next(c for c in choices if (c.partition, c.attention, c.chunk_length) == (NATURAL, ON_CPU, usual))
    return Tuned(
        model=model.source if isinstance(model, Shape) else os.fspath(model),
        device=device,
        scheme=scheme,
        shadow=shadow,
        prompt_lengths=tuple(prompt_lengths),
        memory_bytes=memory_bytes,
        objective=objective,
        choices=tuple(sorted(_distinct(choices), key=lambda choice: choice.time_ms)),
        best=_best(choices, memory_bytes, objective),
        default=default,
        num_simulated=len(choices) + num_searched,
        searched=tuple(searched),
        bound=bound,
        left_out=left_out,
    )


@dataclass(frozen=True, kw_only=True)
class _Searched:
    """One pair of an attention and a chunk length, with its lower bound, and the best partition if it was searched."""

    attention: str
    chunk_length: int
    bound: float
    partition: Found | None


def _searches(
    search: PartitionSearch, pairs: Sequence[tuple[str, int]], known: float, progress: Progress
) -> Iterator[_Searched]:
    """Search the partitions for the pairs whose bounds are below the best known cost, the lowest bound first."""
    bounds = {}
    for index, pair in enumerate(pairs):
        bounds[pair] = search.bound(*pair)
        progress("bounding partitions", index + 1, len(pairs))
    for index, pair in enumerate(sorted(pairs, key=bounds.__getitem__)):
        attention, chunk_length = pair
        found = None
        if index < MOST_SEARCHES and bounds[pair] < known:
            found = search.search(attention, chunk_length)
            known = min(known, found.cost)
            progress("searching partitions", index + 1, min(MOST_SEARCHES, len(pairs)))
        if found is not None and found.cost == inf:  # none fits the memory
            found = None
        yield _Searched(attention=attention, chunk_length=chunk_length, bound=bounds[pair], partition=found)


def _compared(
    search: PartitionSearch, searched: _Searched, of_grid: Sequence[Setup], made: Sequence[Setup]
) -> SearchedPartition:
    found = searched.partition
    assert found is not None

    def usual(choice: Setup) -> bool:
        return choice.policy == DEFAULT_POLICY and choice.chunks_in_flight is None

    return SearchedPartition(
        attention=searched.attention,
        chunk_length=searched.chunk_length,
        bound=searched.bound,
        rule=next((choice for choice in of_grid if choice.partition == NATURAL and usual(choice)), None),
        found=next(choice for choice in made if usual(choice)),
        rule_cut=search.size_of(search.cuts.labels, searched.attention, searched.chunk_length),
        found_cut=search.size_of(found.labels, searched.attention, searched.chunk_length),
        num_simulated=found.num_simulated,
        is_exact=found.is_exact,
    )


_Part = tuple[str, Mapping[str, Placement], Sequence[str], Sequence[int | None]]
"""Part of the search: an attention with its partitions, policies and chunks in flight."""


def _attentions(plan: Plan, prompt_lengths: Sequence[int]) -> list[str]:
    """Return the windows to search: one up to the longest prompt, or the shortest and the longest together."""
    longest = min(max(prompt_lengths), plan.context_length)
    enough = next((index for index, window in enumerate(WINDOWS) if window >= longest), len(WINDOWS) - 1)
    found = [f"npu:{window}" for window in WINDOWS[: enough + 1]]
    return [*found, f"npu:{WINDOWS[0]},{WINDOWS[enough]}"] if enough else found


def _with_attention(
    partitions: Mapping[str, Placement], plans: Mapping[str, Plan], attention: str, chunk_length: int, scheme: Scheme
) -> dict[str, Placement]:
    """Return the partitions for which an NPU can compute attention."""
    able = {}
    for name, placement in partitions.items():
        try:
            near = near_plans_of(plans[name], placement, attention, chunk_length)
        except ConfigError:  # the partition has no attention that can have a fixed shape
            continue
        parts = [(part, each) for each in near.values() for part in each.subgraphs if part.device == "npu"]
        if all(npu_support(part, each, scheme) for part, each in parts):
            able[name] = placement
    return able


def partitions_of(plan: Plan) -> dict[str, Placement]:
    """Return PARTITIONS with the name that this decoder uses for its feed-forward networks."""
    names = {part for subgraph in plan.subgraphs for node in subgraph.nodes for part in node.name.split(".")}
    feed_forward = "feed_forward" if "feed_forward" in names else "mlp"
    return {
        name: {pattern.replace(".mlp", f".{feed_forward}"): device for pattern, device in placement.items()}
        for name, placement in PARTITIONS.items()
    }


@dataclass(frozen=True, kw_only=True)
class _Fixed:
    """Settings that a measured profile or an engine directory fixes. `reason` explains them; it is "" if none are
    fixed."""

    reason: str = ""
    is_measured: bool = False
    scheme: str = DEFAULT_NPU_SCHEME
    chunk_lengths: tuple[int, ...] = ()
    attentions: tuple[str, ...] = ()

    @staticmethod
    def of(model: str | os.PathLike[str] | Shape, device: DeviceProfile | MeasuredProfile) -> _Fixed:
        if isinstance(device, MeasuredProfile):
            return _Fixed(
                reason=f"{device.name} was measured with scheme {device.scheme} and chunks of {device.chunk_length}",
                is_measured=True,
                scheme=device.scheme,
                chunk_lengths=(device.chunk_length,),
            )
        if not isinstance(model, Shape) and is_engine_directory(Path(model)):
            manifest = read_manifest(Path(model))
            lengths = sorted({target.chunk_length for target in manifest.npu if target.soc == device.soc})
            compiled = manifest.npu_attention
            of_chunks = f" and chunks of {', '.join(map(str, lengths))}" if lengths else ""
            return _Fixed(
                reason=f"{model} was compiled under {manifest.scheme.name}{of_chunks}",
                scheme=manifest.scheme.name,
                chunk_lengths=tuple(lengths),
                attentions=(f"npu:{compiled['npu_window']}",) if compiled.get("attention") == "npu" else (),
            )
        return _Fixed()

    def scheme_or(self, wanted: str | None) -> str:
        """Return the scheme for the search. Raise ConfigError if a different scheme is requested, or the NPU has no
        linears under the scheme.
        """
        if self.reason and wanted not in (None, self.scheme):
            raise ConfigError(f"{self.reason}, not {wanted}; omit the scheme")
        scheme = find_scheme(wanted or self.scheme)
        if not self.is_measured and not scheme.is_static:
            static = ", ".join(STATIC_SCHEMES)
            raise ConfigError(
                f"the NPU runs no linear layers under the scheme {scheme.name!r}; use a static one: {static}"
            )
        return scheme.name

    def chunk_lengths_or(self, wanted: Iterable[int] | None) -> list[int]:
        """Return the chunk lengths to search. Raise ConfigError if the request differs from a fixed length."""
        if wanted is None:
            return list(self.chunk_lengths or CHUNK_LENGTHS)
        wanted = list(dict.fromkeys(wanted))
        if self.chunk_lengths and (others := [n for n in wanted if n not in self.chunk_lengths]):
            raise ConfigError(f"{self.reason}, not {others[0]}; omit the chunk length")
        return wanted


def _refused(plans: Mapping[str, Plan], scheme: Scheme) -> dict[str, str]:
    """Map each partition that the NPU does not support to the reason."""
    refused = {}
    for name, plan in plans.items():
        supports = (npu_support(subgraph, plan, scheme) for subgraph in plan.subgraphs if subgraph.device == "npu")
        if reason := next((f"{support.node}: {support.reason}" for support in supports if not support), ""):
            refused[name] = reason
    return refused


def _choice(
    key: tuple[str, int, str, int | None], partitions: Mapping[str, Placement], rows: Sequence[GridRow]
) -> Setup:
    partition, chunk_length, policy, chunks_in_flight = key
    times = tuple(row.time_to_first_token_ms for row in rows)
    joules = [row.energy_joules for row in rows if row.energy_joules is not None]
    return Setup(
        partition=partition,
        placement=partitions[partition],
        attention=rows[0].attention,
        chunk_length=chunk_length,
        policy=policy,
        chunks_in_flight=chunks_in_flight,
        times_ms=times,
        time_ms=geometric_mean(times),
        peak_memory_bytes=max(row.peak_memory_bytes for row in rows),
        energy_joules=sum(joules) if joules else None,
    )


def _best(choices: Sequence[Setup], memory_bytes: int | None, objective: Objective) -> Setup:
    fitting = [c for c in choices if memory_bytes is None or c.peak_memory_bytes <= memory_bytes]
    if not fitting:
        least = min(choice.peak_memory_bytes for choice in choices)
        raise ConfigError(
            f"no choice stays within {(memory_bytes or 0) / 1e6:.4g} MB, the smallest takes {least / 1e6:.4g} MB; "
            "allow more memory, or try a scheme with smaller weights"
        )
    good = (1 + TIE) * min(choice.cost(objective) for choice in fitting)
    return min((c for c in fitting if c.cost(objective) <= good), key=lambda c: (c.peak_memory_bytes, c.time_ms))


def _distinct(choices: Iterable[Setup]) -> list[Setup]:
    """Return, of choices with the same partition, attention, chunk length and predictions, the first, which is nearest
    to the default."""
    first: dict[Any, Setup] = {}
    for c in choices:
        first.setdefault(
            (c.partition, c.attention, c.chunk_length, c.times_ms, c.peak_memory_bytes, c.energy_joules), c
        )
    return list(first.values())


def _figures(choice: Setup) -> str:
    joules = "" if choice.energy_joules is None else f", {choice.energy_joules:.3g} J"
    return f"{choice.time_ms:.1f} ms to the first token, {choice.peak_memory_bytes / 1e6:.0f} MB{joules}"
