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
from typing import Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from chunkrt.checkpoints.source import BLOCK_DEPTH, BlockTensor, TensorSource
from chunkrt.graph import ops
from chunkrt.graph.modules import HeadNorm, Module, Number, Parameter, Share
from chunkrt.graph.plan import ALONE, Ranks

Factor = float | NDArray[np.float32]
"""Factor of a linear's result, or of each of its columns."""


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
        each, part = np.divmod(np.arange(ranks.size)[:, None], copies)
        length = -(-group // copies)
        members = part * length + np.arange(length)
        key = Share(num_kv_heads, each, ranks.rank)
        query = Share(num_heads, np.where(members < group, each * group + members, num_heads), ranks.rank)
    else:
        length = -(-num_kv_heads // ranks.size)
        each = np.minimum(np.arange(ranks.size * length).reshape(ranks.size, length), num_kv_heads)
        key = Share(num_kv_heads, each, ranks.rank)
        query = key.spread(group)
    return HeadShare(query=query, key=key, head_dim=head_dim)


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
        self.columns = rows
        factor = self.factor if isinstance(self.factor, float) else rows.take(self.factor)
        self.weight = LinearWeight(
            shape=(depth.length, rows.length),
            checkpoint_tensors={f"{path}.weight": (columns, self.in_features) for path, columns in tensors.items()},
            combine=lambda *parts: _scaled(depth.take(rows.take(_stacked(parts)), axis=1).T, factor),
            axes=(depth, rows),
            rows=rows,
            depth=depth,
            factor=factor,
        )
        if self.has_bias:
            self.bias = Parameter(
                shape=(rows.length,),
                checkpoint_tensors={f"{path}.bias": (columns,) for path, columns in tensors.items()},
                axes=(rows,),
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
        """Return the product plus the bias, if the linear has one."""
        return ops.add(product, self.bias.value(), name="output") if self.has_bias else product

    def gathered(self, hidden: ir.Value) -> ir.Value:
        """Return the columns of all ranks, of which every rank computes its own columns."""
        part = ops.matmul(hidden, self.weight.value(), name="product" if self.has_bias else "part")
        if self.has_bias:
            part = ops.add(part, self.bias.value(), name="part")
        return ops.all_gather(part, self.columns.places(), name="output")


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
        rows = Share.whole(num_rows) if self._rows is None else Share.of(num_rows, self._rows)
        return rows, Share.whole(self.in_features)


class ColumnShareLinear(LinearBase):
    """A linear of which a rank has the columns of a share.

    Args:
        rows: the rank's share of the rows of the concatenated outputs' tensors.
    """

    def __init__(
        self, in_features: int, outputs: Outputs, rows: Share, *, bias: bool = False, factor: Factor = 1.0
    ) -> None:
        super().__init__(in_features, outputs, bias=bias, factor=factor)
        self._rows = rows

    def share(self) -> tuple[Share, Share]:
        return self._rows, Share.whole(self.in_features)


class MergedColumnParallelLinear(LinearBase):
    """Several concatenated linears with the same input. Each linear is split by its columns, and a rank has its slice
    of every linear; their widths may differ. If a width is not a multiple of the number of ranks, columns of zeros are
    added.
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
        slices = [Share.even(columns, self._ranks) for columns in self.outputs.values()]
        return Share.joined(slices), Share.whole(self.in_features)


class ColumnParallelLinear(MergedColumnParallelLinear):
    """One linear, split by its columns: a rank has a slice of the columns and of the bias.

    Args:
        outputs: number of columns; or a mapping from the name of the checkpoint's tensor, a sibling of this module, to
            it.
        gathers: whether every rank gets the columns of all ranks. Otherwise a rank gets its own columns, which may
            include columns of zeros at the end.
    """

    def __init__(
        self,
        in_features: int,
        outputs: Outputs,
        ranks: Ranks = ALONE,
        *,
        bias: bool = False,
        gathers: bool = False,
        factor: Factor = 1.0,
    ) -> None:
        super().__init__(in_features, outputs, ranks, bias=bias, factor=factor)
        self._gathers = gathers and not ranks.are_alone

    def forward(self, hidden: ir.Value) -> ir.Value:
        return self.gathered(hidden) if self._gathers else super().forward(hidden)


class VocabParallelHead(LinearBase):
    """The LM head, split by the vocabulary. The logits of all ranks are gathered on the leading rank; without a leader,
    on every rank. If the vocabulary is not a multiple of the number of ranks, columns of zeros are added, which the
    gathered logits do not contain.
    """

    def __init__(
        self,
        in_features: int,
        vocab_size: int,
        ranks: Ranks = ALONE,
        *,
        tied_to: Module | None = None,
        factor: Factor = 1.0,
    ) -> None:
        super().__init__(in_features, vocab_size, tied_to=tied_to, factor=factor)
        self._ranks = ranks
        self.num_columns = Share.even(vocab_size, ranks).length
        """Number of the rank's logits, including padding."""

    def share(self) -> tuple[Share, Share]:
        (vocab_size,) = self.outputs.values()
        return Share.even(vocab_size, self._ranks), Share.whole(self.in_features)

    def part(self, hidden: ir.Value) -> ir.Value:
        """Return the rank's logits. Call this in the module's scope."""
        return ops.matmul(hidden, self.weight.value(), name="output" if self._ranks.are_alone else "part")

    def gather(self, part: ir.Value) -> ir.Value:
        """Return the logits of all ranks. Call this in the module's scope."""
        return part if self._ranks.are_alone else ops.all_gather(part, self.columns.places(), name="output")

    def forward(self, hidden: ir.Value) -> ir.Value:
        return self.gather(self.part(hidden))


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
            values = Share.joined([Share(q.size, q.by_rank[:, :0], q.rank), heads.kv_columns])
            self._rows = Share.together([self._rows, values])

    def share(self) -> tuple[Share, Share]:
        return self._rows, Share.whole(self.in_features)

    def declare(self) -> None:
        super().declare()
        self.weight.replaces = tuple(map(self.sibling, self._replaces))


class WideNorm(HeadNorm):
    """Norms over all heads of q, and over all heads of k. The columns q | k | v of all ranks are gathered, so that each
    norm is that of one rank, and a rank picks its heads.

    Args:
        epsilon: see `RMSNorm`.
    """

    def __init__(self, heads: HeadShare, epsilon: float, ranks: Ranks = ALONE) -> None:
        super().__init__({"q_norm": 1, "k_norm": 1}, heads.q_columns.size, epsilon)
        self._ranks = ranks
        self._columns = Share.joined([heads.q_columns, heads.kv_columns, heads.kv_columns])

    def forward(self, value: ir.Value) -> ir.Value:
        if self._ranks.are_alone:
            return super().forward(value)
        normed = super().forward(ops.all_gather(value, self._columns.places(), name="heads_of_all"))
        return ops.pick_columns(normed, self._columns.indices)


class RowParallelLinear(LinearBase):
    """One linear whose input is split over ranks. The bias is added once.

    If the ranks sum (`Ranks.sums`), the linear is split by its rows: a rank multiplies its slice of the input, and the
    products are summed over ranks. Otherwise the input is gathered, the linear is split by its columns, and its output
    is gathered, so that every column is computed as on one rank.

    Args:
        outputs: number of columns; or a mapping from the name of the checkpoint's tensor, a sibling of this module, to
            it.
        depth: the rank's share of the input's columns, if it is not an even slice.
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
        self._ranks, self._depth = ranks, Share.even(in_features, ranks) if depth is None else depth

    def share(self) -> tuple[Share, Share]:
        columns = sum(self.outputs.values())
        if self._ranks.sums:
            return Share.whole(columns), self._depth
        return Share.even(columns, self._ranks), Share.whole(self.in_features)

    def forward(self, hidden: ir.Value) -> ir.Value:
        if self._ranks.are_alone:
            return super().forward(hidden)
        if not self._ranks.sums:
            return self.gathered(ops.all_gather(hidden, self._depth.places(), name="input"))
        partial = ops.matmul(hidden, self.weight.value(), name="partial")
        return self.with_bias(ops.all_reduce(partial, name="product" if self.has_bias else "output"))


def _scaled(values: NDArray[np.float32], factor: Factor) -> NDArray[np.float32]:
    return values if np.all(np.equal(factor, 1)) else values * np.float32(factor)


def _stacked(parts: Sequence[NDArray[Number]]) -> NDArray[Number]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
