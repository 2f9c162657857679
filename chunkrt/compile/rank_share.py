"""One rank's part of a decoder that was calibrated and quantised as a whole, for static schemes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from chunkrt.errors import ConfigError
from chunkrt.graph.modules import Float32, Number, Share
from chunkrt.graph.partition import Planned
from chunkrt.graph.plan import Node, expert_weights, linear_nodes
from chunkrt.quant.arithmetic import Integers
from chunkrt.quant.grid import LinearGrids


class RankShare:
    """The rank's part of each weight of a complete decoder.

    Args:
        complete: the decoder of one rank.
        planned: the rank's decoder, whose linears are split by their columns alone.
    """

    def __init__(self, complete: Planned, planned: Planned) -> None:
        self._complete, self._planned = complete, planned

    def source_of(self, name: str) -> Planned:
        """Return the decoder whose values a weight of the rank is made from: the rank's for constants that depend on
        its share.
        """
        own, complete = self._planned.parameters[name], self._complete.parameters.get(name)
        is_own = complete is None or (not own.axes and own.shape != complete.shape)
        return self._planned if is_own else self._complete

    def cut(self, name: str, values: Float32) -> Float32:
        """Return the rank's part of a weight's values. The values of linears and of routed experts are returned
        unchanged, because they are quantised before they are cut.
        """
        if name in self._linears or name in self._experts:
            return values
        return _cut(values, self._shares(name))

    def cut_experts(self, name: str, integers: NDArray[np.int8], scale: Float32) -> tuple[NDArray[np.int8], Float32]:
        """Return the rank's part of the integers [E, K, N] and scales [E, N] of complete experts."""
        shares = self._shares(name)
        return _cut(integers, shares), _cut(scale, [share for axis, share in enumerate(shares) if axis != 1])

    def linear(self, name: str) -> Node:
        """Return the node of a linear in the complete decoder."""
        return self._linears[name]

    def cut_linear(self, name: str, integers: Integers, grids: LinearGrids) -> tuple[Integers, LinearGrids]:
        """Return the rank's columns of a complete linear, with their grids.

        Raises:
            ConfigError: a family splits the linear by its rows.
        """
        depth, columns = self._shares(name) or (None, None)
        if depth is not None and depth.length != depth.size:
            raise ConfigError(
                f"under a static scheme the ranks cannot split {name} by its rows, as its family does; use a dynamic "
                "scheme or 'float', or build the linear as a RowParallelLinear"
            )
        if columns is None:
            return integers, grids
        multipliers, output_step = integers.multipliers, grids.output_step
        if multipliers is not None:  # multipliers of padding must not be 0
            multipliers = np.maximum(columns.take(multipliers, 1), 1).astype(multipliers.dtype)
        if output_step is not None and output_step.size > 1:
            output_step = columns.take(output_step)
            output_step = np.where(output_step > 0, output_step, np.float32(1)).astype(np.float32)
        cut = Integers(columns.take(integers.values, 1), columns.take(integers.scale), multipliers)
        return cut, LinearGrids(input_step=grids.input_step, output_step=output_step)

    def _shares(self, name: str) -> list[Share | None]:
        """Return the rank's share of each axis of the complete weight."""
        own, complete = self._planned.parameters[name].axes, self._complete.parameters[name].axes
        pairs = zip(own, complete, strict=True)
        return [None if share is None or whole is None else share.within(whole) for share, whole in pairs]

    @cached_property
    def _linears(self) -> dict[str, Node]:
        return linear_nodes(self._complete.plan)

    @cached_property
    def _experts(self) -> set[str]:
        return expert_weights(self._complete.plan)


def _cut(values: NDArray[Number], shares: Sequence[Share | None]) -> NDArray[Number]:
    for axis, share in enumerate(shares):
        values = values if share is None else share.take(values, axis)
    return values
