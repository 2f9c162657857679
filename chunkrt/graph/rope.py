"""Rotary position embedding: inverse frequencies under every scaling rule, and the tables made from them.

Source: Su et al., RoFormer (2021), section 3.2.2; Llama 3's scaling as in Hugging Face's `rope_type` "llama3".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Context, Decimal, localcontext
from math import ceil, floor, inf, log, pi, sqrt
from sys import float_info
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from chunkrt.checkpoints.source import TensorSource
from chunkrt.errors import ModelError, UnsupportedModelError
from chunkrt.graph.modules import Float32, Module, Parameter
from chunkrt.graph.ops import ROTARY_KEY, DualChunks
from chunkrt.graph.plan import Rotary
from chunkrt.graph.rotary_tables import Float64, rotary_table

LEAST_DIVISOR = 1e-6
"""Smallest accepted factor of frequencies. Smaller factors are not used in training, and may cause overflows."""

LARGEST_FLOAT = float_info.max
"""Largest float. A whole number of a config may exceed it: such a number is finite but cannot be converted to float."""

LONGEST_CONTEXT = 2**24
"""Largest accepted context, in tokens."""

_UNSCALED = ("partial_rotary_factor", "attention_factor")
"""Factors that scale no frequency."""

SCALING_KEY = "rope_scaling"
"""Key that error messages name, although newer configs store it in `rope_parameters`."""


@dataclass(kw_only=True)
class RotaryTable(Parameter):
    """A table of cos or sin. `make_recipe` makes its recipe (`graph/rotary_tables.py`) from the checkpoint's
    tensors."""

    function: Rotary
    make_recipe: Callable[..., Float64]
    combine: Callable[..., Float32] = field(init=False)

    def __post_init__(self) -> None:
        self.combine = lambda *tensors: self._rows(self.make_recipe(*tensors), self.shape[0])

    def recipe(self, source: TensorSource) -> Float64:
        """Return the recipe of the table: float64 [tables, 1 + rotary_dim / 2]. Raises ModelError as `load` does."""
        self.check(source)
        return self.make_recipe(*(source.read(name) for name in self.checkpoint_tensors))

    def load_rows(self, source: TensorSource, num_rows: int) -> Float32:
        """Return the first rows of the table. Raises ModelError as `load` does."""
        return self._rows(self.recipe(source), min(num_rows, self.shape[0]))

    def value(self) -> ir.Value:
        """Return the table in the graph that is being traced, marked as one that chunkrt makes."""
        value = super().value()
        value.metadata_props[ROTARY_KEY] = self.function
        return value

    def _rows(self, recipe: Float64, num_rows: int) -> Float32:
        num_positions = self.shape[0] // len(recipe)
        return rotary_table(self.function, recipe, num_positions=num_positions, num_rows=num_rows)


class RotaryTables(Module):
    """Tables cos and sin [context_length, rotary_dim / 2], a pair that several layers share.

    Attributes:
        dual_chunks: sizes of dual chunk attention, which needs tables of `limit` + 1 rows at most; None without it.

    Args:
        divisor: a tensor that a GGUF divides the inverse frequencies by (`rope_freqs.weight`).
        magnitude: factor of cos and sin.
        long_frequencies, long_context_from: a second table follows the first, for contexts of more tokens than this;
            see `ops.cached_attention`.
    """

    def __init__(
        self,
        inverse_frequencies: Float64,
        context_length: int,
        *,
        divisor: str | None = None,
        magnitude: float = 1.0,
        long_frequencies: Float64 | None = None,
        long_context_from: int | None = None,
        dual_chunks: DualChunks | None = None,
    ) -> None:
        super().__init__()
        self.long_context_from, self.dual_chunks = long_context_from, dual_chunks
        self._frequencies = [inverse_frequencies] + ([] if long_frequencies is None else [long_frequencies])
        self.magnitude = magnitude
        self._num_positions = context_length if dual_chunks is None else min(context_length, dual_chunks.limit + 1)
        self._divisor = divisor

    @property
    def rotary_dim(self) -> int:
        """Number of rotated columns of each head."""
        return 2 * len(self._frequencies[0])

    @property
    def rotates(self) -> bool:
        """False if all angles are 0, in tables of layers without RoPE."""
        return any(frequencies.any() for frequencies in self._frequencies)

    def declare(self) -> None:
        self.cos, self.sin = self._table("cos"), self._table("sin")

    def frequencies(self, source: TensorSource) -> list[Float64]:
        """Return the radians per position for each table: float64 [rotary_dim / 2], divided by the checkpoint's divisor
        if it has one.
        """
        return self._divided(*([source.read(self._divisor)] if self._divisor else []))

    def _divided(self, *divisor: NDArray[np.float32]) -> list[Float64]:
        if divisor and not (np.isfinite(divisor[0]) & (divisor[0] != 0)).all():
            raise ModelError(
                f"{self._divisor}, which divides RoPE's frequencies, holds a zero or a value that is not a number"
            )
        return [f / divisor[0] if divisor else f for f in self._frequencies]

    def _table(self, function: Rotary) -> RotaryTable:
        half = len(self._frequencies[0])

        def recipe(*divisor: NDArray[np.float32]) -> Float64:
            return np.stack([np.concatenate(([self.magnitude], f)) for f in self._divided(*divisor)])

        tensors: dict[str, tuple[int, ...]] = {self._divisor: (half,)} if self._divisor else {}
        shape = (len(self._frequencies) * self._num_positions, half)
        return RotaryTable(shape=shape, checkpoint_tensors=tensors, make_recipe=recipe, function=function)


def inverse_frequencies(config: Mapping[str, Any], head_dim: int, *, may_be_partial: bool = True) -> Float64:
    """Return theta^(-2i/d) for i in 0..d/2, scaled by the config's rule; float64 [rotary_dim / 2].

    The function reads Hugging Face's `rope_theta`, `partial_rotary_factor` and `rope_scaling`, or the newer
    `rope_parameters` with the same keys, and `gguf.rope.dimension_count`, which only GGUF files have.

    Args:
        may_be_partial: False in families whose implementation in Transformers ignores `partial_rotary_factor`.

    Raises:
        UnsupportedModelError: a scaling rule is not implemented, or a factor other than 1 is ignored by Transformers.
        ModelError: a rule lacks one of its numbers, or a number is invalid.
    """
    parameters = rope_parameters(config)
    rule = parameters["rope_type"]
    if rule == "proportional":
        return _proportional(parameters, head_dim)
    if not may_be_partial:
        _refuse_partial(parameters)
    base = _base(parameters, head_dim)
    if parameters.get("attention_factor") not in (None, 1):
        raise UnsupportedModelError(
            f"attention_factor = {parameters['attention_factor']!r} of RoPE is not supported", feature=SCALING_KEY
        )
    try:
        if rule == "default":
            return base
        if rule == "linear":
            return base / _divisor(parameters, "factor")
        if rule == "llama3":
            return _llama3(base, parameters)
    except KeyError as error:
        raise ModelError(f"rope scaling {rule!r} needs {error}, which the config lacks") from error
    raise UnsupportedModelError(
        f"rope scaling {rule!r} is not supported; supported: default, linear, llama3, proportional, and in most "
        "families longrope and yarn",
        feature=SCALING_KEY,
    )


def rotary_tables(
    config: Mapping[str, Any],
    head_dim: int,
    context_length: int,
    *,
    divisor: str | None = None,
    may_be_partial: bool = True,
    dual_chunks: DualChunks | None = None,
) -> RotaryTables:
    """Make tables under the config's rule, which may be any of `inverse_frequencies`, "longrope" or "yarn".

    Args:
        divisor, dual_chunks: see `RotaryTables`.
        may_be_partial: see `inverse_frequencies`.

    Raises:
        UnsupportedModelError, ModelError: see `inverse_frequencies`.
    """
    parameters = rope_parameters(config)
    rule = parameters["rope_type"]
    if dual_chunks is not None and rule != "default":
        raise UnsupportedModelError(
            f"rope scaling {rule!r} with dual chunk attention is not supported", feature=SCALING_KEY
        )
    if rule in ("longrope", "yarn") and not may_be_partial:
        _refuse_partial(parameters)
    if rule == "longrope":
        return longrope_tables(config, head_dim, context_length)
    if rule == "yarn":
        return yarn_tables(config, head_dim, context_length)
    return RotaryTables(
        inverse_frequencies(config, head_dim, may_be_partial=may_be_partial),
        context_length,
        divisor=divisor,
        dual_chunks=dual_chunks,
    )


def unrotated_tables(context_length: int) -> RotaryTables:
    """Make tables that rotate nothing, for layers without RoPE: one column of angle 0."""
    return RotaryTables(np.zeros(1), context_length)


def yarn_tables(config: Mapping[str, Any], head_dim: int, context_length: int) -> RotaryTables:
    """Make tables under the rule "yarn", which divides low frequencies by a factor, keeps high frequencies, and blends
    the frequencies between them.

    cos and sin are multiplied by `attention_factor`. Its default is 1 + 0.1 ln(factor). Source: Peng et al., YaRN
    (2023), section 3; Hugging Face's `_compute_yarn_parameters`.

    Raises:
        UnsupportedModelError: the config has a switch that is not implemented.
        ModelError: a number is missing or invalid.
    """
    parameters = rope_parameters(config)
    base = _base(parameters, head_dim)
    key = "original_max_position_embeddings"
    original = config.get(key) or parameters.get(key) or context_length
    numbers = {key: original, "beta_fast": 32.0, "beta_slow": 1.0, "rope_theta": parameters["rope_theta"]}
    numbers |= {"factor": context_length / _positive(numbers, key)}
    names = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    numbers |= {name: parameters[name] for name in names if parameters.get(name)}
    found = {name: _positive(numbers, name) for name in numbers}
    factor, rotary_dim = _divisor(found, "factor"), 2 * len(base)
    truncate = parameters.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ModelError(f"the config's truncate of RoPE is {truncate!r}, expected true or false")
    if found["rope_theta"] <= 1:
        raise ModelError(f"the config's rope_theta of RoPE is {found['rope_theta']!r}; 'yarn' needs more than 1")

    def pair(turns: float) -> float:
        """Return the index of the pair that makes a number of turns in the original context."""
        wavelength = found["original_max_position_embeddings"] / (turns * 2 * pi)
        return rotary_dim * log(wavelength) / (2 * log(found["rope_theta"]))

    low, high = pair(found["beta_fast"]), pair(found["beta_slow"])
    if truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    blend = np.clip((np.arange(len(base)) - low) / (high - low or 0.001), 0.0, 1.0)

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * log(factor) + 1.0

    attention = magnitude(1.0)
    if "mscale" in found and "mscale_all_dim" in found:
        attention = magnitude(found["mscale"]) / magnitude(found["mscale_all_dim"])
    if parameters.get("attention_factor") is not None:
        attention = _positive(parameters, "attention_factor")
    return RotaryTables(base / factor * blend + base * (1 - blend), context_length, magnitude=attention)


def longrope_tables(config: Mapping[str, Any], head_dim: int, context_length: int) -> RotaryTables:
    """Make tables under the rule "longrope", which divides frequencies by short factors or, in a long context, by long
    factors.

    cos and sin are multiplied by `attention_factor`. Its default is sqrt(1 + ln(s) / ln(original)), s = context /
    original. Source: Ding et al., LongRoPE (2024); Hugging Face's `_compute_longrope_parameters`.

    Raises:
        UnsupportedModelError: the config does not have both lists of factors.
        ModelError: a list or a number is invalid.
    """
    parameters = rope_parameters(config)
    base = _base(parameters, head_dim)
    original = config.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    if type(original) is not int or original < 2:
        raise ModelError(f"the config's original_max_position_embeddings is {original!r}, expected a whole number")
    if original > LONGEST_CONTEXT:
        raise ModelError(
            f"the config's original_max_position_embeddings is {original}; expected at most {LONGEST_CONTEXT}"
        )
    short, long = (_factors(parameters, key, len(base)) for key in ("short_factor", "long_factor"))
    stretch = _positive({"factor": parameters.get("factor") or context_length / original}, "factor")
    magnitude = sqrt(1 + log(stretch) / log(original)) if stretch > 1 else 1.0
    if parameters.get("attention_factor") is not None:
        magnitude = _positive(parameters, "attention_factor")
    return RotaryTables(
        base / short,
        context_length,
        magnitude=magnitude,
        long_frequencies=base / long,
        long_context_from=original,
    )


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's parameters of RoPE, merged from all sections, with Hugging Face's defaults and a "rope_type".

    Raises:
        ModelError: a section is not a table of numbers.
        UnsupportedModelError: the config has a section for each kind of layer, or a factor without a rule.
    """
    parameters: dict[str, Any] = {
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
        "gguf.rope.dimension_count": None,
    }
    parameters |= {key: config[key] for key in parameters if config.get(key) is not None}
    for key in ("rope_parameters", "rope_scaling"):
        section = config.get(key) or {}
        if not isinstance(section, Mapping):
            raise ModelError(f"the config's {key} is {section!r}, expected a table of numbers")
        if nested := [name for name, value in section.items() if isinstance(value, Mapping)]:
            raise UnsupportedModelError(
                f"the config's {key} has a section for {nested[0]!r} layers, which is not supported",
                feature=SCALING_KEY,
            )
        parameters |= section
    rule = parameters.get("rope_type") or parameters.get("type")
    factors = [key for key in parameters if key.endswith("factor") and key not in _UNSCALED]
    if rule is None and (given := [key for key in factors if parameters[key] is not None]):
        raise UnsupportedModelError(
            f"the config's {SCALING_KEY} gives {given[0]} = {str(parameters[given[0]])[:60]} without a rope_type; "
            "add the one that the model was trained with",
            feature=SCALING_KEY,
        )
    parameters["rope_type"] = rule or "default"
    return parameters


def _refuse_partial(parameters: Mapping[str, Any]) -> None:
    if (factor := parameters["partial_rotary_factor"]) != 1:
        raise UnsupportedModelError(
            f"partial_rotary_factor = {factor!r} is ignored by Transformers in this family "
            "and applied by other runtimes; set it to 1, or remove it, if the model was trained with full rotation",
            feature="partial_rotary_factor",
        )


def _proportional(parameters: Mapping[str, Any], head_dim: int) -> Float64:
    """Return frequencies of complete heads, of which only the first `partial_rotary_factor` differ from 0."""
    base = _base({**parameters, "partial_rotary_factor": 1.0}, head_dim)
    rotated = int(min(_positive(parameters, "partial_rotary_factor"), 1.0) * head_dim // 2)
    factor = 1.0 if parameters.get("factor") is None else _divisor(parameters, "factor")
    return np.where(np.arange(len(base)) < rotated, base, 0.0) / factor


def _base(parameters: Mapping[str, Any], head_dim: int) -> Float64:
    """Return inverse frequencies before any scaling."""
    theta = _positive(parameters, "rope_theta")
    factor = min(_positive(parameters, "partial_rotary_factor"), 2.0)  # an infinite factor fails this check
    count = parameters["gguf.rope.dimension_count"]
    rotary_dim = count if type(count) is int else round(head_dim * factor)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ModelError(f"RoPE would rotate {rotary_dim} of {head_dim} dimensions, expected an even number of them")
    with localcontext(Context(prec=40)):  # powers of C libraries and of NumPy differ in the last bit
        powers = [Decimal(theta) ** Decimal(-index / rotary_dim) for index in range(0, rotary_dim, 2)]
    base = np.array(powers, np.float64)
    with np.errstate(over="ignore"):
        if not (base * LONGEST_CONTEXT < inf).all():
            raise ModelError(f"the config's rope_theta of RoPE is {theta!r}; it is too small to divide by")
    return base


def _factors(parameters: Mapping[str, Any], key: str, length: int) -> Float64:
    values = parameters.get(key)
    if values is None:
        raise UnsupportedModelError(
            f"rope scaling {parameters['rope_type']!r} without {key!r} is not supported", feature=SCALING_KEY
        )
    if not isinstance(values, list) or len(values) != length:
        raise ModelError(f"the config's {key} of RoPE is {str(values)[:60]}, expected {length} numbers")
    return np.array([_divisor({key: value}, key) for value in values])


def _llama3(base: Float64, parameters: Mapping[str, Any]) -> Float64:
    """Scale frequencies by the rule "llama3": stretch long wavelengths by `factor`, keep short wavelengths, and
    interpolate between the two.
    """
    factor = _divisor(parameters, "factor")
    low, high = _positive(parameters, "low_freq_factor"), _positive(parameters, "high_freq_factor")
    if low >= high:
        raise ModelError(f"rope scaling has low_freq_factor {low}, expected less than high_freq_factor {high}")
    original = _positive(parameters, "original_max_position_embeddings")
    wavelength = 2 * np.pi / base
    blend = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return (1 - blend) * base / factor + blend * base


def _divisor(parameters: Mapping[str, Any], key: str) -> float:
    value = _positive(parameters, key)
    if not value >= LEAST_DIVISOR:
        raise ModelError(f"the config's {key} of RoPE is {value!r}; it is too small to divide frequencies by")
    return value


def _positive(parameters: Mapping[str, Any], key: str) -> float:
    value = parameters[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST_FLOAT:
        raise ModelError(f"the config's {key} of RoPE is {value!r}, expected a positive number")
    return float(value)
