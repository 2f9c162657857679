"""Options of an engine in combination with a model: lengths, data types of caches, and options that do not fit."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import cast

from chunkrt.backends import Backend
from chunkrt.backends.base import AttentionMath
from chunkrt.backends.dispatch import Dispatcher, Runner
from chunkrt.backends.native.cpu import fastest_attention
from chunkrt.backends.qnn.htp_support import ROWS_MULTIPLE, graph_rows
from chunkrt.engine.options import CPU_CHUNK_LENGTH, DEFAULT_CHUNK_LENGTH, EngineOptions
from chunkrt.engine_directory.manifest import Manifest
from chunkrt.errors import ConfigError
from chunkrt.graph.plan import Plan
from chunkrt.graph.rewrites import has_key_biases, without_key_biases
from chunkrt.quant.scheme import Scheme
from chunkrt.runtime.state_tensors import CacheDtype

log = logging.getLogger(__name__)


def choose_context_length(plan: Plan, options: EngineOptions) -> int:
    """Return the context length of sessions in tokens. Raise ConfigError if it exceeds the model's context length."""
    wanted = options.context_length or plan.context_length
    if wanted > plan.context_length:
        raise ConfigError(f"`context_length` is {wanted}, but the model takes at most {plan.context_length}")
    return wanted


def choose_chunk_length(
    options: EngineOptions, context_length: int, *, has_npu: bool, manifest: Manifest | None = None
) -> int:
    """Return the number of tokens of a chunk.

    Args:
        has_npu: True if a backend other than the CPU's serves as the NPU.
        manifest: manifest of the engine directory, if it exists already.

    Raises:
        ConfigError: a chunk would be longer than the context.
    """
    is_compiled = manifest is not None and bool(manifest.npu)
    if options.chunk_length is None and not (is_compiled or has_npu):
        return min(CPU_CHUNK_LENGTH, context_length)
    wanted = usual_chunk_length(())
    if options.chunk_lengths:
        wanted = options.chunk_lengths[-1]
    elif manifest is not None:
        wanted = compiled_chunk_length(manifest)
    if wanted > context_length:
        raise ConfigError(
            f"`chunk_length` is {wanted}, longer than the context of {context_length}; choose a shorter one"
        )
    return wanted


def compiled_chunk_length(manifest: Manifest) -> int:
    """Return the chunk length of an engine directory."""
    return usual_chunk_length({target.chunk_length for target in manifest.npu})


def graph_lengths(options: EngineOptions, manifest: Manifest) -> tuple[int, ...]:
    """Return the chunk lengths for which graphs on the NPU exist: the given ones, or those of the engine directory."""
    return options.chunk_lengths or tuple(sorted({target.chunk_length for target in manifest.npu}))


def warn_of_equal_graphs(lengths: Sequence[int], scheme: Scheme) -> None:
    """Warn if requested chunk lengths share a graph on the NPU, because activations have 8 bits."""
    sharing = defaultdict[int, list[int]](list)
    for length in lengths:
        sharing[graph_rows(length, scheme)].append(length)
    shared = [
        f"chunks of {', '.join(map(str, of_graph))} tokens share a graph of {rows} rows"
        for rows, of_graph in sharing.items()
        if len(of_graph) > 1
    ]
    if scheme.activation_bits == 8 and shared:
        log.warning(
            "with 8-bit activations (%s) graphs on the NPU have multiples of %d rows: %s; smaller graphs need a scheme "
            "with 16-bit activations",
            scheme.name,
            ROWS_MULTIPLE,
            "; ".join(shared),
        )


def usual_chunk_length(lengths: Collection[int]) -> int:
    """Return the chunk length that a run uses. Of several lengths, prefer the usual one, then the longest.

    The first length of the list would not be suitable: with "1,32,128" the NPU would run token by token.
    """
    return DEFAULT_CHUNK_LENGTH if DEFAULT_CHUNK_LENGTH in lengths or not lengths else max(lengths)


def default_cache_dtype(options: EngineOptions, scheme: Scheme, backend: Backend, math: AttentionMath) -> CacheDtype:
    """Return the default data type of caches. It is bfloat16 with bfloat16 or int8 attention, float32 under the scheme
    "float", and otherwise the first type that the backend of attention lists.
    """
    if math != "float32" and not options.context_shift:
        return "bfloat16"
    return "float32" if scheme.weight_bits is None else cast(CacheDtype, backend.cache_dtypes[0])


def with_cached_keys(plan: Plan, options: EngineOptions) -> Plan:
    """Return the plan with keys cached as the options require: before RoPE for a context that shifts, and without
    biases in int8 caches. Raise ConfigError if keys cannot be cached so, or if the context is too long.
    """
    plan = plan.in_plain_context(choose_context_length(plan, options))
    if options.context_shift:
        if plan.has_learned_positions:
            raise ConfigError(
                f"`context_shift` moves cached keys, but {plan.family} adds learned positions to rows, from which keys "
                "are made; omit it"
            )
        if plan.rope_period:
            raise ConfigError(
                f"`context_shift` moves cached keys, but dual chunk attention rotates them for their place in a chunk "
                f"of {plan.rope_period} tokens; omit it, or choose a `context_length` of at most {plan.plain_context}"
            )
        plan = plan.with_raw_keys()
    return without_key_biases(plan) if options.cache_dtype == "int8" else plan


def choose_attention_math(
    options: EngineOptions, plan: Plan, scheme: Scheme, dispatcher: Dispatcher, *, is_on_npu: bool, has_ranks: bool
) -> AttentionMath:
    """Return the arithmetic of attention. "auto" is the fastest one of this processor if the native backend runs all
    attention of a quantised model with its default caches, and float32 otherwise.

    Args:
        is_on_npu: True if the NPU runs attention too.
        has_ranks: True if several ranks, perhaps on different processors, share the decoder.
    """
    if options.attention_math != "auto":
        if options.attention_math == "bfloat16" and fastest_attention() == "float32":
            log.warning(
                "attention in bfloat16 multiplies in float32 on this processor: it is less precise, and prompts are no "
                "faster; choose `attention_math='auto'`"
            )
        return options.attention_math
    is_native = options.npu in ("auto", "qnn", "off", "native") and not _other_attention(plan, dispatcher, "native")
    has_default_caches = options.cache_dtype is None and not options.context_shift
    if not is_native or not has_default_caches or scheme.weight_bits is None or is_on_npu or has_ranks:
        return "float32"
    return fastest_attention(has_key_biases=has_key_biases(plan))


def check_cache(
    options: EngineOptions, plan: Plan, dispatcher: Dispatcher, backend: Backend, math: AttentionMath
) -> None:
    """Check that the native backend runs attention with int8 caches or in bfloat16. Raise ConfigError if another
    function would run.
    """
    if options.cache_dtype == "int8":
        what, others = "int8 caches are", "float32 or float16"
    elif math != "float32":
        what, others = f"{math} attention is", "float32"
    else:
        return
    for runner in _other_attention(plan, dispatcher, backend.name):
        raise ConfigError(
            f"{what} only supported by native attention, but {runner.name} runs cached_attention ({runner.reason}); "
            f"choose {others}"
        )


def _other_attention(plan: Plan, dispatcher: Dispatcher, backend: str) -> list[Runner]:
    """Return the runners of attention other than native."""
    return [
        runner
        for subgraph in plan.subgraphs
        if subgraph.all_state
        for _, runner in dispatcher.runners(subgraph, backend)
        if runner.operator == "cached_attention" and runner.name != "native"
    ]


def check_shift(context_length: int, options: EngineOptions) -> None:
    """Raise ConfigError if a context that shifts keeps so many tokens that no token can be dropped."""
    if options.context_shift and options.context_keep > context_length - 2:
        raise ConfigError(
            f"`context_keep` is {options.context_keep}, but in a context of {context_length} at least two tokens must "
            "move; keep fewer"
        )


def check_cache_memory(limit: int, needed: int, context_length: int) -> None:
    """Raise ConfigError if the memory limit is less than the `needed` bytes of one session."""
    if needed > limit:
        raise ConfigError(
            f"cache_memory is {limit} bytes, but the caches of one session with a context of {context_length} take "
            f"{needed}; raise the limit (`cache_memory`), or choose a shorter context (`context_length`)"
        )
