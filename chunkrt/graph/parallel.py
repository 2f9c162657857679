"""The linears of decoders, complete or split over ranks.

    y = x @ W      columns cut: every rank has some columns of y, computed from all of x
                   rows cut:    every rank has some columns of x, and the sum over ranks of their products is y

A column-parallel linear is followed by a row-parallel one, so that the two need only one sum. The parameters of a
linear load their part of the checkpoint's tensors, as floats or as blocks of 4 bits. On one rank all classes compute
the same complete linear. Source: Shoeybi et al., Megatron-LM (2019), section 3; the classes have the names of vLLM's.

Heads are distributed in groups. A group consists of a key/value head and the query heads that read it. All ranks have
the same number of groups:

- If the number of ranks divides the number of groups, each rank has its groups.
- If the number of groups divides the number of ranks (fewer groups than ranks), each group is copied to several ranks,
  which divide its query heads. A group's query heads are padded with zeros if they cannot be divided evenly.
- Otherwise the groups are padded with groups of zeros up to the next multiple of the ranks. For example, with 3 groups
  on 2 ranks each rank has 2 groups, and one of these four is padding. Padding costs no additional time, because the
  rank with the largest share determines the time in any case.

A head of zeros has rows of zeros in q, k and v and columns of zeros in the output projection, so it does not change the
result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from chunkrt.checkpoints.source import BLOCK_DEPTH, BlockTensor, TensorSource
from chunkrt.errors import ConfigError
from chunkrt.graph import ops
from chunkrt.graph.modules import Module, Parameter
from chunkrt.graph.plan import ALONE, Ranks

Number = TypeVar("Number", bound=np.generic)
Factor = float | NDArray[np.float32]
"""Factor of a linear's result, or of each of its columns."""


@dataclass(frozen=True, eq=False)
class Share:
    """Selection of elements of an axis of length `size`, by their `indices` in order. The index `size` stands for a
    zero of padding.
    """

    size: int
    indices: NDArray[np.int64]

    @staticmethod
    def whole(size: int) -> Share:
        """Return the share that consists of the complete axis."""
        return Share(size, np.arange(size))

    @staticmethod
    def even(size: int, ranks: Ranks) -> Share | None:
        """Return a rank's slice, of the same length on all ranks; None if the axis cannot be cut evenly."""
        length, rest = divmod(size, ranks.size)
        return None if rest else Share(size, np.arange(ranks.rank * length, (ranks.rank + 1) * length))

    @staticmethod
    def joined(shares: Sequence[Share]) -> Share:
        """Concatenate shares of consecutive axes."""
        size = sum(share.size for share in shares)
        starts = np.cumsum([0, *(share.size for share in shares)])
        parts = [
            np.where(share.indices == share.size, size, share.indices + start)
            for share, start in zip(shares, starts, strict=False)
        ]
        return Share(size, np.concatenate(parts))

    def spread(self, width: int, order: NDArray[np.int64] | None = None) -> Share:
        """Return the share of an axis in which each element is replaced by `width` elements, in a given order."""
        return Share(self.size * width, self._spread(width, order))

    def _spread(self, width: int, order: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        order = np.arange(width) if order is None else order
        columns: NDArray[np.int64] = (self.indices[:, None] * width + order).ravel()
        return np.minimum(columns, self.size * width)

    @property
    def length(self) -> int:
        """Number of elements, including padding."""
        return len(self.indices)

    def take(self, array: NDArray[Number], axis: int = 0) -> NDArray[Number]:
        """Return this part of an array along one of its axes, which has length `size`."""
        if np.array_equal(self.indices, np.arange(self.size)):
            return array
        if self.size in self.indices:
            shape: tuple[int, ...] = tuple(1 if i == axis else n for i, n in enumerate(array.shape))
            array = np.concatenate([array, np.zeros(shape, array.dtype)], axis=axis)
        taken: NDArray[Any] = np.take(array, self.indices, axis=axis)
        return taken

    def in_blocks(self, length: int) -> Share | None:
        """Return the share of an axis whose elements are blocks of `length` adjacent elements of this axis; None if the
        share splits a block.
        """
        if self.size % length or self.length % length:
            return None
        blocks = Share(self.size // length, self.indices[::length] // length)
        return blocks if np.array_equal(blocks._spread(length), self.indices) else None


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadShare:
    """A rank's attention heads: `query` heads, and `key` heads, which also select the value heads."""

    query: Share
    key: Share
    head_dim: int

    @property
    def num_heads(self) -> int:
        """Number of query heads on the rank."""
        return self.query.length

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads on the rank."""
        return self.key.length

    @property
    def q_columns(self) -> Share:
        """The rank's share of all query heads' columns."""
        return self.query.spread(self.head_dim)

    @property
    def kv_columns(self) -> Share:
        """The rank's share of all key heads' columns, or of all value heads'."""
        return self.key.spread(self.head_dim)


def share_heads(num_heads: int, num_kv_heads: int, head_dim: int, ranks: Ranks) -> HeadShare:
    """Return a rank's heads, distributed as the module's docstring describes.

    Args:
        num_heads: a multiple of `num_kv_heads`.
    """
    group = num_heads // num_kv_heads
    if num_kv_heads < ranks.size and ranks.size % num_kv_heads == 0:
        copies = ranks.size // num_kv_heads
        key, part = divmod(ranks.rank, copies)
        keys, length = np.array([key]), -(-group // copies)
        members = part * length + np.arange(length)
        queries = np.where(members < group, key * group + members, num_heads)
    else:
        length = -(-num_kv_heads // ranks.size)
        keys = np.minimum(ranks.rank * length + np.arange(length), num_kv_heads)
        queries = Share(num_kv_heads, keys).spread(group).indices
    return HeadShare(query=Share(num_heads, queries), key=Share(num_kv_heads, keys), head_dim=head_dim)


Projections = Literal["qkv", "qk", "q"]
Outputs = int | Mapping[str, int]
"""Number of columns of one tensor at the module's own path, or a mapping from the names of sibling tensors to their
numbers of columns.
"""


@dataclass(kw_only=True)
class LinearWeight(Parameter):
    """A linear's weight [K, N]: the rows `rows` (N) of the concatenated checkpoint tensors, and their columns `depth`
    (K), times `factor`, which is one number or a number for each column. The scales of blocks, which are float16, are
    multiplied and rounded.
    """

    rows: Share
    depth: Share
    factor: Factor = 1.0

    @property
    def keeps_blocks(self) -> bool:
        """True if splitting the weight over ranks leaves blocks intact; see `Parameter.keeps_blocks`."""
        return self._blocks() is not None

    def load_blocks(self, source: TensorSource) -> BlockTensor | None:
        """See `Parameter.load_blocks`."""
        self.check(source)
        blocks, parts = self._blocks(), [source.read_blocks(name) for name in self.checkpoint_tensors]
        if blocks is None or any(part is None for part in parts):
            return None
        whole = [part for part in parts if part is not None]

        def scaled(values: list[NDArray[np.float16]]) -> NDArray[np.float16]:
            taken = blocks.take(self.rows.take(_stacked(values)), axis=1)
            of_rows = self.factor if isinstance(self.factor, float) else self.factor[:, None]
            return _scaled(taken.astype(np.float32), of_rows).astype(np.float16)

        return BlockTensor(
            integers=self.depth.take(self.rows.take(_stacked([p.integers for p in whole])), axis=1),
            scales=scaled([p.scales for p in whole]),
            minima=scaled([p.minima for p in whole]),
        )

    def _blocks(self) -> Share | None:
        return self.depth.in_blocks(BLOCK_DEPTH)


class LinearBase(Module, ABC):
    """Product hidden [T, K] @ weight [K, N] (+ bias [N]). Subclasses select a rank's part of the checkpoint's tensors
    in `share`.

    The checkpoint holds each output as `weight` [columns, in_features] (and `bias` [columns]).

    Args:
        in_features: number of input columns of the complete linear.
        outputs: outputs of the complete linear.
        stored_in: name of the one tensor, a sibling of the module, in which the checkpoint stores the outputs one after
            another.
        tied_to: the module whose table [columns, in_features] is the weight of a tied LM head.
        factor: factor of the result, or of each column of the complete linear's result, which the loaded weight and
            bias contain.
    """

    def __init__(
        self,
        in_features: int,
        outputs: Outputs,
        *,
        bias: bool = False,
        stored_in: str = "",
        tied_to: Module | None = None,
        factor: Factor = 1.0,
    ) -> None:
        super().__init__()
        self.in_features, self.has_bias, self.factor = in_features, bias, factor
        self.outputs: Mapping[str, int] = {"": outputs} if isinstance(outputs, int) else outputs
        self._stored_in = stored_in
        self._tied_to: Sequence[Module] = (tied_to,) if tied_to else ()

    @abstractmethod
    def share(self) -> tuple[Share, Share]:
        """Return this rank's shares of the concatenated outputs' columns, and of the input's columns."""

    def tensors(self) -> dict[str, int]:
        """Map the checkpoint's tensors, without ".weight" and ".bias", to their numbers of rows."""
        if self._stored_in:
            return {self.sibling(self._stored_in): sum(self.outputs.values())}
        if self._tied_to:
            return {self._tied_to[0].path: sum(self.outputs.values())}
        return {self.sibling(name) if name else self.path: columns for name, columns in self.outputs.items()}

    def declare(self) -> None:
        tensors, (rows, depth) = self.tensors(), self.share()
        factor = self.factor if isinstance(self.factor, float) else rows.take(self.factor)
        self.weight = LinearWeight(
            shape=(depth.length, rows.length),
            checkpoint_tensors={f"{path}.weight": (columns, self.in_features) for path, columns in tensors.items()},
            combine=lambda *parts: _scaled(depth.take(rows.take(_stacked(parts)), axis=1).T, factor),
            rows=rows,
            depth=depth,
            factor=factor,
        )
        if self.has_bias:
            self.bias = Parameter(
                shape=(rows.length,),
                checkpoint_tensors={f"{path}.bias": (columns,) for path, columns in tensors.items()},
                combine=lambda *parts: _scaled(rows.take(_stacked(parts)), factor),
            )

    @property
    def tied_to(self) -> Module | None:
        """Module whose table is the weight; None if the checkpoint has a tensor for this linear alone."""
        return self._tied_to[0] if self._tied_to else None

    def tie_to(self, table: Module | None) -> None:
        """Read the weight from another module's table or, with None, from the tensor at the module's own path. Call
        this on a named module.
        """
        self._tied_to = () if table is None else (table,)
        self.named(self.path)

    def forward(self, hidden: ir.Value) -> ir.Value:
        product = ops.matmul(hidden, self.weight.value(), name="product" if self.has_bias else "output")
        return self.with_bias(product)

    def with_bias(self, product: ir.Value) -> ir.Value:
        """Return the bias, or None."""
        return ops.add(product, self.bias.value(), name="output") if self.has_bias else product

    def even(self, sizes: Mapping[str, int], ranks: Ranks) -> list[Share]:
        """Return a rank's slices of several axes. Raises ConfigError, which names all axes that cannot be shared
        evenly.
        """
        shares = {name: Share.even(size, ranks) for name, size in sizes.items()}
        if odd := [f"{name} {sizes[name]}" for name, share in shares.items() if share is None]:
            raise ConfigError(
                f"{ranks.size} ranks cannot share {', '.join(odd)} evenly; use a number of ranks that divides them"
            )
        return [share for share in shares.values() if share is not None]


class ReplicatedLinear(LinearBase):
    """A linear that is complete on every rank.

    Args:
        rows: the rows of the concatenated outputs' tensors that become the linear's columns; by default all.
    """

    def __init__(
        self,
        in_features: int,
        outputs: Outputs,
        *,
        bias: bool = False,
        rows: NDArray[np.int64] | None = None,
        tied_to: Module | None = None,
        factor: Factor = 1.0,
    ) -> None:
        super().__init__(in_features, outputs, bias=bias, tied_to=tied_to, factor=factor)
        self._rows = rows

    def share(self) -> tuple[Share, Share]:
        num_rows = sum(self.outputs.values())
        rows = Share.whole(num_rows) if self._rows is None else Share(num_rows, self._rows)
        return rows, Share.whole(self.in_features)


class MergedColumnParallelLinear(LinearBase):
    """Several concatenated linears with the same input. Each linear is split by its columns, and a rank has its slice
    of every linear; their widths may differ.

    Raises:
        ConfigError: an output cannot be shared evenly; the message names all such outputs (when the module is named).
    """

    def __init__(
        self,
        in_features: int,
        outputs: Outputs,
        ranks: Ranks = ALONE,
        *,
        bias: bool = False,
        stored_in: str = "",
        factor: Factor = 1.0,
    ) -> None:
        super().__init__(in_features, outputs, bias=bias, stored_in=stored_in, factor=factor)
        self._ranks = ranks

    def share(self) -> tuple[Share, Share]:
        sizes = {self.sibling(name) if name else self.path: columns for name, columns in self.outputs.items()}
        return Share.joined(self.even(sizes, self._ranks)), Share.whole(self.in_features)


class ColumnParallelLinear(MergedColumnParallelLinear):
    """One linear, split by its columns: a rank has a slice of the columns and of the bias."""

    def __init__(self, in_features: int, out_features: int, ranks: Ranks = ALONE, *, bias: bool = False) -> None:
        super().__init__(in_features, out_features, ranks, bias=bias)


class QKVParallelLinear(LinearBase):
    """The query, key and value projections as one linear, columns q | k | v, head after head, split by heads.

    Args:
        heads: a rank's heads; see the module for copies and padding.
        interleaved: number of leading columns of each head of q and k that the checkpoint stores for interleaved RoPE,
            which rotates columns 2i and 2i + 1 together. The linear's columns are in the order of rotate-half RoPE.
        stored: the projections that the checkpoint holds: "qkv"; "qk" if keys and values are projected alike; or "q" if
            the linear has no columns for keys and values.
        replaces: tensors, siblings of the module, that a checkpoint may contain and that are not needed.
    """

    def __init__(
        self,
        in_features: int,
        heads: HeadShare,
        *,
        bias: bool = False,
        stored_in: str = "",
        interleaved: int = 0,
        stored: Projections = "qkv",
        replaces: Sequence[str] = (),
    ) -> None:
        order = np.arange(heads.head_dim)
        order[:interleaved] = order[:interleaved].reshape(-1, 2).T.ravel()
        q, k = (share.spread(heads.head_dim, order) for share in (heads.query, heads.key))
        self._replaces = replaces
        sizes = {"q_proj": q.size, "k_proj": k.size, "v_proj": k.size}
        super().__init__(in_features, dict(list(sizes.items())[: len(stored)]), bias=bias, stored_in=stored_in)
        self._rows = Share.joined([q, k, heads.kv_columns][: len(stored)])
        if stored == "qk":
            values = Share.joined([Share(q.size, q.indices[:0]), heads.kv_columns])
            self._rows = Share(self._rows.size, np.concatenate([self._rows.indices, values.indices]))

    def share(self) -> tuple[Share, Share]:
        return self._rows, Share.whole(self.in_features)

    def declare(self) -> None:
        super().declare()
        self.weight.replaces = tuple(map(self.sibling, self._replaces))


class RowParallelLinear(LinearBase):
    """One linear, split by its rows: a rank multiplies its slice of the input, and the products are summed over ranks.
    The bias is added once, to the sum.

    Args:
        outputs: number of columns; or a mapping from the name of the checkpoint's tensor, a sibling of this module, to
            it.
        depth: the rank's share of the input's columns, if it is not an even slice.

    Raises:
        ConfigError: the input cannot be shared evenly (when the module is named).
    """

    def __init__(
        self,
        in_features: int,
        outputs: Outputs,
        ranks: Ranks = ALONE,
        *,
        depth: Share | None = None,
        bias: bool = False,
        factor: float = 1.0,
    ) -> None:
        super().__init__(in_features, outputs, bias=bias, factor=factor)
        self._ranks, self._depth = ranks, depth

    def share(self) -> tuple[Share, Share]:
        depth = self._depth or self.even({f"the input of {self.path}": self.in_features}, self._ranks)[0]
        return Share.whole(sum(self.outputs.values())), depth

    def forward(self, hidden: ir.Value) -> ir.Value:
        if self._ranks.are_alone:
            return super().forward(hidden)
        partial = ops.matmul(hidden, self.weight.value(), name="partial")
        return self.with_bias(ops.all_reduce(partial, name="product" if self.has_bias else "output"))


def _scaled(values: NDArray[np.float32], factor: Factor) -> NDArray[np.float32]:
    return values if np.all(np.equal(factor, 1)) else values * np.float32(factor)


def _stacked(parts: Sequence[NDArray[Number]]) -> NDArray[Number]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
