"""The fields of `EngineOptions` as arguments of `load`, for editors, type checkers, and introspection of the
signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

from chunkrt.backends.base import AttentionMath
from chunkrt.backends.qnn.htp_options import HtpOptions
from chunkrt.engine.options import DECLARED, AttentionOn, EngineOptions, KeptWeights, OnNpuFailure, Outputs
from chunkrt.graph.placement import Placement
from chunkrt.runtime.executor import DecodeOn
from chunkrt.runtime.state_tensors import CacheDtype

Function = TypeVar("Function", bound=Callable[..., Any])


class LoadOptions(TypedDict, total=False):
    """Keyword arguments of `load`, which `EngineOptions` describes."""

    npu: str
    scheme: str | None
    calibration: Path | None
    shadow: str | None
    budget: float | None
    outputs: Outputs | None
    equalisation: float | Literal["off"] | None
    rotation: bool
    ops: tuple[str, ...] | str | None
    chunk_length: int | None
    policy: str
    batcher: str
    decode_on: DecodeOn
    cache_memory: int | None
    prefix_cache: str | Path | None
    prefix_cache_memory: int | None
    prefix_cache_disk: int | None
    queue: int
    chunks_in_flight: int | None
    threads: int | None
    affinity: str
    context_length: int | None
    placement: Path | Placement | None
    npu_strict: bool
    attention: AttentionOn
    attention_math: AttentionMath
    npu_window: str | int
    npu_graph: str
    weights: KeptWeights
    soc: str | None
    on_npu_failure: OnNpuFailure | None
    htp: HtpOptions
    context_shift: bool
    context_keep: int
    cache_dtype: CacheDtype | None


def shows_options(function: Function) -> Function:
    """Show the fields behind a function's `**options` in `help` and in the completion of notebooks."""
    signature = inspect.signature(function)
    fields = EngineOptions.__dataclass_fields__
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=fields[name].type)
        for name, (_, default, _) in DECLARED.items()
    ]
    named = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
    return function
