"""Checking that positions, lengths and masks say what chunkrt computes: tokens in a row after the past, causally."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from chunkrt.onnx_import.draft import Draft
from chunkrt.onnx_import.evaluation import PROBES
from chunkrt.onnx_import.signature import Probe

HIDDEN = -1e4
"""What is added to a score that a row must not see is at most this."""


def check_positions(draft: Draft, node: ir.Node, value: ir.Value | None) -> None:
    """Refuse positions that do not count on from the past's length. None means that the operator counts so itself."""
    if value is not None:
        _check(draft, node, value, "positions", lambda probe: np.arange(probe.past, probe.past + probe.length))


def check_total(draft: Draft, node: ir.Node, value: ir.Value | None, *, less: int = 0) -> None:
    """Refuse a length that is not that of past and present together, less some."""
    if value is None:
        raise draft.unsupported(node, "it is not told how many tokens there are")
    _check(draft, node, value, "length", lambda probe: np.array([probe.past + probe.length - less]))


def _check(
    draft: Draft, node: ir.Node, value: ir.Value, what: str, expected: Callable[[Probe], NDArray[np.int64]]
) -> None:
    found = _probed(draft, node, value, what)
    for probe, values in zip(PROBES, found, strict=True):
        if not np.array_equal(values.reshape(-1), expected(probe)):
            raise draft.unsupported(
                node,
                f"its {what} {value.name!r} are {values.reshape(-1)[:4].tolist()} for {probe.length} tokens after "
                f"{probe.past}, expected {expected(probe)[:4].tolist()}",
            )


def find_window(draft: Draft, node: ir.Node, value: ir.Value) -> int:
    """How many keys a row sees by a mask, its own among them; 0 for all before it.

    Args:
        value: bool (true is seen) or float (added to scores), of a shape that broadcasts to [1, heads, T, past + T].

    Raises:
        UnsupportedModelError: it is no causal mask.
    """
    masks = [_visible(draft, node, values) for values in _probed(draft, node, value, "mask")]
    seen = [
        (probe.past + row, int(mask[row].sum()))
        for probe, mask in zip(PROBES, masks, strict=True)
        for row in range(probe.length)
    ]
    limited = [count for position, count in seen if count < position + 1]
    window = max(limited, default=0)
    for probe, mask in zip(PROBES, masks, strict=True):
        rows = np.arange(probe.past, probe.past + probe.length)[:, None]
        keys = np.arange(probe.past + probe.length)
        expected = (keys <= rows) & ((keys > rows - window) if window else True)
        if mask.shape != expected.shape or (mask != expected).any():
            raise draft.unsupported(node, f"its mask {value.name!r} is not causal, with or without a window")
    return window


def _visible(draft: Draft, node: ir.Node, values: NDArray[Any]) -> NDArray[np.bool_]:
    """A mask as true and false, [T, keys]; the same for all heads."""
    flat = values.reshape(-1, *values.shape[-2:]) if values.ndim >= 2 else values.reshape(1, 1, -1)
    if values.dtype != np.bool_:
        if not ((flat == 0) | (flat <= HIDDEN)).all():
            raise draft.unsupported(node, "its mask adds numbers to scores that are neither 0 nor very small")
        flat = flat == 0
    if (flat != flat[:1]).any():
        raise draft.unsupported(node, "its mask is not the same for all heads")
    mask: NDArray[np.bool_] = flat[0]
    return mask


def _probed(draft: Draft, node: ir.Node, value: ir.Value, what: str) -> list[NDArray[Any]]:
    if not draft.evaluator.is_positional(value.name or ""):
        raise draft.unsupported(node, f"its {what} {value.name!r} depend on tokens")
    return draft.evaluator.probe(value.name or "")
