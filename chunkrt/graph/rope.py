"""Rotary position embedding: inverse frequencies under every scaling rule, and the tables made from them.

Source: Su et al., RoFormer (2021), section 3.2.2; Llama 3's scaling as in Hugging Face's `rope_type` "llama3".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.errors import ModelError, UnsupportedModelError
from chunkrt.graph.modules import Module, Parameter

Float64 = NDArray[np.float64]


class RotaryTables(Module):
    """cos and sin [context_length, rotary_dim / 2], one pair for all layers.

    A GGUF may divide the inverse frequencies by a tensor of its own (`rope_freqs.weight`); `divisor` names it.
    `long_context_from`: set by a family whose tables are two, one behind the other; see `ops.cached_attention`.
    """

    long_context_from: int | None = None

    def __init__(self, inverse_frequencies: Float64, context_length: int, *, divisor: str | None = None) -> None:
        super().__init__()
        self._frequencies = inverse_frequencies
        self._context_length = context_length
        self._divisor = divisor

    def declare(self) -> None:
        self.cos, self.sin = self._table(np.cos), self._table(np.sin)

    def _table(self, function: Callable[[Float64], Float64]) -> Parameter:
        half = len(self._frequencies)

        def build(*divisor: NDArray[np.float32]) -> NDArray[np.float32]:
            frequencies = self._frequencies / divisor[0] if divisor else self._frequencies
            positions = np.arange(self._context_length, dtype=np.float64)
            return function(np.outer(positions, frequencies)).astype(np.float32)

        tensors: dict[str, tuple[int, ...]] = {self._divisor: (half,)} if self._divisor else {}
        return Parameter(shape=(self._context_length, half), checkpoint_tensors=tensors, combine=build)


def inverse_frequencies(config: Mapping[str, Any], head_dim: int) -> Float64:
    """theta^(-2i/d) for i in 0..d/2, scaled by the config's rule; float64 [rotary_dim / 2].

    Reads Hugging Face's `rope_theta`, `partial_rotary_factor` and `rope_scaling`, or the newer `rope_parameters`
    that holds all of them.

    Raises:
        UnsupportedModelError: a scaling rule that is not implemented.
        ModelError: a rule without one of its numbers, or a number that makes no sense.
    """
    parameters = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    parameters |= {key: config[key] for key in parameters if config.get(key) is not None}
    for key in ("rope_parameters", "rope_scaling"):
        section = config.get(key) or {}
        if not isinstance(section, Mapping):
            raise ModelError(f"the config's {key} is {section!r}, expected a table of numbers")
        parameters |= section
    theta = _positive(parameters, "rope_theta")
    rotary_dim = round(head_dim * _positive(parameters, "partial_rotary_factor"))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ModelError(f"RoPE is to rotate {rotary_dim} of {head_dim} dimensions, expected an even number of them")
    base = theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    rule = parameters.get("rope_type", parameters.get("type", "default"))
    try:
        if rule in ("default", None):
            return base
        if rule == "linear":
            return base / _positive(parameters, "factor")
        if rule == "llama3":
            return _llama3(base, parameters)
    except KeyError as error:
        raise ModelError(f"rope scaling {rule!r} needs {error}, which the config does not give") from error
    raise UnsupportedModelError(f"rope scaling {rule!r} is not supported; there are: default, linear, llama3")


def _llama3(base: Float64, parameters: Mapping[str, Any]) -> Float64:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    factor = _positive(parameters, "factor")
    low, high = _positive(parameters, "low_freq_factor"), _positive(parameters, "high_freq_factor")
    if low >= high:
        raise ModelError(f"rope scaling has low_freq_factor {low}, expected less than high_freq_factor {high}")
    original = _positive(parameters, "original_max_position_embeddings")
    wavelength = 2 * np.pi / base
    blend = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return (1 - blend) * base / factor + blend * base


def _positive(parameters: Mapping[str, Any], key: str) -> float:
    value = parameters[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        raise ModelError(f"the config's {key} of RoPE is {value!r}, expected a positive number")
    return float(value)
