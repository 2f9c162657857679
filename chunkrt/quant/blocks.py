"""Float weights in blocks of 4 bits, for dynamic schemes; a checkpoint that has such blocks keeps its own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from chunkrt.checkpoints.source import BLOCK_DEPTH, BLOCK_TYPES, FLOAT_TYPES, BlockTensor
from chunkrt.errors import QuantizationError
from chunkrt.graph.plan import linear_weights, resolve
from chunkrt.quant.scheme import Scheme

if TYPE_CHECKING:
    from chunkrt.graph.planned import Planned

COLUMNS_AT_ONCE = 1024
"""Output channels quantised together: bounds the temporary copies of a large linear."""

MOST = 15
"""The largest integer of 4 bits without a sign."""


def quantize_to_blocks(weight: NDArray[np.float32], *, name: str = "weight") -> BlockTensor:
    """Blocks as Q4_1 has them, each from its smallest weight to its largest.

    Args:
        weight: float32 [K, N], as in `X @ W`; any strides; K a multiple of BLOCK_DEPTH.

    Returns:
        A tensor [N, K]: minimum = min(block) and scale = (max(block) - minimum) / 15, both rounded to float16, then
        integer = round((w - minimum) / scale), ties to even. A block of equal weights has scale 0.

    Raises:
        QuantizationError: a weight is not finite, or a block's minimum or scale is too large for float16.
    """
    depth, columns = weight.shape
    integers = np.empty((columns, depth), np.uint8)
    scales, minima = (np.empty((columns, depth // BLOCK_DEPTH), np.float16) for _ in range(2))
    for begin in range(0, columns, COLUMNS_AT_ONCE):
        part = slice(begin, begin + COLUMNS_AT_ONCE)
        blocks = weight[:, part].T.reshape(-1, depth // BLOCK_DEPTH, BLOCK_DEPTH)
        with np.errstate(over="ignore", invalid="ignore"):
            minima[part] = blocks.min(axis=-1)
            minimum = minima[part].astype(np.float32)
            scales[part] = (blocks.max(axis=-1) - minimum) / np.float32(MOST)
        if not (np.isfinite(minima[part]).all() and np.isfinite(scales[part]).all()):
            raise QuantizationError(
                f"{name} holds values that are not finite, or too large for blocks of 4 bits with float16 scales; "
                "use the scheme 'w8a8-dynamic' if the checkpoint is not damaged"
            )
        scale = scales[part].astype(np.float32)
        steps = (blocks - minimum[..., None]) / np.where(scale > 0, scale, np.float32(np.inf))[..., None]
        integers[part] = np.rint(steps).clip(0, MOST).reshape(-1, depth)
    return BlockTensor(integers=integers, scales=scales, minima=minima)


def settle(planned: Planned, scheme: Scheme) -> Scheme:
    """A scheme as the checkpoint lets it be: `weights_of_8_bits` names every linear that is not in blocks.

    In blocks are linears all of whose tensors the checkpoint has so, unless a rank's share would cut a block; and
    those whose tensors are floats, if the scheme does not keep them in 8 bits and blocks divide their depth. A scheme
    without blocks comes back as it is.

    Raises:
        ModelError: the checkpoint lacks a tensor.
    """
    if scheme.weight_bits != 4 or scheme.is_static:
        return scheme

    def is_in_blocks(name: str) -> bool:
        parameter = planned.parameters[name]
        types = parameter.stored_as(planned.source)
        depth, _ = resolve(planned.plan.tensors[name].shape, {})
        is_made_here = types <= FLOAT_TYPES and scheme.has_blocks(name) and depth % BLOCK_DEPTH == 0
        return (types <= BLOCK_TYPES and parameter.keeps_blocks) or is_made_here

    others = sorted(name for name in linear_weights(planned.plan) if not is_in_blocks(name))
    return replace(scheme, weights_of_8_bits=tuple(others))
