"""Recognition of attention that is written as MatMul, Softmax, MatMul: its inputs, its result and its parameters.

The part between a layer's projections, its states and its result is run on random values (`regions.py`). The first runs
determine its parameters (scale, window, rotary tables). Another run verifies that attention with these parameters
computes the same result. Masks, the repetition of key heads, rotation and reshaping may have any form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from chunkrt.errors import UnsupportedModelError
from chunkrt.onnx.importing.decomposed.norm_regions import Norm
from chunkrt.onnx.importing.decomposed.rotary_regions import Rotation, is_by_position, read_tables, rotary_dim
from chunkrt.onnx.importing.evaluation import decimal
from chunkrt.onnx.importing.masks import HIDDEN, MaskError, Masks, visible
from chunkrt.onnx.importing.regions import Regions

Array = NDArray[Any]

TOLERANCE = {np.dtype(np.float32): 1e-4, np.dtype(np.float16): 2e-2}
"""Tolerance relative to the largest value, for different orders of summation; other functions differ by more."""


@dataclass(frozen=True, kw_only=True)
class Core:
    """The core of attention: names of the rotated queries, all keys, all values and the result, and its parameters.

    `window` is the number of keys that a row sees, including its own; 0 for all keys.
    """

    query: str
    keys: str
    values: str
    result: str
    scale: float
    window: int


@dataclass(frozen=True, kw_only=True)
class DecomposedAttention:
    """One layer's attention, by the names of values in the foreign graph.

    `query`, `key` and `value` are [1, T, heads * head_dim], before norms of heads and rotation. The result of the core
    has this shape too. `past` names the states of keys and values; None if the decoder has no states.
    """

    core: Core
    query: str
    key: str
    value: str
    past: tuple[str, str] | None
    query_norm: Norm | None
    key_norm: Norm | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tables: Rotation


class AttentionFinder:
    """Finder of the attention around each Softmax of a decoder.

    Args:
        norms: the norms of the graph, by their results.
        states: the graph's inputs that persist between runs.
    """

    def __init__(self, regions: Regions, norms: dict[str, Norm], states: set[str], where: str) -> None:
        self._regions, self._norms, self._states = regions, norms, states
        self._model = where
        self._rng = np.random.default_rng(0)
        self._tables: dict[tuple[str, ...], Rotation] = {}
        self._masks = Masks(regions.evaluator)
        self._where = ""

    def find(self, softmax: str) -> DecomposedAttention:
        """Return the attention whose probabilities are `softmax`, the output of a Softmax.

        Raises:
            UnsupportedModelError: the surrounding nodes are not causal attention over past and present keys.
        """
        node = self._regions.writer(softmax)
        self._where = f"node {node.name!r}, an operator {node.op_type} of the domain {node.domain or 'ai.onnx'},"
        core = self._core(softmax)
        shape = self._regions.shape
        past, new_key, new_value = None, core.keys, core.values
        if self._states:
            (past_key, new_key), (past_value, new_value) = self._appended(core.keys), self._appended(core.values)
            past = past_key, past_value
        query, query_tables = self._before_rotation(core.query)
        key, key_tables = self._before_rotation(new_key)
        if query_tables is not key_tables:
            self._refuse("its queries and keys are rotated differently")
        if query_tables is None:
            self._refuse("its queries and keys are not rotated; attention without RoPE is not supported")
        query, query_norm = self._before_heads(query)
        key, key_norm = self._before_heads(key)
        value, value_norm = self._before_heads(new_value)
        if value_norm is not None:
            self._refuse("its values are normalised")
        return DecomposedAttention(
            core=core,
            query=query,
            key=key,
            value=value,
            past=past,
            query_norm=query_norm,
            key_norm=key_norm,
            num_heads=shape(core.query)[1],
            num_kv_heads=shape(core.keys)[1],
            head_dim=shape(core.query)[3],
            tables=query_tables,
        )

    def _core(self, softmax: str) -> Core:
        regions = self._regions
        scores = regions.writer(softmax).input[0]
        product = next((n for n in regions.above(scores) if regions.writer(n).op_type == "MatMul"), None)
        operands = regions.writer(product).input if product else ("", "")
        query = next((n for n in self._up(operands[0]) if not self._is_scaled(n)), None)
        attended = next((n for n in regions.below(softmax) if regions.writer(n).op_type == "MatMul"), None)
        width = regions.shape(query)[-1] if query else 0
        keys = self._all_heads(operands[1], width)
        values = self._all_heads(regions.writer(attended).input[1], width) if attended else None
        result = attended and next((n for n in regions.below(attended) if len(regions.shape(n)) == 3), None)
        if not query or not keys or not values or not result:
            self._refuse("it is not attention over past and present keys and values")
        q, k, v = (regions.random(name, self._rng) for name in (query, keys, values))
        if q.ndim != 4 or k.shape != v.shape or q.shape[1] % k.shape[1] or q.shape[3] != k.shape[3]:
            self._refuse(f"its queries are {q.shape}, its keys {k.shape}, its values {v.shape}")
        group = q.shape[1] // k.shape[1]
        products = q.astype(np.float64) @ np.repeat(k, group, axis=1).swapaxes(-1, -2)
        part = regions.part(scores, {query: q, keys: k})
        mask = part({query: np.zeros_like(q), keys: k})
        is_visible = np.broadcast_to(mask > HIDDEN, products.shape)
        if mask[mask > HIDDEN].any():
            self._refuse("numbers are added to its scores")
        window = self._window({query, keys, values}, scores, result, is_visible)
        seen = products[is_visible]

        def scores_of(factor: float) -> Array:
            return part({query: (q * factor).astype(q.dtype), keys: k})[is_visible].astype(np.float64)

        scale = float(1e3 * (scores_of(1e-3) @ seen) / (seen @ seen))
        for factor, reason in ((1, "its scores are not products of queries and keys"), (1e2, "its scores are capped")):
            self._require(scores_of(factor), factor * scale * seen, q.dtype, reason)
        products = products * scale
        weights = np.where(is_visible, np.exp(products - products.max(axis=-1, keepdims=True)), 0)
        expected = (weights / weights.sum(axis=-1, keepdims=True)) @ np.repeat(v, group, axis=1)
        self._require(
            regions.run(result, {query: q, keys: k, values: v}),
            expected.swapaxes(1, 2).reshape(1, q.shape[2], -1),
            q.dtype,
            "its result differs from that of attention",
        )
        return Core(
            query=query,
            keys=keys,
            values=values,
            result=result,
            scale=decimal(scale),
            window=window,
        )

    def _window(self, roots: set[str], scores: str, result: str, is_visible: NDArray[np.bool_]) -> int:
        """Return the number of keys that a row sees according to the mask; 0 for all earlier keys.

        Apart from the mask, only sizes may depend on the number of tokens, and they must grow with it, so that results
        at the
        probe are valid for any length.
        """
        regions, total = self._regions, self._regions.probe.past + self._regions.probe.length
        read = regions.positional_inputs(result, roots)
        masks = [
            name
            for name in regions.positional_inputs(scores, roots)
            if regions.frozen[name].ndim > 1 and regions.frozen[name].shape[-1] == total
        ]
        if len(masks) != 1:
            self._refuse(f"it has {len(masks)} masks, expected one")
        mask = masks[0]
        if others := [name for name in read if name != mask and not regions.is_size(name)]:
            self._refuse(f"it reads {others[0]!r}, which depends on positions and is not a mask")
        try:
            window = self._masks.window(mask, self._regions.context)
        except MaskError as error:
            self._refuse(f"its mask {mask!r} is not a causal mask: {error}")
        if (visible(regions.probe, window or self._regions.context) != is_visible).any():
            self._refuse(f"its mask {mask!r} does not determine which keys are seen")
        return window

    def _before_rotation(self, name: str) -> tuple[str, Rotation | None]:
        """Return the input of the rotation that ends in `name`, and its tables; `name` and None if `name` is not
        rotated.
        """
        regions = self._regions
        for source in self._up(name):
            if len(regions.shape(source)) != 4:
                break
            names = regions.positional_inputs(name, {source})
            turning = tuple(n for n in names if np.issubdtype(regions.frozen[n].dtype, np.floating))
            if not turning:
                continue
            if (width := rotary_dim(regions, source, name)) is None:
                self._refuse("its queries or keys are rotated, but not by rotate-half RoPE")
            if turning not in self._tables:
                if not is_by_position(regions, turning):
                    self._refuse("its rotation depends on the number of tokens")
                read = read_tables(regions, source, name, width)
                known = (tables for tables in self._tables.values() if tables.is_same(read))
                self._tables[turning] = next(known, read)
            tables = self._tables[turning]
            x = regions.random(source, self._rng)
            is_same = x.shape == regions.shape(name)
            expected = tables.rotate(x if is_same else x.swapaxes(1, 2), regions.probe.position)
            self._require(regions.run(name, {source: x}), expected, x.dtype, "its rotation is not the rotary embedding")
            return source, tables
        return name, None

    def _before_heads(self, name: str) -> tuple[str, Norm | None]:
        """Return the rows [1, T, heads * head_dim] from which heads [1, heads, T, head_dim] are made, and the norm
        between the two.
        """
        regions, base, norm = self._regions, name, None
        for source in self._up(name):
            shape = regions.shape(source)
            if source in self._norms and norm is None:
                self._require_heads(base, source)
                norm = self._norms[source]
                base = norm.source
            elif len(shape) == 3 and shape[1] == regions.probe.length:
                self._require_heads(base, source)
                return source, norm
        self._refuse(f"{name!r} does not come from rows")

    def _require_heads(self, target: str, source: str) -> None:
        """Check that a value equals another one except for reshaping it to heads."""
        x = self._regions.random(source, self._rng)
        shape = self._regions.shape(target)
        found = self._regions.run(target, {source: x})
        length = self._regions.probe.length
        heads = x if x.ndim == 4 else x.reshape(1, length, -1, shape[-1])
        if not any(np.array_equal(found, h) for h in (heads, heads.swapaxes(1, 2))):
            self._refuse(f"{target!r} is more than the heads of {source!r}")

    def _up(self, name: str) -> Iterator[str]:
        return self._regions.above(name) if name in self._regions.data else iter(())

    def _is_scaled(self, name: str) -> bool:
        """Return whether a value is the product or quotient of another value and a scalar, or a cast of it."""
        node = self._regions.writer(name)
        others = [n for n in node.input if n not in self._regions.data]
        constants = self._regions.evaluator.constants
        is_number = all(n in constants and self._regions.evaluator.constant(n).size == 1 for n in others)
        return node.op_type == "Cast" or (node.op_type in ("Mul", "Div") and len(others) == 1 and is_number)

    def _all_heads(self, name: str, width: int) -> str | None:
        """Return the keys or values of all tokens [1, kv_heads, past + T, width] that a product reads, possibly after
        repetition; None if it reads none.
        """
        if self._states:
            return next((n for n in self._up(name) if self._is_appended(n)), None)
        length = self._regions.probe.length
        heads = {n: self._regions.shape(n) for n in self._up(name)}
        heads = {n: shape for n, shape in heads.items() if len(shape) == 4 and shape[2:] == (length, width)}
        return min(heads, key=lambda n: heads[n][1], default=None)  # the nearest one with the fewest heads

    def _is_appended(self, name: str) -> bool:
        node = self._regions.writer(name)
        return node.op_type == "Concat" and len(node.input) == 2 and node.input[0] in self._states

    def _appended(self, name: str) -> tuple[str, str]:
        """Return a state, and the value that is appended to the state along its positions."""
        past, new = self._regions.writer(name).input
        x, y = (self._regions.random(n, self._rng) for n in (past, new))
        if not np.array_equal(self._regions.run(name, {past: x, new: y}), np.concatenate([x, y], axis=2)):
            self._refuse(f"{new!r} is not appended to {past!r} along its positions")
        return past, new

    def _require(self, found: Array, expected: Array, dtype: np.dtype[Any], reason: str) -> None:
        if not self._is_same(found, expected, dtype):
            self._refuse(reason)

    @staticmethod
    def _is_same(found: Array, expected: Array, dtype: np.dtype[Any]) -> bool:
        tolerance = TOLERANCE.get(dtype, 0.0) * float(np.abs(expected).max())
        return found.shape == expected.shape and bool(np.all(np.abs(found - expected) <= tolerance))

    def _refuse(self, reason: str) -> NoReturn:
        raise UnsupportedModelError(f"{self._model}: {self._where} cannot be imported: {reason}")
