"""Interpretation of masks: running them shows which keys a row sees, up to the length of the context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.onnx.importing.evaluation import Evaluator
from chunkrt.onnx.importing.signature import Probe

HIDDEN = -1e4
"""Upper bound of the terms that hide keys: the exponential of a score plus such a term is 0 in float32."""


class MaskError(Exception):
    """Error for a mask with an unsupported meaning, which the message describes."""


class Masks:
    """The masks of a decoder. Each mask is run once, regardless of the number of layers that read it."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._windows: dict[tuple[str, int], int] = {}

    def window(self, name: str, context: int) -> int:
        """Return the number of keys that a row sees according to a mask, including its own; 0 for all earlier keys.

        Args:
            name: bool (true is seen) or float (added to scores), of a shape that broadcasts to [1, heads, T, past + T].
            context: number of positions that the decoder can distinguish.

        Raises:
            MaskError: the mask is not causal, with or without a window.
            ModelError: ONNX Runtime cannot compute the mask.
        """
        if (name, context) not in self._windows:
            self._windows[name, context] = self._find(name, context)
        return self._windows[name, context]

    def _find(self, name: str, context: int) -> int:
        lengths = self._evaluator.lengths
        far = lengths.far(context)
        (rows,) = self._visible(name, far[-1:])
        window = int(rows[-1].sum())
        near = [probe for probe in lengths.near if probe.past + probe.length <= context]
        tried = [*near, *lengths.crossing(window, context), *far]
        for probe, found in zip(tried, self._visible(name, tried), strict=True):
            if not np.array_equal(found, visible(probe, window)):
                raise MaskError(
                    f"for {probe.length} tokens after {probe.past} it is not causal, with or without a window"
                )
        return 0 if window == context else window

    def _visible(self, name: str, probes: Sequence[Probe]) -> list[NDArray[np.bool_]]:
        return [_shows(values) for values in self._evaluator.probe(name, probes)]


def visible(probe: Probe, window: int) -> NDArray[np.bool_]:
    """Return the mask of a window, which is True for keys that a row sees: [T, past + T]."""
    rows, keys = np.arange(probe.length)[:, None] + probe.past, np.arange(probe.past + probe.length)
    return (keys <= rows) & (keys > rows - window)


def _shows(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a mask as booleans, [T, keys], the same for all heads. Raises MaskError for other kinds of masks."""
    flat = values.reshape(-1, *values.shape[-2:]) if values.ndim >= 2 else values.reshape(1, 1, -1)
    if values.dtype != np.bool_:
        if not ((flat == 0) | (flat <= HIDDEN)).all():
            raise MaskError("it adds numbers to scores that are neither 0 nor very small")
        flat = flat == 0
    if (flat != flat[:1]).any():
        raise MaskError("it is not the same for all heads")
    mask: NDArray[np.bool_] = flat[0]
    return mask
