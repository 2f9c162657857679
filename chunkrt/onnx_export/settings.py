"""What an export is asked for, and what of it cannot be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from chunkrt.errors import ConfigError
from chunkrt.onnx_export.emitter import FLOAT, FLOAT16, IR_VERSIONS

DTYPES = {"fp16": FLOAT16, "fp32": FLOAT}
OPSETS = tuple(IR_VERSIONS)
DEFAULT_OPSET = 18
LONGEST_DEFAULT_CONTEXT = 2048
"""Slots of a cache, where neither the model's context is shorter nor another number is asked for."""

Keys = Literal["pre-rope", "post-rope"]


@dataclass(frozen=True, kw_only=True)
class WindowSettings:
    """A fixed window: W rows a run, attention over the last T slots of caches of M.

    window: W. sequence: T. context: M. dtype: of linears, caches and logits, "fp16" or "fp32". keys: whether they are
    cached before RoPE, so that their place in the cache is their position, or after it.

    Raises:
        ConfigError: not 1 <= W <= T <= M, or a type, an opset or keys that do not exist.
    """

    window: int
    sequence: int
    context: int
    dtype: str = "fp16"
    opset: int = DEFAULT_OPSET
    keys: Keys = "pre-rope"

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ConfigError(f"--window is {self.window}, expected at least 1")
        if self.window > self.sequence:
            raise ConfigError(
                f"--window is {self.window} and --sequence {self.sequence}; a window's rows are a part of the sequence"
            )
        if self.sequence > self.context:
            raise ConfigError(
                f"--sequence is {self.sequence} and --context {self.context}; the caches cannot hold the sequence"
            )
        check_types(self.dtype, self.opset)
        if self.keys not in ("pre-rope", "post-rope"):
            raise ConfigError(f"--keys is {self.keys!r}, expected pre-rope or post-rope")

    @property
    def tensor_type(self) -> ir.DataType:
        """ONNX's name of the type."""
        return DTYPES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class DynamicSettings:
    """Any number of rows and of positions, as ONNX Runtime GenAI wants it; keys are cached after RoPE.

    context: positions that it is used for at most; where a decoder has rotary tables for short and for long contexts, it
    chooses.
    """

    context: int
    dtype: str = "fp32"
    opset: int = DEFAULT_OPSET

    def __post_init__(self) -> None:
        check_types(self.dtype, self.opset)

    @property
    def tensor_type(self) -> ir.DataType:
        """ONNX's name of the type."""
        return DTYPES[self.dtype]


def check_types(dtype: str, opset: int) -> None:
    """Raises ConfigError for a type or an opset that is not there."""
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype is {dtype!r}, expected {' or '.join(DTYPES)}")
    if opset not in OPSETS:
        raise ConfigError(f"--opset is {opset}, expected one of {', '.join(map(str, OPSETS))}")
