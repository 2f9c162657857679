"""Quantisation schemes, as data: how weights and activations of linears are stored and computed.

Linears are the MatMul nodes whose right operand is a weight. Everything else stays in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from chunkrt.errors import unknown_name


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One named way to quantise the linears.

    `weight_bits` 8: symmetric int8 per output channel, w ~ q * scale with q in [-127, 127]. None: float32.
    `activations` "dynamic": int8 per row (token), scale = max|x| / 127 measured as the row passes. None: float32.
    """

    name: str
    weight_bits: Literal[8] | None
    activations: Literal["dynamic"] | None


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme(name="float", weight_bits=None, activations=None),
        Scheme(name="w8a8-dynamic", weight_bits=8, activations="dynamic"),
    )
}


def find_scheme(name: str) -> Scheme:
    """Look a scheme up by name.

    Raises:
        ConfigError: there is none of that name; the message offers the nearest and lists all.
    """
    if name in SCHEMES:
        return SCHEMES[name]
    raise unknown_name("scheme", name, SCHEMES)
