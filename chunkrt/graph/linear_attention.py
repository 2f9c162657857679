"""The kinds of linear attention: what sets one `attn_type` of `chunkrt::LinearAttention` apart.

All share one operator: a causal convolution over each channel, whose last inputs are state, and for some a recurrence
whose matrix a head is state too. A new kind is a row here, an expansion into standard ONNX, and what it computes on
each backend that shall run it; nothing of the shared code knows its name.
"""

from __future__ import annotations

from dataclasses import dataclass

from chunkrt.errors import ConfigError, UnsupportedModelError


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One kind.

    `columns_per_channel`: how many columns of the operator's input a channel of the convolution takes (3 where it is
    multiplied by a gate before and after). `activation`: applied to the convolution's output, "" or "silu".
    `is_recurrent`: whether there is a state matrix a head.
    """

    columns_per_channel: int
    activation: str
    is_recurrent: bool


_variants = {
    "short_conv": Variant(columns_per_channel=3, activation="", is_recurrent=False),
    "gated_delta_rule": Variant(columns_per_channel=1, activation="silu", is_recurrent=True),
}


def register_variant(attn_type: str, variant: Variant) -> None:
    """Add a kind. Raises ConfigError if there is one of that name."""
    if attn_type in _variants:
        raise ConfigError(f"the attn_type {attn_type!r} is registered already")
    _variants[attn_type] = variant


def find_variant(attn_type: str) -> Variant:
    """The kind of that name. Raises UnsupportedModelError if there is none."""
    if attn_type not in _variants:
        raise UnsupportedModelError(f"attn_type {attn_type!r} is not known; there are: {', '.join(sorted(_variants))}")
    return _variants[attn_type]
