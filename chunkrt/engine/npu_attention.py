"""Attention on the NPU, and convolutions: which layers', over which windows, and how many layers make one graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from chunkrt.engine.options import AttentionOn, EngineOptions
from chunkrt.engine_directory.manifest import Manifest
from chunkrt.errors import ConfigError
from chunkrt.graph.placement import Placement, placed_by_name
from chunkrt.graph.plan import Plan, Subgraph
from chunkrt.graph.static_attention import attention_nodes, convolution_nodes, num_layers, with_static_attention

log = logging.getLogger(__name__)

MOST_GRAPH_WEIGHTS = 2**30
"""Weights of one graph: an HTP session addresses 32 bits, for contexts, buffers and the library together."""


@dataclass(frozen=True, kw_only=True)
class NearPlan:
    """A plan with attention on the NPU. `reach`: the last position at which a chunk may begin."""

    reach: int
    plan: Plan


def near_plans(
    plan: Plan, placement: Placement, options: EngineOptions, context_length: int, chunk_length: int
) -> list[NearPlan]:
    """The plans for short histories, shortest first; none where no attention goes to the NPU.

    Convolutions see no window. Where some go to the NPU, the last plan has these alone there, and reaches to the end.

    Args:
        plan: as it runs where the history is longer.
        placement: what it was placed by.

    Raises:
        ConfigError: the NPU shall attend, and no attention of the plan can be static; or it shall, and caches are int8,
            or attention is in bfloat16.
    """
    if options.attention == "cpu":
        return []
    names, convolutions = (
        [name for name in found if _is_chosen(name, placement, options.attention)]
        for found in (attention_nodes(plan), convolution_nodes(plan))
    )
    if options.attention == "npu" and not (names or convolutions):
        raise ConfigError("no attention of this model can be computed by the NPU; leave --attention npu away")
    if names and options.cache_dtype == "int8":
        raise ConfigError("the NPU attends to no caches of int8; choose float16, or attention 'cpu'")
    if names and options.attention_math != "float32":
        raise ConfigError(
            f"attention_math {options.attention_math!r} is the CPU's, and the NPU is to attend; choose float32, or "
            "attention 'cpu'"
        )
    slots, fits = plan.slots(context_length, chunk_length), _fits(plan, options.graph_layers)
    found: list[NearPlan] = []
    for window in options.npu_windows if names else ():
        past = min(window, context_length)
        seen: Mapping[str, int] = {**slots, "P": past}
        near = with_static_attention(plan, [*names, *convolutions], seen, fits=fits)
        found.append(NearPlan(reach=past, plan=near))
        if past == context_length:
            return found
    if convolutions:
        near = with_static_attention(plan, convolutions, slots, fits=fits)
        found.append(NearPlan(reach=context_length, plan=near))
    return found


def npu_plans(
    plan: Plan, placement: Placement, options: EngineOptions, context_length: int, chunk_length: int
) -> dict[int, Plan]:
    """All plans that an engine compiles for the NPU, by the last position at which a chunk may begin. Raises as
    `near_plans`."""
    plans = {near.reach: near.plan for near in near_plans(plan, placement, options, context_length, chunk_length)}
    return plans if context_length in plans else plans | {context_length: plan}


ATTENTION_OPTIONS = ("attention", "npu_window", "npu_graph", "context_length")
"""The engine's options that decide how attention is compiled for the NPU."""


def compiled_attention(options: EngineOptions, context_length: int) -> dict[str, str | int]:
    """The options by which attention is compiled for the NPU, for an engine directory to keep."""
    return {name: getattr(options, name) for name in ATTENTION_OPTIONS} | {"context_length": context_length}


def as_compiled(options: EngineOptions, manifest: Manifest) -> EngineOptions:
    """The options of an engine on an NPU, with those of attention that its directory was compiled by.

    An option that was given, i.e. is not the default, stays as it is, with a warning if it differs.
    """
    taken, others = dict[str, Any](), list[str]()
    for name, compiled in manifest.npu_attention.items():
        given = getattr(options, name)
        if given == EngineOptions.__dataclass_fields__[name].default:
            taken[name] = compiled
        elif str(given) != str(compiled):
            others.append(f"{name} {compiled}, and {given} is asked for")
    if others:
        log.warning("attention was compiled for the NPU with %s; what is missing is compiled", "; ".join(others))
    return replace(options, **taken)


def _is_chosen(node: str, placement: Placement, attention: AttentionOn) -> bool:
    placed = placed_by_name(placement, node)
    return placed == "npu" or (attention == "npu" and placed is None)


def _fits(plan: Plan, most_layers: int | None) -> Callable[[Subgraph], bool]:
    def fits(subgraph: Subgraph) -> bool:
        weights = sum(prod(map(int, plan.tensors[name].shape)) for name in subgraph.weights)  # 8 bits each, at most
        return weights <= MOST_GRAPH_WEIGHTS and (most_layers is None or num_layers(subgraph) <= most_layers)

    return fits
