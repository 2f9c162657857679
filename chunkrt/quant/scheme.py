"""Quantisation schemes, as data: the storage of linears' weights and the arithmetic of their products.

Linears are the MatMul nodes whose right operand is a weight. Their products are sums of integers, which are exact on
every backend. Values between linears are float32, or float16 on an NPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import msgspec

from chunkrt.errors import unknown_name
from chunkrt.files import check_keys

BLOCK_LENGTH = 32
"""Depth of a block of 4-bit weights that share a multiplier."""

LEVELS = {8: 127, 16: 127 * 257}
"""Steps of an activation grid on each side of zero. 127 * 257 = 32639 is the largest number of two int8 digits to the
base 256; a 16-bit integer product can therefore be computed from two 8-bit products."""


Rounding = Literal["nearest", "gptq"]
"""Rounding of weights to 4 bits: each to the nearest value, or with compensation (`quant/compensated.py`)."""

Storage = Literal["float32", "int8", "int4", "blocks"]
"""Storage of a linear's weight: unchanged; as integers for each output channel, of 8 bits, or of 4 with the multipliers
of their blocks; in a checkpoint's blocks of 4 bits."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One named way to quantise the linears. Patterns match the names of their weights.

    weight_bits: 8, symmetric int8 per output channel, w ~ q * scale with q in [-127, 127]. 4, blocks of BLOCK_LENGTH
        along the depth: w ~ q * multiplier * scale, q in [-8, 7], a whole multiplier of 1 to 16 for each block and a
        scale for each output channel; CPUs multiply by q * multiplier, which fits int8. None: float32. With dynamic
        activations 4 means a checkpoint's own blocks (GGUF's Q4_0 and Q4_1), kept unchanged: w = q * scale + minimum, q
        in [0, 15], a scale and a minimum for each 32 weights of an output channel. Weights that were never quantised
        are converted to such blocks.
    activations: "dynamic", a scale for each row (token), max|x| / 127, measured at run time after the row's few
        outliers are removed, which are multiplied in float32 (`quant/arithmetic.py`); "static", one grid for a linear's
        input and one for its output, calibrated beforehand; None, float32.
    activation_bits: bits of the activations of linears that `wide` does not name.
    wide: static only: linears whose activations take 16 bits, because they lose most accuracy in 8 bits.
    column_grids: static only: linears with a separate grid for every output column.
    float_outputs: static only: linears whose output stays float32. Not supported on an NPU, where outputs have as many
        bits as inputs.
    shadowed: static only: linears whose 8-bit input grid holds all but the few largest values; a
        `chunkrt::ShadowLinear` on the CPU multiplies the part that exceeds the grid in float.
    weights_of_8_bits: linears that keep 8-bit weights when other linears have 4-bit weights. With dynamic activations
        this also depends on the checkpoint: the scheme of a compiled engine names them all
        (`engine_directory/weights.py`).
    equalisation: static only: fraction of the unevenness between the channels of an input that is moved into the
        weights beforehand, 0 to 1; None: off. See `quant/folding.py`.
    is_rotated: whether the residual stream is rotated beforehand, so that no channel is much larger than others.
    rounding: rounding of weights to 4 bits, except for those that a checkpoint stores in blocks of 4 bits.
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
    rounding: Rounding = "nearest"

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Scheme:
        """Return the scheme from the result of `dataclasses.asdict` after JSON. Raises ValueError for other data."""
        scheme = msgspec.convert(data, Scheme)
        check_keys(data, Scheme)
        equalisation = scheme.equalisation
        is_sound = (scheme.weight_bits is None) == (scheme.activations is None)
        if not is_sound or not (equalisation is None or 0 <= equalisation <= 1):
            raise ValueError(f"this is not a valid scheme: {scheme}")
        return scheme

    @property
    def is_static(self) -> bool:
        """True if activations have calibrated grids."""
        return self.activations == "static"

    def activation_bits_of(self, weight: str) -> Literal[8, 16]:
        """Return the bits of a linear's activations, by its weight's name."""
        return 16 if _matches(weight, self.wide) else self.activation_bits

    def num_digits(self, weight: str) -> int:
        """Return the number of int8 digits of a linear's activations: 1, or on a 16-bit grid 2."""
        return self.activation_bits_of(weight) // 8

    def weight_bits_of(self, weight: str) -> Literal[4, 8] | None:
        """Return the bits of one linear's weight."""
        return 8 if self.weight_bits == 4 and _matches(weight, self.weights_of_8_bits) else self.weight_bits

    def storage_of(self, weight: str) -> Storage:
        """Return the storage of a linear's weight."""
        bits = self.weight_bits_of(weight)
        if bits == 4:
            return "blocks" if self.activations == "dynamic" else "int4"
        return "int8" if bits == 8 else "float32"

    def has_blocks(self, weight: str) -> bool:
        """Return whether a linear's weight is stored in blocks of 4 bits, each with a scale and a minimum."""
        return self.storage_of(weight) == "blocks"

    def has_column_grids(self, weight: str) -> bool:
        """Return whether every column of a linear's output has a separate grid."""
        return _matches(weight, self.column_grids) and not self.has_float_output(weight)

    def has_float_output(self, weight: str) -> bool:
        """Return whether a linear's output stays float32, without a grid."""
        return not self.is_static or _matches(weight, self.float_outputs)

    def is_shadowed(self, weight: str) -> bool:
        """Return whether a linear has a shadow, which multiplies the part of its input that exceeds the grid in
        float."""
        return self.is_static and self.activation_bits_of(weight) == 8 and _matches(weight, self.shadowed)


def _matches(weight: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(weight, pattern) for pattern in patterns)


DOWN_PROJ, HEAD = "*.down_proj.weight", "lm_head.weight"

DEFAULT_EQUALISATION = 0.75
"""Alpha of equalisation for inputs that norms make. Other inputs get 0.5 (`quant/equalisation.py`), and the LM head's
none. On SmolLM2-135M this value halves the 8-bit loss of qkv and gate_up compared with 0.5, SmoothQuant's choice, at no
measurable cost in their weights.
"""

SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme(name="float", weight_bits=None, activations=None),
        Scheme(name="w8a8-dynamic", weight_bits=8, activations="dynamic"),
        Scheme(name="w4a8-dynamic", weight_bits=4, activations="dynamic", weights_of_8_bits=(HEAD,), rounding="gptq"),
        # down_proj writes the massive values of the residual stream into a few columns; one grid for all columns would
        # have to cover them.
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
            is_rotated=True,
            rounding="gptq",
        ),
    )
}

MIXED = "mixed"
"""Starting point of the search, as w8a8. The search decides which linears take 16 bits, which of these take 4-bit
weights, and which other linears have shadows.
"""

SCHEME_NAMES = (*SCHEMES, MIXED)

DEFAULT_SCHEME = "w8a8-dynamic"
DEFAULT_NPU_SCHEME = "w8a16"
"""Default scheme on an NPU that does not support the other default."""

STATIC_SCHEMES = tuple(name for name, scheme in SCHEMES.items() if scheme.is_static)
"""Names of the schemes that need a calibration. An NPU runs only these schemes."""


def find_scheme(name: str) -> Scheme:
    """Find a scheme by name.

    Raises:
        ConfigError: no scheme has that name; the message suggests the nearest name and lists all names.
    """
    if name == MIXED:
        return replace(SCHEMES["w8a8"], name=MIXED)
    if name in SCHEMES:
        return SCHEMES[name]
    raise unknown_name("scheme", name, SCHEME_NAMES)


Search = Literal["shadow", "mixed"]

DEFAULT_BUDGETS: Mapping[Search, float] = {"shadow": 0.015, "mixed": 0.01}
"""Default budget in nats of mean KL divergence from the float model. 8-bit weights alone cost SmolLM2-135M 0.003 to
0.005."""


CHOICE_FORMAT = 3
"""Version of the searches' decisions, raised when a search would return different results."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The scheme of a compilation, or the starting point of a search for one.

    has_to_rotate: True if the rotation of the scheme was chosen by the user. Otherwise a decoder that cannot be rotated
        is compiled without rotation.
    search: "shadow" for the fewest shadows, or "mixed" for the most 8-bit linears, with a mean KL divergence of at most
    `budget` nats on the calibration text; None without a search. See `chunkrt/compile/scheme_search.py`.
    """

    scheme: Scheme
    has_to_rotate: bool = False
    search: Search | None = None
    budget: float | None = None
