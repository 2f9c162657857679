"""Quantisation schemes, as data: how weights and activations of linears are stored and computed.

Linears are the MatMul nodes whose right operand is a weight. Everything else stays in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from chunkrt.errors import unknown_name


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One named way to quantise the linears.

    `weight_bits` 8: symmetric int8 per output channel, w ~ q * scale with q in [-127, 127]. None: float32.
    `activations` "dynamic": int8 per row (token), scale = max|x| / 127 measured as the row passes. None: float32.
    `two_digits`: patterns of the weights whose linears take their activations in two int8 rows, x ~ q1 * s1 + q2 * s2,
    where the second quantises what the first leaves. For the few linears that 8 bits hurt most.
    """

    name: str
    weight_bits: Literal[8] | None
    activations: Literal["dynamic"] | None
    two_digits: tuple[str, ...] = ()

    def num_digits(self, weight: str) -> int:
        """How many int8 rows the activations of a linear take, by its weight's name: 1 or 2."""
        return 2 if any(fnmatchcase(weight, pattern) for pattern in self.two_digits) else 1


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme(name="float", weight_bits=None, activations=None),
        Scheme(
            name="w8a8-dynamic",
            weight_bits=8,
            activations="dynamic",
            # down_proj's inputs have single channels thousands of times the median, errors in q and k are magnified
            # by the softmax, and the head decides the token; docs/architecture.md has the figures.
            two_digits=("*.down_proj.weight", "*.qkv_proj.weight", "lm_head.weight"),
        ),
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
