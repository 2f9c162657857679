"""Settings of an export, validated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import onnx_ir as ir

from chunkrt.errors import ConfigError
from chunkrt.onnx.exporting.emitter import FLOAT, FLOAT16, IR_VERSIONS, Weights

DTYPES = {"fp16": FLOAT16, "fp32": FLOAT}
OPSETS = tuple(IR_VERSIONS)
DEFAULT_OPSET = 18

Keys = Literal["pre-rope", "post-rope"]
Logits = Literal["all", "last"]

MOST_SEQUENCES = 2**16
"""Maximum number of sequences that an export runs at once. Sizes of ONNX have 64 bits, and constants grow with them."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of every form of export: the type of linears, states and logits ("fp16" or "fp32"), the opset,
    and the storage of linears' weights ("float", "int8" or "int4").

    Raises:
        ConfigError: the type or the opset is unknown, or a subclass refuses one of its values.
    """

    dtype: str = "fp16"
    opset: int = DEFAULT_OPSET
    weights: Weights = "float"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype is {self.dtype!r}, expected {' or '.join(DTYPES)}")
        if self.opset not in OPSETS:
            raise ConfigError(f"--opset is {self.opset}, expected one of {', '.join(map(str, OPSETS))}")
        if self.weights not in get_args(Weights):
            raise ConfigError(f"--weights is {self.weights!r}, expected one of {', '.join(get_args(Weights))}")

    @property
    def tensor_type(self) -> ir.DataType:
        """Name of the data type in ONNX."""
        return DTYPES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class SubgraphSettings(Settings):
    """Settings for static subgraphs of `window` rows, at least 1."""

    window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            raise ConfigError(f"--window is {self.window}, expected at least 1")


@dataclass(frozen=True, kw_only=True)
class WindowSettings(SubgraphSettings):
    """Settings for a fixed window: W rows per run, attention over the last T slots of caches of M; 1 <= W <= T <= M.

    Attributes:
        window: W.
        sequence: T.
        context: M.
        keys: "pre-rope" if keys are cached before RoPE, so that the slot in the cache determines the position;
            "post-rope" if they are cached after RoPE.
        logits: "all" for logits of all W rows, "last" for those of the last row only.
        batch: number of sequences, each with its own mask, positions and state.
        sinks: number of the first tokens that stay in the caches while later ones slide.
        cache: whether the model has caches and states as inputs and outputs; without them W = T = M.
    """

    sequence: int
    context: int
    keys: Keys = "pre-rope"
    logits: Logits = "all"
    batch: int = 1
    sinks: int = 0
    cache: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window > self.sequence:
            raise ConfigError(
                f"--window is {self.window} and --sequence {self.sequence}; the window cannot be longer than the "
                "sequence"
            )
        if self.sequence > self.context:
            raise ConfigError(
                f"--sequence is {self.sequence} and --context {self.context}; the caches cannot hold the sequence"
            )
        if self.keys not in get_args(Keys):
            raise ConfigError(f"--keys is {self.keys!r}, expected {' or '.join(get_args(Keys))}")
        if self.logits not in get_args(Logits):
            raise ConfigError(f"--logits is {self.logits!r}, expected {' or '.join(get_args(Logits))}")
        if not 1 <= self.batch <= MOST_SEQUENCES:
            raise ConfigError(f"--batch is {self.batch}, expected 1 to {MOST_SEQUENCES}")
        self._check_sinks()
        if not self.cache and not self.window == self.sequence == self.context:
            raise ConfigError(
                f"--no-cache runs whole sequences; window {self.window}, sequence {self.sequence} and context "
                f"{self.context} are not the same"
            )

    def _check_sinks(self) -> None:
        """Raise ConfigError if the sinks do not fit the other settings."""
        if self.sinks < 0:
            raise ConfigError(f"--sinks is {self.sinks}, expected at least 0")
        if not self.sinks:
            return
        if not self.cache:
            raise ConfigError("--sinks keeps tokens in caches; omit --sinks or --no-cache")
        if self.keys != "pre-rope":
            raise ConfigError("--sinks needs keys before RoPE; omit --keys")
        if self.batch > 1:
            raise ConfigError("--sinks takes one sequence; omit --sinks or --batch")
        if self.sequence != self.context:
            raise ConfigError(
                f"--sequence is {self.sequence} and --context {self.context}; --sinks needs them to be equal"
            )
        if self.sinks + self.window > self.context:
            raise ConfigError(
                f"--sinks is {self.sinks} and --window {self.window}, more than the {self.context} slots of the caches"
            )


@dataclass(frozen=True, kw_only=True)
class DynamicSettings(Settings):
    """Settings for any number of rows and positions, for ONNX Runtime GenAI; keys are cached after RoPE.

    context: the largest number of positions; if a decoder has rotary tables for short and for long contexts, this
    number selects the table.
    """

    context: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.context < 1:
            raise ConfigError(f"--context is {self.context}, expected at least 1")
