"""Search for the best chunk length, partition, attention, policy and number of chunks in flight on a device.

Every point of a grid is simulated; choices within the memory limit are ranked by an objective. The grid has partitions
of whole kinds of modules. Then the partition of every module is searched for the chunk lengths and attentions whose
lower bound is below the best of the grid.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import inf
from operator import le
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any, get_args

from chunkrt.backends.qnn.htp_support import npu_support
from chunkrt.backends.qnn.socs import SOCS
from chunkrt.checkpoints.checkpoint import sampled_digest
from chunkrt.engine.arguments import read_size
from chunkrt.engine.options import DEFAULT_CHUNK_LENGTH, lengths_of
from chunkrt.engine.resolve import find_checkpoint
from chunkrt.engine.roles import linear_refusal
from chunkrt.engine.settings import DEVICE, settings_text
from chunkrt.engine_directory.manifest import is_engine_directory, read_manifest
from chunkrt.errors import ConfigError, unknown_name
from chunkrt.files import Progress
from chunkrt.graph.placement import ALL_ON_CPU, Placement
from chunkrt.graph.plan import SHADOW_OP, Plan
from chunkrt.quant.scheme import DEFAULT_NPU_SCHEME, STATIC_SCHEMES, Scheme, find_scheme
from chunkrt.runtime.policy import DEFAULT_POLICY, POLICIES
from chunkrt.simulate import DeviceProfile, MeasuredProfile, Shape, find_device
from chunkrt.simulate.experiments import (
    GridRow,
    Rows,
    attention_options,
    experiment,
    near_plans_of,
    places_attention,
    plans_of,
    scheme_of,
)
from chunkrt.simulate.models import is_weightless
from chunkrt.simulate.partition_search import ON_CPU, TIE, CutSize, Found, Lengths, Objective, PartitionSearch, cost_of
from chunkrt.simulate.quality import Quality, check_comparable
from chunkrt.simulate.queue import Queue, percentile
from chunkrt.simulate.simulator import chunk_text, graphs_text

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
        graphs: lengths of the NPU's graphs if there are several, such as "1,8,32"; otherwise empty.
        chunks_in_flight: None for the executor's default.
        times_ms: time to the first token of every prompt.
        time_ms: geometric mean of `times_ms`.
        p95_ms: 95th percentile of `times_ms`; with arrivals, that of the times from the arrival of a request to its
            first token, or None if the queue grows without bound.
        peak_memory_bytes: maximum over all prompts.
        energy_joules: sum over all prompts; None if the profile has no power figures.
        quantisation: fields of `EngineOptions` that quantise the model: the scheme, and options that are not its
            default, such as shadows.
        num_shadows: number of linears with a shadow.
        mean_kl: measured mean KL divergence from the base in nats; None if it is unknown.
    """

    partition: str
    placement: Placement = field(repr=False)
    attention: str
    chunk_length: int
    graphs: str
    policy: str
    chunks_in_flight: int | None
    times_ms: tuple[float, ...]
    time_ms: float
    p95_ms: float | None
    peak_memory_bytes: int
    energy_joules: float | None
    quantisation: Mapping[str, Any]
    num_shadows: int
    mean_kl: float | None

    @property
    def lengths(self) -> tuple[int, str]:
        """Length of chunks, and lengths of several graphs."""
        return self.chunk_length, self.graphs

    def cost(self, objective: Objective) -> float:
        """Return the quantity to minimise. Without power figures it is the time."""
        if objective == "p95":
            return inf if self.p95_ms is None else self.p95_ms
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
    graphs: str
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
        device_name: the device as in the call, a name or a file; "" for a profile.
        objective: quantity that was minimised.
        budget: limit of the mean KL divergence; None for no limit.
        queue: requests that wait for each other; None if prompts do not wait.
        choices: choices with different predictions, the fastest first.
        best: the best choice.
        default: the engine's default, with the longest searched chunk length if 32 was not searched.
        num_simulated: number of choices of the grid before duplicates were dropped, and of searched partitions.
        searched: searches over the partitions of all modules, the lowest bound first; empty for measured profiles and
            engine directories.
        bound: lower bound of the objective over all searched axes; None without such searches.
        left_out: reasons by name of partitions and schemes that were not simulated.
    """

    model: str
    device: DeviceProfile | MeasuredProfile = field(repr=False)
    device_name: str
    prompt_lengths: tuple[int, ...]
    memory_bytes: int | None
    objective: Objective
    budget: float | None
    queue: Queue | None
    choices: tuple[Setup, ...] = field(repr=False)
    best: Setup
    default: Setup = field(repr=False)
    num_simulated: int
    searched: tuple[SearchedPartition, ...] = field(repr=False)
    bound: float | None
    left_out: Mapping[str, str] = field(repr=False)

    @property
    def scheme(self) -> str:
        """Name of the best choice's scheme."""
        return str(self.best.quantisation["scheme"])

    @property
    def shadow(self) -> str | None:
        """Shadows of the best choice, as in `EngineOptions`."""
        return self.best.quantisation.get("shadow")

    @property
    def gap(self) -> float | None:
        """Share by which the best choice's objective exceeds the lower bound; None without a bound."""
        return None if self.bound is None else self.best.cost(self.objective) / self.bound - 1

    @property
    def pareto(self) -> tuple[Setup, ...]:
        """Choices within the memory that no other choice exceeds in time, memory, energy or KL divergence without being
        worse in another one, the fastest first."""
        able = [choice for choice in self.choices if self.fits(choice)]
        points = [(c.time_ms, c.peak_memory_bytes, c.energy_joules or 0.0, c.mean_kl or 0.0) for c in able]
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
            if self.device.soc in SOCS:  # an engine knows fewer than the simulator
                found["soc"] = self.device.soc
        else:
            found["threads"] = max(self.device.budgets)
        found |= {**self.best.quantisation, "chunk_length": self.best.graphs or self.best.chunk_length}
        found["policy"] = self.best.policy
        if self.best.chunks_in_flight is not None:
            found["chunks_in_flight"] = self.best.chunks_in_flight
        if self.best.attention != ON_CPU:
            options = attention_options(self.best.attention)
            found |= {"attention": "npu", "npu_window": options.npu_window}
            if options.npu_sinks is not None:
                found |= {"npu_sinks": options.npu_sinks, "decode_on": "npu"}  # engines refuse sinks otherwise
        if self.best.placement:
            found["placement"] = self.best.placement
        return found

    def to_toml(self) -> str:
        """Return a settings file, with the conditions of the choice as comments."""
        prompts = ", ".join(map(str, self.prompt_lengths))
        limit = "no limit" if self.memory_bytes is None else f"at most {self.memory_bytes / 1e6:.0f} MB"
        quality = "" if self.budget is None else f"; mean KL: at most {self.budget:g}"
        waiting = "" if self.queue is None else f" with arrivals {self.queue.arrivals}, seed {self.queue.seed}"
        comments = [
            f"Written by `chunkrt tune`: {Path(self.model).name} on {self.device.name}, chosen from "
            f"{self.num_simulated} that were simulated.",
            f"Prompts of {prompts} tokens; memory: {limit}{quality}; objective: {self.objective}{waiting}.",
            f"Predicted: {_figures(self.best, self.objective)}.",
            f"Without this file: {_figures(self.default, self.objective)}.",
        ]
        name = str(Path(self.device_name).resolve()) if self.device_name.endswith(".toml") else self.device_name
        return settings_text(({DEVICE: name} if name else {}) | self.settings, comments)


def tune(
    model: str | os.PathLike[str] | Shape,
    device: str | os.PathLike[str] | DeviceProfile | MeasuredProfile,
    *,
    prompt_lengths: Sequence[int] = (512,),
    scheme: str | None = None,
    chunk_lengths: Sequence[int | str] | None = None,
    npu_sinks: int | None = None,
    placements: Mapping[str, Placement] | None = None,
    shadow: str | None = None,
    qualities: Sequence[Quality] = (),
    budget: float | None = None,
    memory_bytes: int | str | None = None,
    objective: Objective = "time",
    arrivals: str | None = None,
    seed: int = 0,
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
        scheme: name of the scheme; by default all schemes of `qualities`, or "w8a16", or the scheme of the profile or
            the engine directory.
        chunk_lengths: lengths to search, also texts such as "1,8,32" for several graphs on the NPU; by default
            CHUNK_LENGTHS, or the length of the profile or the engine directory.
        npu_sinks: number of first tokens that stay in sight of attention on the NPU when its longest window slides; by
            default the CPU computes attention of longer histories. The quality of this approximation is not searched.
        placements: partitions by name to search in addition to PARTITIONS.
        shadow: 8-bit linears with shadows, as in `chunkrt.experiment`.
        qualities: measured divergences. If there are any, only schemes with one of them are searched.
        budget: limit of the mean KL divergence in nats; by default none. It needs `qualities`.
        memory_bytes: limit of the choice's peak memory, in bytes or as text such as "8GB"; by default none.
        objective: quantity to minimise, see `Objective`; with a measured profile, which has no power figures, "time" or
            "p95".
        arrivals: for "p95", `poisson:RATE`: prompts arrive at RATE per second on average, and are computed one at a
            time in order of arrival. By default, prompts do not wait.
        seed: random seed of the arrivals, at least 0.
        workers, dask, progress: see `chunkrt.experiment`.

    Raises:
        ConfigError: a name or a value is invalid, or does not fit the profile or the engine directory; or no choice
            stays within the memory.
        ModelError: the checkpoint is missing, damaged or unsupported.
    """
    device_name = os.fspath(device) if isinstance(device, str | os.PathLike) else ""
    device = find_device(device) if isinstance(device, str | os.PathLike) else device
    memory_bytes = None if memory_bytes is None else read_size("memory_bytes", memory_bytes)
    if objective not in get_args(Objective):
        raise unknown_name("objective", objective, get_args(Objective))
    if objective in ("energy", "edp") and isinstance(device, MeasuredProfile):
        raise ConfigError(f"{device.name} has no power figures, which the objective {objective!r} needs; use 'time'")
    if arrivals is not None and objective != "p95":
        raise ConfigError(f"arrivals count for the objective 'p95', not for {objective!r}; omit them")
    prompt_lengths = list(prompt_lengths)
    queue = None
    if arrivals is not None:
        queue = Queue(arrivals=arrivals, seed=seed, num_prompts=max(1, len(prompt_lengths)))
    fixed = _Fixed.of(model, device)
    if npu_sinks is not None and (fixed.reason or not isinstance(device, DeviceProfile) or not device.uses_npu):
        raise ConfigError(f"{fixed.reason or f'{device.name} leaves the NPU idle'}; omit `npu_sinks`")
    lengths = None if chunk_lengths is None else fixed.chunk_lengths_or(chunk_lengths)
    has_npu = isinstance(device, MeasuredProfile) or device.uses_npu
    if placements and not has_npu:
        raise ConfigError(f"{device.name} leaves the NPU idle, so placements make no difference; omit them")
    if fixed.reason and placements:
        raise ConfigError(f"{fixed.reason}; its placement is fixed too, omit other placements")
    candidates, left_out = _candidates(fixed, scheme, shadow, qualities, budget)
    _check_checkpoint(model, qualities, progress)
    choices: list[Setup] = []
    searched: list[SearchedPartition] = []
    bounds: list[float] = []
    num_searched = 0
    for candidate in candidates:
        search = _SchemeSearch(
            model,
            device,
            fixed,
            candidate,
            prompt_lengths=prompt_lengths,
            chunk_lengths=lengths,
            npu_sinks=npu_sinks,
            placements=placements or {},
            memory_bytes=memory_bytes,
            objective=objective,
            queue=queue,
            progress=progress,
            simulate=partial(experiment, model, devices=[device], workers=workers, dask=dask, progress=progress),
        )
        search.search_grid()
        searched += search.search_partitions(len(searched))
        choices += search.choices
        bounds += [] if search.bound is None else [search.bound]
        num_searched += search.num_searched
        left_out |= search.left_out
    usual = [c for c in choices if (c.partition, c.attention) == (NATURAL, ON_CPU)] or choices
    schemes = [c for c in usual if c.quantisation == {"scheme": fixed.scheme}] or usual
    schemes = [c for c in schemes if not c.graphs] or schemes
    longest = max(choice.chunk_length for choice in schemes)
    default = next((c for c in schemes if c.chunk_length == DEFAULT_CHUNK_LENGTH), None)
    return Tuned(
        model=model.source if isinstance(model, Shape) else os.fspath(model),
        device=device,
        device_name=device_name,
        prompt_lengths=tuple(prompt_lengths),
        memory_bytes=memory_bytes,
        objective=objective,
        budget=budget,
        queue=queue,
        choices=tuple(sorted(_distinct(choices), key=lambda choice: choice.time_ms)),
        best=_best(choices, memory_bytes, objective, queue),
        default=default or next(c for c in schemes if c.chunk_length == longest),
        num_simulated=len(choices) + num_searched,
        searched=tuple(searched),
        bound=min(bounds, default=None),
        left_out=left_out,
    )


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """One way to quantise the model, with its divergence if it was measured."""

    quantisation: Mapping[str, Any]
    mean_kl: float | None = None

    @property
    def name(self) -> str:
        """Scheme and other options as one line of text."""
        scheme, *others = (str(v) if k == "scheme" else f"{k} {v}" for k, v in self.quantisation.items())
        return f"{scheme} with {', '.join(others)}" if others else scheme


def _candidates(
    fixed: _Fixed, scheme: str | None, shadow: str | None, qualities: Sequence[Quality], budget: float | None
) -> tuple[list[_Candidate], dict[str, str]]:
    """Return the schemes to search, and reasons by name of schemes that exceed the budget.

    Raises:
        ConfigError: the divergence of a requested scheme is unknown, or all schemes exceed the budget.
    """
    shadow = None if shadow == "none" else shadow
    wanted = {"scheme": fixed.scheme_or(scheme)} | ({} if shadow is None else {"shadow": shadow})
    if not qualities:
        if budget is not None:
            raise ConfigError(
                "`budget` needs measured divergences, as `chunkrt eval --as-npu --json` prints them; give some"
            )
        return [_Candidate(quantisation=wanted)], {}
    check_comparable(qualities)
    if fixed.reason:
        own = [quality for quality in qualities if fixed.has(quality.scheme)]
        known = [_Candidate(quantisation=wanted, mean_kl=quality.mean_kl) for quality in own]
    else:
        known = [_Candidate(quantisation=q.quantisation, mean_kl=q.mean_kl) for q in qualities]
        known = [c for c in known if shadow is None or c.quantisation.get("shadow") == shadow]
        known = [c for c in known if scheme is None or c.quantisation["scheme"] == scheme]
    if not known:
        raise ConfigError(
            f"the KL divergence of {_Candidate(quantisation=wanted).name} is unknown, none of the given files measures "
            "it; run `chunkrt eval --as-npu --json` with these options"
        )
    within = [c for c in known if budget is None or (c.mean_kl or 0.0) <= budget]
    if not within:
        least = min(known, key=lambda c: c.mean_kl or 0.0)
        raise ConfigError(
            f"no measured scheme stays within the budget of kl={budget:g}; the smallest divergence is "
            f"{least.mean_kl:.4g} of {least.name}"
        )
    exceeding = {c.name: f"its mean KL of {c.mean_kl:.4g} exceeds the budget" for c in known if c not in within}
    return within, exceeding


def _check_checkpoint(model: str | os.PathLike[str] | Shape, qualities: Sequence[Quality], progress: Progress) -> None:
    """Raise ConfigError if another checkpoint was evaluated. Shapes have none."""
    digests = {quality.checkpoint: quality for quality in qualities if quality.checkpoint}
    if not digests or isinstance(model, Shape):
        return
    if is_engine_directory(Path(model)):
        own = read_manifest(Path(model)).checkpoint
    else:
        own = "" if is_weightless(model) else sampled_digest(find_checkpoint(os.fspath(model), progress)[0])
    for digest, quality in digests.items():
        if own and digest != own:
            raise ConfigError(
                f"{quality.source} evaluates another checkpoint than {os.fspath(model)}; evaluate this one"
            )


class _SchemeSearch:
    """Search under one scheme.

    Attributes:
        choices: all choices that were simulated.
        num_searched: number of partitions that were simulated in addition to the grid.
        bound: lower bound of the objective; None without a search over partitions.
        left_out: reasons by name of partitions that were not simulated.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Shape,
        device: DeviceProfile | MeasuredProfile,
        fixed: _Fixed,
        candidate: _Candidate,
        *,
        prompt_lengths: Sequence[int],
        chunk_lengths: Sequence[Lengths] | None,
        npu_sinks: int | None,
        placements: Mapping[str, Placement],
        memory_bytes: int | None,
        objective: Objective,
        queue: Queue | None,
        progress: Progress,
        simulate: Callable[..., Rows],
    ) -> None:
        self._device, self._fixed, self._candidate, self._progress = device, fixed, candidate, progress
        self._prompt_lengths, self._memory_bytes, self._objective = prompt_lengths, memory_bytes, objective
        self._shadow = candidate.quantisation.get("shadow")
        self._scheme = scheme_of(model, candidate.quantisation["scheme"], self._shadow)
        self._simulate, self._queue, self._npu_sinks = simulate, queue, npu_sinks
        self.choices: list[Setup] = []
        self.num_searched = 0
        self.bound: float | None = None
        self.left_out: dict[str, str] = {}
        self._partitions: dict[str, Placement] = {NATURAL: fixed.placement}
        [self._plan] = plans_of(model, [{}], progress, self._scheme)
        self._plans = {NATURAL: self._plan}
        self._has_npu = isinstance(device, MeasuredProfile) or device.uses_npu
        if not fixed.reason and self._has_npu:
            wanted = {**partitions_of(self._plan), **placements}
            made = plans_of(model, list(wanted.values()), progress, self._scheme)
            self._plans = dict(zip(wanted, made, strict=True))
            self.left_out = _refused(self._plans, self._scheme)
            self._partitions = {name: value for name, value in wanted.items() if name not in self.left_out}
        context = self._plan.context_length
        if chunk_lengths is None:
            chunk_lengths = [n for n in fixed.chunk_lengths_or(None) if n[-1] <= context] or [(context,)]
        self._lengths = chunk_lengths

    def search_grid(self) -> None:
        """Simulate the grid of whole kinds of modules."""
        self.choices += [choice for part in self._parts() for choice in self._simulated(part, self._lengths)]

    def _parts(self) -> Iterator[_Part]:
        on_cpu = {n: p for n, p in self._partitions.items() if not places_attention(self._plans.get(n, self._plan), p)}
        if on_cpu:
            yield ON_CPU, on_cpu, SEARCHED_POLICIES, CHUNKS_IN_FLIGHT
        if not self._fixed.is_measured and self._has_npu:
            for attention in self._fixed.attentions or _attentions(self._plan, self._prompt_lengths, self._npu_sinks):
                able = _with_attention(self._partitions, self._plans, attention, self._scheme)
                if able:
                    yield attention, able, (DEFAULT_POLICY,), (None,)  # the order of tasks is fixed

    def _simulated(self, part: _Part, lengths: Sequence[Lengths]) -> list[Setup]:
        attention, able, policies, in_flight = part
        rows = self._simulate(
            placements=able,
            schemes=[self._scheme.name],
            shadow=self._shadow,
            attentions=[attention],
            prompt_lengths=self._prompt_lengths,
            chunk_lengths=[graphs_text(each) if len(each) > 1 else each[0] for each in lengths],
            policies=policies,
            chunks_in_flight=in_flight,
        )
        grid = product(able, self._prompt_lengths, lengths, policies, in_flight)
        grouped: dict[tuple[str, Lengths, str, int | None], list[GridRow]] = defaultdict(list)
        for row, (name, _, length, policy, flight) in zip(rows, grid, strict=True):
            grouped[name, length, policy, flight].append(row)
        return [self._choice(key, able, found) for key, found in grouped.items()]

    def _choice(
        self, key: tuple[str, Lengths, str, int | None], partitions: Mapping[str, Placement], rows: Sequence[GridRow]
    ) -> Setup:
        partition, _, policy, chunks_in_flight = key
        times = tuple(row.time_to_first_token_ms for row in rows)
        joules = [row.energy_joules for row in rows if row.energy_joules is not None]
        return Setup(
            partition=partition,
            placement=partitions[partition],
            attention=rows[0].attention,
            chunk_length=rows[0].chunk_length,
            graphs=rows[0].graphs,
            policy=policy,
            chunks_in_flight=chunks_in_flight,
            times_ms=times,
            time_ms=geometric_mean(times),
            p95_ms=percentile(times, 0.95) if self._queue is None else self._queue.p95_ms(times),
            peak_memory_bytes=max(row.peak_memory_bytes for row in rows),
            energy_joules=sum(joules) if joules else None,
            quantisation=self._candidate.quantisation,
            num_shadows=sum(node.op == SHADOW_OP for subgraph in self._plan.subgraphs for node in subgraph.nodes),
            mean_kl=self._candidate.mean_kl,
        )

    def search_partitions(self, num_before: int) -> list[SearchedPartition]:
        """Search the partition of every module after the grid.

        Args:
            num_before: number of partitions that other searches have named.
        """
        if self._fixed.reason or not isinstance(self._device, DeviceProfile) or not self._has_npu:
            return []
        choices, objective, memory_bytes = self.choices, self._objective, self._memory_bytes
        search = PartitionSearch(
            self._plan, self._scheme, self._device, self._prompt_lengths, objective, memory_bytes, self._queue
        )
        costs = [c.cost(objective) for c in choices if memory_bytes is None or c.peak_memory_bytes <= memory_bytes]
        usable = dict.fromkeys(choice.attention for choice in choices)
        pairs = list(product(usable, self._lengths))
        searched: list[SearchedPartition] = []
        for found in _searches(search, pairs, min(costs, default=inf), self._progress):
            self.bound = found.bound if self.bound is None else min(self.bound, found.bound)
            if found.partition is None:
                continue
            self.num_searched += found.partition.num_simulated
            name = f"{SEARCHED} {num_before + len(searched) + 1}"
            policies, in_flight = (
                (SEARCHED_POLICIES, CHUNKS_IN_FLIGHT) if found.attention == ON_CPU else ((DEFAULT_POLICY,), (None,))
            )
            placement = {name: found.partition.placement}
            made = self._simulated((found.attention, placement, policies, in_flight), [found.lengths])
            own = (found.attention, *made[0].lengths)
            of_grid = [c for c in choices if (c.attention, *c.lengths) == own]
            searched.append(_compared(search, found, of_grid, made))
            choices += made
        return searched


@dataclass(frozen=True, kw_only=True)
class _Searched:
    """One pair of an attention and a chunk length, with its lower bound, and the best partition if it was searched."""

    attention: str
    lengths: Lengths
    bound: float
    partition: Found | None


def _searches(
    search: PartitionSearch, pairs: Sequence[tuple[str, Lengths]], known: float, progress: Progress
) -> Iterator[_Searched]:
    """Search the partitions for the pairs whose bounds are below the best known cost, the lowest bound first."""
    bounds = {}
    for index, pair in enumerate(pairs):
        bounds[pair] = search.bound(*pair)
        progress("bounding partitions", index + 1, len(pairs))
    for index, pair in enumerate(sorted(pairs, key=bounds.__getitem__)):
        attention, lengths = pair
        found = None
        if index < MOST_SEARCHES and bounds[pair] < known:
            found = search.search(attention, lengths)
            known = min(known, found.cost)
            progress("searching partitions", index + 1, min(MOST_SEARCHES, len(pairs)))
        if found is not None and found.cost == inf:  # none fits the memory
            found = None
        yield _Searched(attention=attention, lengths=lengths, bound=bounds[pair], partition=found)


def _compared(
    search: PartitionSearch, searched: _Searched, of_grid: Sequence[Setup], made: Sequence[Setup]
) -> SearchedPartition:
    found = searched.partition
    assert found is not None

    def usual(choice: Setup) -> bool:
        return choice.policy == DEFAULT_POLICY and choice.chunks_in_flight is None

    return SearchedPartition(
        attention=searched.attention,
        chunk_length=made[0].chunk_length,
        graphs=made[0].graphs,
        bound=searched.bound,
        rule=next((choice for choice in of_grid if choice.partition == NATURAL and usual(choice)), None),
        found=next(choice for choice in made if usual(choice)),
        rule_cut=search.size_of(search.cuts.labels, searched.attention),
        found_cut=search.size_of(found.labels, searched.attention),
        num_simulated=found.num_simulated,
        is_exact=found.is_exact,
    )


_Part = tuple[str, Mapping[str, Placement], Sequence[str], Sequence[int | None]]
"""Part of the search: an attention with its partitions, policies and chunks in flight."""


def _attentions(plan: Plan, prompt_lengths: Sequence[int], npu_sinks: int | None) -> list[str]:
    """Return the windows to search: one up to the longest prompt, or the shortest and the longest together. They slide
    if `npu_sinks` is given.
    """
    longest = min(max(prompt_lengths), plan.context_length)
    enough = next((index for index, window in enumerate(WINDOWS) if window >= longest), len(WINDOWS) - 1)
    found = [f"npu:{window}" for window in WINDOWS[: enough + 1]]
    found += [f"npu:{WINDOWS[0]},{WINDOWS[enough]}"] if enough else []
    return found if npu_sinks is None else [f"{windows}:sinks={npu_sinks}" for windows in found]


def _with_attention(
    partitions: Mapping[str, Placement], plans: Mapping[str, Plan], attention: str, scheme: Scheme
) -> dict[str, Placement]:
    """Return the partitions for which an NPU can compute attention."""
    able = {}
    for name, placement in partitions.items():
        try:
            near = near_plans_of(plans[name], placement, attention)
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
    compiled: Scheme | None = None
    chunk_lengths: tuple[Lengths, ...] = ()
    attentions: tuple[str, ...] = ()
    placement: Placement = field(default_factory=dict)

    @staticmethod
    def of(model: str | os.PathLike[str] | Shape, device: DeviceProfile | MeasuredProfile) -> _Fixed:
        if isinstance(device, MeasuredProfile):
            return _Fixed(
                reason=f"{device.name} was measured with scheme {device.scheme} and chunks of "
                f"{chunk_text(device.chunk_length, device.graph_lengths)}",
                is_measured=True,
                scheme=device.scheme,
                chunk_lengths=(device.graph_lengths or (device.chunk_length,),),
            )
        if not isinstance(model, Shape) and is_engine_directory(Path(model)):
            manifest = read_manifest(Path(model))
            lengths = sorted({target.chunk_length for target in manifest.npu if target.soc == device.soc})
            compiled = manifest.npu_attention
            of_chunks = f" and chunks of {', '.join(map(str, lengths))}" if lengths else ""
            return _Fixed(
                reason=f"{model} was compiled under {manifest.scheme.name}{of_chunks}",
                scheme=manifest.scheme.name,
                compiled=manifest.scheme,
                chunk_lengths=tuple((length,) for length in lengths),
                attentions=(_compiled_attention(compiled),) if compiled.get("attention") == "npu" else (),
                placement=manifest.placement,
            )
        return _Fixed()

    def has(self, scheme: Scheme) -> bool:
        """Return True if the profile or the engine directory has a scheme; a profile knows only its name."""
        return scheme == self.compiled if self.compiled is not None else scheme.name == self.scheme

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
        if self.compiled is not None and (refusal := linear_refusal(npu_support, self.compiled)):
            raise ConfigError(f"{self.reason}, which the NPU does not run: {refusal}")
        return scheme.name

    def chunk_lengths_or(self, wanted: Iterable[int | str] | None) -> list[Lengths]:
        """Return the lengths of graphs to search. Raise ConfigError if the request differs from a fixed length."""
        if wanted is None:
            return list(self.chunk_lengths) or [(length,) for length in CHUNK_LENGTHS]
        if isinstance(wanted, str):
            raise ConfigError(f"chunk_lengths is {wanted!r}, expected a list; put it in brackets")
        found = [lengths_of(each) for each in dict.fromkeys(wanted)]
        for each, lengths in zip(dict.fromkeys(wanted), found, strict=True):
            if not lengths:
                raise ConfigError(
                    f"chunk_lengths: {each!r}, expected a whole number of at least 1, or several with commas between"
                )
            if self.is_measured:
                is_known = lengths in self.chunk_lengths
            else:
                is_known = not self.chunk_lengths or {*lengths} <= {n for known in self.chunk_lengths for n in known}
            if not is_known:
                raise ConfigError(f"{self.reason}, not {graphs_text(lengths)}; omit the chunk length")
        return found


def _compiled_attention(compiled: Mapping[str, str | int]) -> str:
    """Return the attention of an engine directory, as in `chunkrt.experiment`."""
    sinks = f":sinks={compiled['npu_sinks']}" if "npu_sinks" in compiled else ""
    return f"npu:{compiled['npu_window']}{sinks}"


def _refused(plans: Mapping[str, Plan], scheme: Scheme) -> dict[str, str]:
    """Map each partition that the NPU does not support to the reason."""
    refused = {}
    for name, plan in plans.items():
        supports = (npu_support(subgraph, plan, scheme) for subgraph in plan.subgraphs if subgraph.device == "npu")
        if reason := next((f"{support.node}: {support.reason}" for support in supports if not support), ""):
            refused[name] = reason
    return refused


def _best(choices: Sequence[Setup], memory_bytes: int | None, objective: Objective, queue: Queue | None) -> Setup:
    fitting = [c for c in choices if memory_bytes is None or c.peak_memory_bytes <= memory_bytes]
    if not fitting:
        least = min(choice.peak_memory_bytes for choice in choices)
        raise ConfigError(
            f"no choice stays within {(memory_bytes or 0) / 1e6:.4g} MB, the smallest takes {least / 1e6:.4g} MB; "
            "allow more memory, or try a scheme with smaller weights"
        )
    least_cost = min(choice.cost(objective) for choice in fitting)
    if queue is not None and least_cost == inf:
        least_ms = min(mean(choice.times_ms) for choice in fitting)
        raise ConfigError(
            f"no choice keeps up with {queue.rate:g} requests per second: the fastest takes {least_ms:.4g} ms for a "
            "prompt on average; lower the rate"
        )
    good = (1 + TIE) * least_cost
    return min((c for c in fitting if c.cost(objective) <= good), key=lambda c: (c.peak_memory_bytes, c.time_ms))


def _distinct(choices: Iterable[Setup]) -> list[Setup]:
    """Return, of choices with the same partition, attention, chunk length, quantisation and predictions, the first,
    which is nearest to the default."""
    first: dict[Any, Setup] = {}
    for c in choices:
        first.setdefault(
            (
                *(c.partition, c.attention, *c.lengths, c.times_ms, c.peak_memory_bytes, c.energy_joules),
                *(repr(c.quantisation), c.mean_kl),
            ),
            c,
        )
    return list(first.values())


def _figures(choice: Setup, objective: Objective) -> str:
    joules = "" if choice.energy_joules is None else f", {choice.energy_joules:.3g} J"
    quality = "" if choice.mean_kl is None else f", mean KL {choice.mean_kl:.3g}"
    late = ""
    if objective == "p95":
        late = " (p95: overloaded)" if choice.p95_ms is None else f" (p95: {choice.p95_ms:.1f} ms)"
    return f"{choice.time_ms:.1f} ms to the first token{late}, {choice.peak_memory_bytes / 1e6:.0f} MB{joules}{quality}"
