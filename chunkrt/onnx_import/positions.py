"""Checking that positions, lengths and masks say what chunkrt computes: tokens in a row after the past, causally."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from chunkrt.onnx_import.draft import Draft
from chunkrt.onnx_import.evaluation import PROBES
from chunkrt.onnx_import.masks import MaskError
from chunkrt.onnx_import.signature import Probe


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
    _check_positional(draft, node, value, what)
    for probe, values in zip(PROBES, draft.evaluator.probe(value.name or ""), strict=True):
        if not np.array_equal(values.reshape(-1), expected(probe)):
            raise draft.unsupported(
                node,
                f"its {what} {value.name!r} are {values.reshape(-1)[:4].tolist()} for {probe.length} tokens after "
                f"{probe.past}, expected {expected(probe)[:4].tolist()}",
            )


def find_window(draft: Draft, node: ir.Node, value: ir.Value, context: int) -> int:
    """How many keys a row sees by a mask, its own among them; 0 for all before it.

    Args:
        value: see `Masks.window`, as for `context`.

    Raises:
        UnsupportedModelError: it is no causal mask.
    """
    _check_positional(draft, node, value, "mask")
    try:
        return draft.masks.window(value.name or "", context)
    except MaskError as error:
        raise draft.unsupported(node, f"its mask {value.name!r} is no causal mask: {error}") from error


def _check_positional(draft: Draft, node: ir.Node, value: ir.Value, what: str) -> None:
    if not draft.evaluator.is_positional(value.name or ""):
        raise draft.unsupported(node, f"its {what} {value.name!r} depend on tokens")
