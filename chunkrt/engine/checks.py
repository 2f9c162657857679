"""What an engine's caches are made of, and what does not go together with them."""

from __future__ import annotations

from typing import cast

from chunkrt.backends import Backend
from chunkrt.backends.dispatch import Dispatcher
from chunkrt.engine.options import EngineOptions
from chunkrt.errors import ConfigError
from chunkrt.graph.key_biases import without_key_biases
from chunkrt.graph.plan import Plan
from chunkrt.quant.scheme import Scheme
from chunkrt.runtime.state_tensors import CacheDtype


def default_cache_dtype(options: EngineOptions, scheme: Scheme, backend: Backend) -> CacheDtype:
    """What attention in bfloat16 reads as it is; or what who attends takes first, under "float" float32."""
    if options.attention_math == "bfloat16" and not options.context_shift:
        return "bfloat16"
    return "float32" if scheme.weight_bits is None else cast(CacheDtype, backend.cache_dtypes[0])


def with_cached_keys(plan: Plan, options: EngineOptions) -> Plan:
    """The plan with keys cached as options ask: before RoPE if the context shifts, in int8 without their biases."""
    plan = plan.with_raw_keys() if options.context_shift else plan
    return without_key_biases(plan) if options.cache_dtype == "int8" else plan


def check_cache(options: EngineOptions, plan: Plan, dispatcher: Dispatcher, backend: Backend) -> None:
    """Caches of int8, and bfloat16, are the native attention's alone. Raises ConfigError if another would run."""
    if options.cache_dtype == "int8":
        what, others = "caches of int8 are", "float32 or float16"
    elif options.attention_math != "float32":
        what, others = f"attention in {options.attention_math} is", "float32"
    else:
        return
    for subgraph in (s for s in plan.subgraphs if s.state):
        for _, runner in dispatcher.runners(subgraph, backend.name):
            if runner.operator == "cached_attention" and runner.runs_on != "native":
                raise ConfigError(
                    f"{what} the native attention's alone, and {runner.runs_on} runs cached_attention "
                    f"({runner.reason}); choose {others}"
                )


def check_shift(context_length: int, options: EngineOptions) -> None:
    """Raises ConfigError if a context that shifts has nothing to move."""
    if options.context_shift and options.context_keep > context_length - 2:
        raise ConfigError(
            f"context_keep is {options.context_keep}, but of a context of {context_length} two tokens at least have to "
            "move; keep fewer"
        )


def check_cache_memory(limit: int, needed: int, context_length: int) -> None:
    """Raises ConfigError if so many bytes hold not one session, which needs so many."""
    if needed > limit:
        raise ConfigError(
            f"cache_memory is {limit} bytes, but the caches of one session with a context of {context_length} take "
            f"{needed}; let them have more (--cache-memory), or take a shorter context (--context)"
        )
