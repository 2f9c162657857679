"""Checks that positions, lengths and masks have chunkrt's meaning: consecutive tokens after the past, causally."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from chunkrt.onnx.importing.draft import Draft
from chunkrt.onnx.importing.evaluation import PROBES, far_probes
from chunkrt.onnx.importing.masks import MaskError
from chunkrt.onnx.importing.signature import Probe


def check_positions(draft: Draft, node: ir.Node, value: ir.Value | None, context: int, *, streams: int = 1) -> None:
    """Refuse positions that do not continue from the past's length, up to the end of the context.

    If the positions are None, the operator counts them itself. `streams` is the number of times that all positions are
    repeated.
    """

    def expected(probe: Probe) -> NDArray[np.int64]:
        return np.tile(np.arange(probe.past, probe.past + probe.length), streams)

    if value is not None:
        _check(draft, node, value, "positions", context, expected)


def check_total(draft: Draft, node: ir.Node, value: ir.Value | None, context: int, *, less: int = 0) -> None:
    """Refuse a length that differs from the length of past and present together, minus `less`."""
    if value is None:
        raise draft.unsupported(node, "it has no number of tokens as an input")
    _check(draft, node, value, "length", context, lambda probe: np.array([probe.past + probe.length - less]))


def _check(
    draft: Draft,
    node: ir.Node,
    value: ir.Value,
    what: str,
    context: int,
    expected: Callable[[Probe], NDArray[np.int64]],
) -> None:
    _check_positional(draft, node, value, what)
    probes = [*(probe for probe in PROBES if probe.past + probe.length <= context), *far_probes(context)]
    for probe, values in zip(probes, draft.evaluator.probe(value.name or "", probes), strict=True):
        found, wanted = values.reshape(-1), expected(probe)
        if not np.array_equal(found, wanted):
            start = int(np.argmax(found != wanted)) if found.shape == wanted.shape else 0
            raise draft.unsupported(
                node,
                f"its {what} {value.name!r} are {_few(found, start)} for {probe.length} tokens after {probe.past}, "
                f"expected {_few(wanted, start)}",
            )


def _few(values: NDArray[np.int64], start: int) -> str:
    """Format four values, beginning with the first wrong value, and its index if it is not 0."""
    few = str(values[start : start + 4].tolist())
    return f"{few} from number {start}" if start > 3 else str(values[:4].tolist())


def find_window(draft: Draft, node: ir.Node, value: ir.Value, context: int) -> int:
    """Return the number of keys that a row sees according to a mask, including its own; 0 for all earlier keys.

    Args:
        value, context: see `Masks.window`.

    Raises:
        UnsupportedModelError: the mask is not causal.
    """
    _check_positional(draft, node, value, "mask")
    try:
        return draft.masks.window(value.name or "", context)
    except MaskError as error:
        raise draft.unsupported(node, f"its mask {value.name!r} is not a causal mask: {error}") from error


def _check_positional(draft: Draft, node: ir.Node, value: ir.Value, what: str) -> None:
    if not draft.evaluator.is_positional(value.name or ""):
        raise draft.unsupported(node, f"its {what} {value.name!r} depend on tokens")
