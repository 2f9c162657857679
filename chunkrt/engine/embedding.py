"""Embeddings: the vector of a text, which is computed from the hidden states before the LM head."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from chunkrt.errors import ConfigError, ModelError
from chunkrt.quant.scheme import Scheme

Float32 = NDArray[np.float32]
Pooling = Literal["last", "mean"]
"""Selection of hidden states: that of the last token, which depends on all other tokens, or the mean of all."""


def check_hidden(scheme: Scheme) -> None:
    """Raise ConfigError if a scheme changes the hidden states of the model."""
    if scheme.is_rotated:
        raise ConfigError(
            f"the scheme {scheme.name!r} rotates the residual stream, so its hidden states are not the model's; "
            "choose another `scheme`"
        )


def pooled(hidden: Float32, pooling: Pooling) -> Float32:
    """Return the embedding of a text, float32 [H], of length 1.

    Args:
        hidden: float32 [T, H], the hidden states of the text's tokens.
        pooling: "last" or "mean".

    Raises:
        ModelError: the hidden states are not finite, or cancel each other out.
    """
    row = hidden[-1].astype(np.float64) if pooling == "last" else hidden.mean(axis=0, dtype=np.float64)
    length = np.linalg.norm(row)
    if not np.isfinite(length) or not length:
        raise ModelError("the model's hidden states are zero or not finite; check the checkpoint for damage")
    unit: Float32 = (row / length).astype(np.float32)
    return unit
