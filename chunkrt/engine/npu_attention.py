"""Attention and convolutions on the NPU: choice of the layers, the windows, and the number of layers in one graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, cast

from chunkrt.engine.options import DEFAULT_CHUNK_LENGTH, AttentionOn, EngineOptions
from chunkrt.engine_directory.manifest import Manifest
from chunkrt.errors import ConfigError
from chunkrt.graph.placement import Placement, placed_by_name
from chunkrt.graph.plan import Plan, Subgraph, reads_shared_cache
from chunkrt.graph.static_attention import (
    attention_nodes,
    convolution_nodes,
    kept_slots,
    num_layers,
    with_static_attention,
)

log = logging.getLogger(__name__)

MOST_GRAPH_WEIGHTS = 2**30
"""Maximum size of the weights of one graph. An HTP session has a 32-bit address space for contexts, buffers and the
library.
"""


@dataclass(frozen=True, kw_only=True)
class _NearPlan:
    """A plan with attention on the NPU. `reach` is the last position at which a chunk may begin."""

    reach: int
    plan: Plan


def near_plans(plan: Plan, placement: Placement, options: EngineOptions, context_length: int) -> list[_NearPlan]:
    """Return the plans for short histories, shortest first. The list is empty if the NPU computes no attention.

    Convolutions do not need a window. If the NPU computes convolutions, the last plan puts only these on the NPU, and
    its reach is not limited.

    Args:
        plan: the plan for longer histories.
        placement: the placement of the plan.

    Raises:
        ConfigError: attention on the NPU is required, but no attention of the plan can have a fixed shape, or
            attention is in bfloat16 or int8.
    """
    if options.attention == "cpu":
        return []
    names, convolutions = (
        [name for name in found if _is_chosen(name, placement, options.attention)]
        for found in (attention_nodes(plan), convolution_nodes(plan))
    )
    if options.attention == "npu" and not (names or convolutions):
        if options.cache_dtype == "int8" and plan.has_raw_keys:
            raise ConfigError(
                "int8 caches hold the keys of this model without their biases, and the NPU cannot attend to these; "
                "choose a `cache_dtype` of float16, or `attention='cpu'`"
            )
        shorter = f", or choose a `context_length` of at most {plan.plain_context}" if plan.rope_period else ""
        raise ConfigError(f"the NPU cannot compute any attention of this model; omit `attention='npu'`{shorter}")
    readers = [node.name for s in plan.subgraphs for node in s.nodes if reads_shared_cache(node)]
    if readers and options.attention == "npu":
        log.warning(
            "%d layers read the KV caches of other layers; the CPU computes their attention (first: %s)",
            len(readers),
            readers[0],
        )
    if names and options.attention_math in ("bfloat16", "int8"):
        raise ConfigError(
            f"`attention_math={options.attention_math!r}` is supported for attention on the CPU only; "
            "omit it, or choose `attention='cpu'`"
        )
    # A graph reads the positions before a chunk, as many as a layer's window has. Their number does not depend on the
    # chunk length, so that graphs of all lengths in an engine directory belong to the same plan.
    slots, fits = plan.slots(context_length, DEFAULT_CHUNK_LENGTH), _fits(plan, options.graph_layers)
    has_int8_caches = options.cache_dtype == "int8"
    found: list[_NearPlan] = []
    for window in options.npu_windows if names else ():
        past = min(window, context_length)
        seen: Mapping[str, int] = {**slots, "P": past}
        slides = options.npu_sinks is not None and window == options.npu_windows[-1] and past < context_length
        kept = options.npu_sinks if slides else None
        near = with_static_attention(
            plan, [*names, *convolutions], seen, fits=fits, kept=kept, has_int8_caches=has_int8_caches
        )
        found.append(_NearPlan(reach=context_length if slides else past, plan=near))
        if found[-1].reach == context_length:
            return found
    if convolutions:
        near = with_static_attention(plan, convolutions, slots, fits=fits)
        found.append(_NearPlan(reach=context_length, plan=near))
    return found


def check_decode(plan: Plan, options: EngineOptions) -> None:
    """Raise ConfigError if the CPU decodes, although the windows of a plan with attention on the NPU slide. The CPU
    sees all positions, so the text would depend on the processor.
    """
    nodes = [node for subgraph in plan.subgraphs for node in subgraph.nodes]
    slides = any(kept_slots(node) is not None and not node.attributes["window"] for node in nodes)
    if slides and options.decodes_on != "npu":
        raise ConfigError(
            f"with `npu_sinks={options.npu_sinks}` prompts on the NPU see {options.npu_windows[-1]} positions, but "
            "tokens that the CPU decodes would see all; choose `decode_on='npu'`, or compile without `npu_sinks`"
        )


def near_by_reach(plan: Plan, placement: Placement, options: EngineOptions, context_length: int) -> dict[int, Plan]:
    """Return the plans of `near_plans` by the last position at which a chunk may begin."""
    return {near.reach: near.plan for near in near_plans(plan, placement, options, context_length)}


def npu_plans(plan: Plan, placement: Placement, options: EngineOptions, context_length: int) -> dict[int, Plan]:
    """Map the last position at which a chunk may begin to each plan that an engine compiles for the NPU. The errors are
    those of `near_plans`.
    """
    plans = near_by_reach(plan, placement, options, context_length)
    return plans if context_length in plans else plans | {context_length: plan}


ATTENTION_OPTIONS = ("attention", "npu_window", "npu_graph", "npu_sinks", "context_length", "cache_dtype")
"""Names of the engine's options that determine how attention is compiled for the NPU. Of the types of caches, only int8
changes a graph.
"""


def compiled_attention(options: EngineOptions, context_length: int) -> dict[str, str | int]:
    """Return the options with which attention is compiled for the NPU, for storage in an engine directory."""
    given = {name: getattr(options, name) for name in ATTENTION_OPTIONS} | {"context_length": context_length}
    if options.cache_dtype != "int8":
        del given["cache_dtype"]
    return {name: value for name, value in given.items() if value is not None}


def attends_on_npu(plan: Plan, placement: Placement, options: EngineOptions) -> bool:
    """Return True if the NPU computes softmax attention of some layer."""
    names = attention_nodes(plan) if options.attention != "cpu" else []
    return any(_is_chosen(name, placement, options.attention) for name in names)


def as_compiled(options: EngineOptions, manifest: Manifest) -> EngineOptions:
    """Return the options of an engine on an NPU, with the attention options and NPU settings of its directory.

    An option that differs from its default was given by the user, and is kept.
    """
    taken = {name: compiled for name, compiled in manifest.npu_attention.items() if _is_default(options, name)}
    return replace(options, htp=options.htp.with_compiled(manifest.npu_settings), **cast(Any, taken))


def changed_options(options: EngineOptions, manifest: Manifest) -> str:
    """Return the given options that differ from those with which attention was compiled for the NPU, as text."""
    changed = [
        f"`{name}={getattr(options, name)}` in place of {compiled}"
        for name, compiled in _compiled_options(manifest).items()
        if str(getattr(options, name)) != str(compiled)
    ]
    if options.cache_dtype == "int8" and "cache_dtype" not in manifest.npu_attention:
        changed.append("`cache_dtype=int8` in place of float16")
    settings = options.htp.compiled_settings.items()
    changed += [f"{name}={value}" for name, value in settings if manifest.npu_settings.get(name) != value]
    return ", ".join(changed)


def _compiled_options(manifest: Manifest) -> Mapping[str, str | int]:
    return manifest.npu_attention or {"attention": "auto"}


def _is_default(options: EngineOptions, name: str) -> bool:
    return bool(getattr(options, name) == EngineOptions.__dataclass_fields__[name].default)


def _is_chosen(node: str, placement: Placement, attention: AttentionOn) -> bool:
    placed = placed_by_name(placement, node)
    return placed == "npu" or (attention == "npu" and placed is None)


def _fits(plan: Plan, most_layers: int | None) -> Callable[[Subgraph], bool]:
    def fits(subgraph: Subgraph) -> bool:
        weights = sum(
            prod(map(int, plan.tensors[name].shape)) for name in subgraph.weights
        )  # these weights have at most 8 bits
        return weights <= MOST_GRAPH_WEIGHTS and (most_layers is None or num_layers(subgraph) <= most_layers)

    return fits
