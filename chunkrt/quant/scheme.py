"""Quantisation schemes, as data: how weights and activations of linears are stored and computed.

Linears are the MatMul nodes whose right operand is a weight. Their products are sums of integers, exact on every
backend. What lies between them stays in float32, and in float16 on an NPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import msgspec

from chunkrt.errors import ConfigError, unknown_name
from chunkrt.files import check_keys

BLOCK_LENGTH = 32
"""Depth of a block of 4-bit weights that share a multiplier."""

LEVELS = {8: 127, 16: 127 * 257}
"""Steps of an activation grid on each side of zero. 127 * 257 = 32639 is the largest number of two int8 digits to the
base 256; a 16-bit integer product can therefore be had from two of 8 bits."""


Storage = Literal["float32", "int8", "int4", "blocks"]
"""How a linear's weight is stored: as it is; as integers for each output channel, of 8 bits, or of 4 beside the
multipliers of their blocks; in a checkpoint's blocks of 4 bits."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One named way to quantise the linears. Patterns match the names of their weights.

    weight_bits: 8, symmetric int8 per output channel, w ~ q * scale with q in [-127, 127]. 4, blocks of BLOCK_LENGTH
        along the depth: w ~ q * multiplier * scale, q in [-7, 7], a whole multiplier of 1 to 16 for each block and a
        scale for each output channel; CPUs multiply by q * multiplier, which fits int8. None: float32. With dynamic
        activations 4 means a checkpoint's own blocks (GGUF's Q4_0 and Q4_1), kept as they are: w = q * scale + minimum,
        q in [0, 15], a scale and a minimum for each 32 weights of an output channel. Weights that were never quantised
        are brought into such blocks.
    activations: "dynamic", a scale for each row (token), max|x| / 127, measured as the row passes, once its few
        outliers are taken out, which are multiplied in float32 (`quant/outliers.py`); "static", one grid for a linear's
        input and one for its output, calibrated beforehand; None, float32.
    activation_bits: of the linears that `wide` does not name.
    wide: static only: the linears that 8 bits hurt most; their activations take 16 bits.
    column_grids: static only: linears whose every output column has a grid of its own.
    float_outputs: static only: linears whose output stays float32. An NPU has none: there, outputs have as many bits as
        inputs.
    shadowed: static only: linears whose 8-bit input grid holds most values, but not the few largest; what these exceed
        it by is multiplied in float beside, by a `chunkrt::ShadowLinear` on the CPU.
    weights_of_8_bits: linears that keep 8-bit weights where others have 4. With dynamic activations that is up to the
        checkpoint as well: what an engine is compiled under names them all (`engine_directory/weights.py`).
    equalisation: static only: how much of the unevenness between the channels of an input is moved into the weights
        beforehand, 0 to 1; None: nothing is. See `quant/folding.py`.
    is_rotated: whether the residual stream is rotated beforehand, so that no channel stands out.
    """

    name: str
    weight_bits: Literal[4, 8] | None
    activations: Literal["dynamic", "static"] | None
    activation_bits: Literal[8, 16] = 8
    wide: tuple[str, ...] = ()
    column_grids: tuple[str, ...] = ()
    float_outputs: tuple[str, ...] = ()
    shadowed: tuple[str, ...] = ()
    weights_of_8_bits: tuple[str, ...] = ()
    equalisation: float | None = None
    is_rotated: bool = False

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Scheme:
        """Read what `dataclasses.asdict` gave, by way of JSON. Raises ValueError for anything else."""
        scheme = msgspec.convert(data, Scheme)
        check_keys(data, Scheme)
        equalisation = scheme.equalisation
        is_sound = (scheme.weight_bits is None) == (scheme.activations is None)
        if not is_sound or not (equalisation is None or 0 <= equalisation <= 1):
            raise ValueError(f"there is no such scheme: {scheme}")
        return scheme

    @property
    def is_static(self) -> bool:
        """Whether activations have calibrated grids."""
        return self.activations == "static"

    def activation_bits_of(self, weight: str) -> Literal[8, 16]:
        """Bits of a linear's activations, by its weight's name."""
        return 16 if _matches(weight, self.wide) else self.activation_bits

    def num_digits(self, weight: str) -> int:
        """How many int8 digits the activations of a linear take: 1, or on a grid of 16 bits 2."""
        return self.activation_bits_of(weight) // 8

    def weight_bits_of(self, weight: str) -> Literal[4, 8] | None:
        """Bits of one linear's weight."""
        return 8 if self.weight_bits == 4 and _matches(weight, self.weights_of_8_bits) else self.weight_bits

    def storage_of(self, weight: str) -> Storage:
        """How a linear's weight is stored."""
        bits = self.weight_bits_of(weight)
        if bits == 4:
            return "blocks" if self.activations == "dynamic" else "int4"
        return "int8" if bits == 8 else "float32"

    def has_blocks(self, weight: str) -> bool:
        """Whether a linear's weight is stored in blocks of 4 bits, each with a scale and a minimum."""
        return self.storage_of(weight) == "blocks"

    def has_column_grids(self, weight: str) -> bool:
        """Whether the columns of a linear's output have grids of their own."""
        return _matches(weight, self.column_grids) and not self.has_float_output(weight)

    def has_float_output(self, weight: str) -> bool:
        """Whether a linear's output stays float32, on no grid."""
        return not self.is_static or _matches(weight, self.float_outputs)

    def is_shadowed(self, weight: str) -> bool:
        """Whether what a linear's input exceeds its grid by is multiplied in float beside."""
        return self.is_static and self.activation_bits_of(weight) == 8 and _matches(weight, self.shadowed)


def _matches(weight: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(weight, pattern) for pattern in patterns)


DOWN_PROJ, HEAD = "*.down_proj.weight", "lm_head.weight"

DEFAULT_EQUALISATION = 0.75
"""For inputs that norms make; others get 0.5 (`quant/equalisation.py`), the head none. On SmolLM2-135M it halves what
qkv and gate_up lose in 8 bits beside 0.5, SmoothQuant's choice, and costs their weights nothing that can be seen."""

SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme(name="float", weight_bits=None, activations=None),
        Scheme(name="w8a8-dynamic", weight_bits=8, activations="dynamic"),
        Scheme(name="w4a8-dynamic", weight_bits=4, activations="dynamic", weights_of_8_bits=(HEAD,)),
        # down_proj writes the massive values of the residual stream: they sit in a few columns, and one grid for all
        # would be theirs.
        Scheme(name="w8a16", weight_bits=8, activations="static", activation_bits=16, column_grids=(DOWN_PROJ,)),
        Scheme(
            name="w8a8",
            weight_bits=8,
            activations="static",
            wide=(HEAD,),
            column_grids=("*",),
            equalisation=DEFAULT_EQUALISATION,
        ),
        Scheme(
            name="w4a16",
            weight_bits=4,
            activations="static",
            activation_bits=16,
            column_grids=(DOWN_PROJ,),
            weights_of_8_bits=(HEAD,),
        ),
    )
}

MIXED = "mixed"
"""Starts from w8a8 and is searched for: which linears take 16 bits, which of these 4-bit weights, and which others have
shadows."""

SCHEME_NAMES = (*SCHEMES, MIXED)

DEFAULT_SCHEME = "w8a8-dynamic"
DEFAULT_NPU_SCHEME = "w8a16"
"""Of an NPU that has no linears under the other."""

STATIC_SCHEMES = tuple(name for name, scheme in SCHEMES.items() if scheme.is_static)
"""The names of those that need a calibration; an NPU runs no others."""


def find_scheme(name: str) -> Scheme:
    """Look a scheme up by name.

    Raises:
        ConfigError: there is none of that name; the message offers the nearest and lists all.
    """
    if name == MIXED:
        return replace(SCHEMES["w8a8"], name=MIXED)
    if name in SCHEMES:
        return SCHEMES[name]
    raise unknown_name("scheme", name, SCHEME_NAMES)


def check_scheme_of_ranks(scheme: Scheme, ranks: int) -> None:
    """Raise ConfigError for a static scheme on several ranks."""
    if scheme.is_static and ranks > 1:
        raise ConfigError(
            f"the scheme {scheme.name!r} is static, but {ranks} ranks add partial sums, which have no grid; use a "
            "dynamic scheme or 'float'"
        )


Search = Literal["shadow", "mixed"]

DEFAULT_BUDGETS: Mapping[Search, float] = {"shadow": 0.015, "mixed": 0.01}
"""Nats of mean KL divergence from the float model. 8-bit weights alone cost SmolLM2-135M 0.003 to 0.005."""


CHOICE_FORMAT = 2
"""Of what searches choose; raised when they would choose otherwise."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a checkpoint is compiled under: a scheme, or where to start searching for one.

    search: "shadow": the fewest shadows; "mixed": the most 8-bit linears; each with a mean KL divergence of at most
        `budget` nats on the calibration text; without a search it is None. See `chunkrt/compile/search.py`.
    """

    scheme: Scheme
    search: Search | None = None
    budget: float | None = None
