"""The parts that decoders are built from: modules, parameters, the shares of ranks, norms and tables.
`graph/parallel.py` contains the linears.

A module has a path in the tree, which is also the prefix of its checkpoint tensors. It may be placed on a device with
`.to`, and describes its computation in `forward`, which `graph/ops.py` records. A parameter loads itself from a
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypeVar, get_args

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from chunkrt.checkpoints.source import BLOCK_DEPTH, BlockTensor, TensorSource
from chunkrt.errors import ChunkrtError, ConfigError, ModelError
from chunkrt.graph import ops
from chunkrt.graph.ops import current_trace
from chunkrt.graph.plan import ALONE, Place, Ranks

Float32 = NDArray[np.float32]
Number = TypeVar("Number", bound=np.generic)
Indices = NDArray[np.int64]

MOST_PADDING = 1 / 16
"""Share of an axis that may be padded so that no block of 4-bit weights is divided."""


@dataclass(frozen=True, eq=False)
class Share:
    """Selection of elements of an axis of length `size`, by their indices in order. The index `size` stands for a zero
    of padding.

    Attributes:
        by_rank: the indices of every rank, int64 [N, L]; one row if all ranks have the same indices.
        rank: row of this rank.
    """

    size: int
    by_rank: Indices
    rank: int = 0

    @staticmethod
    def whole(size: int) -> Share:
        """Return the share that consists of the complete axis."""
        return Share.of(size, np.arange(size))

    @staticmethod
    def of(size: int, indices: Indices) -> Share:
        """Return the share of the same elements on all ranks."""
        return Share(size, indices[None])

    @staticmethod
    def even(size: int, ranks: Ranks) -> Share:
        """Return a rank's slice, which has the same length on all ranks. The last slices are padded if the axis cannot
        be cut evenly.

        An axis that consists of blocks of 4-bit weights is cut between blocks if this adds little padding.
        """
        length = -(-size // ranks.size)
        in_blocks = -(-length // BLOCK_DEPTH) * BLOCK_DEPTH
        if size % ranks.size and not size % BLOCK_DEPTH and (in_blocks - length) <= MOST_PADDING * length:
            length = in_blocks
        indices = np.arange(ranks.size * length).reshape(ranks.size, length)
        return Share(size, np.minimum(indices, size), ranks.rank)

    @staticmethod
    def joined(shares: Sequence[Share]) -> Share:
        """Concatenate shares of consecutive axes."""
        size = sum(share.size for share in shares)
        starts = np.cumsum([0, *(share.size for share in shares)])
        num_ranks = max(len(share.by_rank) for share in shares)
        parts = [
            np.broadcast_to(
                np.where(share.by_rank == share.size, size, share.by_rank + start), (num_ranks, share.length)
            )
            for share, start in zip(shares, starts, strict=False)
        ]
        return Share(size, np.concatenate(parts, axis=1), max(share.rank for share in shares))

    @staticmethod
    def together(shares: Sequence[Share]) -> Share:
        """Concatenate shares of one axis."""
        by_rank = np.concatenate([share.by_rank for share in shares], axis=1)
        return Share(shares[0].size, by_rank, shares[0].rank)

    @property
    def indices(self) -> Indices:
        """Indices of this rank's elements."""
        own: Indices = self.by_rank[self.rank]
        return own

    @property
    def length(self) -> int:
        """Number of elements, including padding."""
        return int(self.by_rank.shape[1])

    def spread(self, width: int, order: Indices | None = None) -> Share:
        """Return the share of an axis in which each element is replaced by `width` elements, in a given order."""
        return self._each(lambda indices: _spread(indices, self.size, width, order), self.size * width)

    def through(self, indices: Indices, size: int) -> Share:
        """Return the share of an axis of length `size`, in which element i of this axis is at `indices[i]`."""
        return self._each(lambda own: np.append(indices, size)[own], size)

    def within(self, complete: Share) -> Share:
        """Return this rank's elements as a share of `complete`, which has them in another order.

        If an element occurs several times, its occurrences are matched in order.
        """
        found: dict[int, list[int]] = {}
        for place, element in enumerate(complete.indices.tolist()):
            found.setdefault(element, []).append(place)
        num_taken = dict.fromkeys(found, 0)
        places = np.full(self.length, complete.length)
        for index, element in enumerate(self.indices.tolist()):
            if element < self.size:
                places[index] = found[element][min(num_taken[element], len(found[element]) - 1)]
                num_taken[element] += 1
        return Share.of(complete.length, places)

    def places(self) -> Indices:
        """Return the place of each element of the axis in the concatenation of all ranks' shares. An element that
        several ranks have is at the first of these places.

        Raises:
            ValueError: no rank has an element.
        """
        elements, first = np.unique(self.by_rank.ravel(), return_index=True)
        places: Indices = first[elements < self.size].astype(np.int64)
        if len(places) < self.size:
            raise ValueError(f"the ranks have {len(places)} of {self.size} elements")
        return places

    def take(self, array: NDArray[Number], axis: int = 0) -> NDArray[Number]:
        """Return the selected elements of an array along an axis; padding is zero."""
        if array.shape[axis] != self.size:
            raise ValueError(f"axis {axis} of {list(array.shape)} is cut as one of {self.size} elements")
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
        size = self.size // length
        blocks = Share(size, np.minimum(self.by_rank[:, ::length] // length, size), self.rank)
        return blocks if np.array_equal(blocks.spread(length).indices, self.indices) else None

    def _each(self, change: Callable[[Indices], Indices], size: int) -> Share:
        return Share(size, np.stack([change(indices) for indices in self.by_rank]), self.rank)


def _spread(indices: Indices, size: int, width: int, order: Indices | None) -> Indices:
    order = np.arange(width) if order is None else order
    columns: Indices = (indices[:, None] * width + order).ravel()
    return np.minimum(columns, size * width)


@dataclass(kw_only=True)
class Parameter:
    """A weight of the graph and the way it is loaded.

    `checkpoint_tensors` maps the name of each tensor to read to its required shape. `combine` makes the weight, of
    shape `shape`, from these tensors in that order. `replaces` names tensors that a checkpoint may contain although
    the decoder does not need them. `axes` holds the share of each axis that the weight has, with the same elements for
    all numbers of ranks; None for an axis that is complete. It may be omitted if all axes are complete.
    """

    shape: tuple[int, ...]
    checkpoint_tensors: dict[str, tuple[int, ...]]
    combine: Callable[..., Float32]
    replaces: tuple[str, ...] = ()
    axes: tuple[Share | None, ...] = ()
    name: str = field(default="", init=False)

    def load(self, source: TensorSource) -> Float32:
        """Return the weight: read the checkpoint's tensors, check their shapes, and combine them.

        Raises:
            ModelError: a checkpoint tensor is missing or has another shape; or `combine` fails, or does not return the
                declared shape.
        """
        self.check(source)
        tensors = [source.read(name) for name in self.checkpoint_tensors]
        try:
            weight = self.combine(*tensors)
            if weight.shape != self.shape:
                raise ValueError(f"it returns {list(weight.shape)}, expected {list(self.shape)}")
        except (ChunkrtError, MemoryError):
            raise
        except Exception as error:  # a plug-in's function may raise any exception
            what = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
            raise ModelError(
                f"{source.path.name}: parameter {self.name} cannot be made from {', '.join(self.checkpoint_tensors)}: "
                f"{what}; correct its combine"
            ) from error
        return weight

    def load_blocks(self, source: TensorSource) -> BlockTensor | None:
        """Return a linear's weight in the checkpoint's own blocks of 4 bits, [N, K]; None if a tensor is not stored in
        such blocks.

        Raises:
            ModelError: as `load` does.
            QuantizationError: as `TensorSource.read_blocks` does.
        """
        self.check(source)
        return None

    @property
    def keeps_blocks(self) -> bool:
        """True if `load_blocks` can return blocks of 4 bits when all tensors are stored in them."""
        return False

    def stored_as(self, source: TensorSource) -> set[str]:
        """Return the storage types of the parameter's tensors in the checkpoint. Raises ModelError if a tensor is
        missing.
        """
        return {source.info(name).stored_as for name in self.checkpoint_tensors}

    def misfit(self, source: TensorSource) -> str:
        """Describe the parameter's first tensor with a wrong shape; empty if all shapes are right.

        Raises:
            ModelError: the checkpoint lacks a tensor.
        """
        for name, expected in self.checkpoint_tensors.items():
            found = source.info(name).shape
            if found != expected:
                return f"tensor {name} is {list(found)}, expected {list(expected)}"
        return ""

    def check(self, source: TensorSource) -> None:
        """Raise ModelError if a tensor is missing or has a wrong shape."""
        if misfit := self.misfit(source):
            raise ModelError(f"{source.path.name}: {misfit} by {self.name or 'its reader'}")

    def value(self) -> ir.Value:
        """Return the weight in the graph that is being traced."""
        return current_trace().weight(self.name, self.shape)


OUTSIDE = "is not in the module tree; assign it, or a list of modules, to an attribute of its parent"


class ModuleView:
    """A module of a tree for users. Attributes with modules, and lists of them, are those of the decoder's tree."""

    def __init__(self, module: Module) -> None:
        self._module = module

    def __repr__(self) -> str:
        return f"{type(self._module).__name__}({self.path or 'decoder'!r})"

    def __getattr__(self, name: str) -> Any:
        """Return a module below this one, or a list of modules."""
        if name.startswith("_"):  # a copy asks for such names before it has attributes
            raise AttributeError(name)
        found = vars(self._module).get(name)
        if isinstance(found, Module):
            return self._view(found)
        if isinstance(found, list) and found and all(isinstance(each, Module) for each in found):
            return [self._view(each) for each in found]
        names = sorted({child.partition(".")[0] for child, _ in self._module.children()})
        raise AttributeError(f"{self!r} has no module {name!r}; there are: {', '.join(names) or 'none'}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *{child.partition(".")[0] for child, _ in self._module.children()}]

    @property
    def path(self) -> str:
        """Path of the module in the tree; empty for the decoder."""
        return self._module.path

    def _view(self, module: Module) -> Self:
        """Return the view of another module of the tree."""
        raise NotImplementedError


class Module:
    """A node of the module tree. A module, a list of modules or a parameter joins the tree when it is assigned to an
    attribute.
    """

    def __init__(self) -> None:
        self.path = ""
        self.is_named = False
        self.device: Place | None = None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError, with the reason if the module has not declared its parameters."""
            outside = "" if self.__dict__.get("is_named", True) else f": it {OUTSIDE}"
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{outside}")

    def to(self, device: Place) -> Self:
        """Place this module on a device, with all modules below it that are not placed themselves."""
        if device not in get_args(Place):
            raise ConfigError(f"a module can be placed on 'npu' or 'cpu', not {device!r}")
        self.device = device
        return self

    def children(self) -> Iterator[tuple[str, Module]]:
        """Return direct submodules by attribute name; the elements of a list are named "name.index"."""
        for name, member in vars(self).items():
            if isinstance(member, Module):
                yield name, member
            elif isinstance(member, list):
                yield from ((f"{name}.{i}", m) for i, m in enumerate(member) if isinstance(m, Module))

    def modules(self) -> Iterator[Module]:
        """Return this module and all below it, parents first."""
        yield self
        for _, child in self.children():
            yield from child.modules()

    def parameters(self) -> Iterator[Parameter]:
        """Return all parameters of this module and of the modules below it."""
        for module in self.modules():
            yield from (member for member in vars(module).values() if isinstance(member, Parameter))

    def named(self, path: str = "") -> Self:
        """Set the paths of all modules and parameters below this module. Call this once, on the root.

        A module overrides `declare` to create parameters whose checkpoint names depend on the path.

        Raises:
            ModelError: a `declare` fails; the message names the module.
        """
        self.path, self.is_named = path, True
        try:
            self.declare()
        except ChunkrtError:
            raise
        except Exception as error:  # a plug-in's module may raise any exception
            what = f"{type(error).__name__}: {error}"
            raise ModelError(
                f"module {path!r} ({type(self).__name__}) cannot declare its parameters: {what}"
            ) from error
        for attribute, member in vars(self).items():
            if isinstance(member, Parameter):
                member.name = f"{path}.{attribute}" if path else attribute
        for name, child in self.children():
            child.named(f"{path}.{name}" if path else name)
        return self

    def declare(self) -> None:
        """Create the parameters; called when `path` is known."""

    def forward(self, *inputs: Any) -> ir.Value:
        """Describe the computation with `graph/ops.py` and submodules."""
        raise TypeError(f"{type(self).__name__} has no forward; define one, because the module is called")

    def __call__(self, *inputs: ir.Value) -> ir.Value:
        with self.scope():
            return self.forward(*inputs)

    def scope(self) -> AbstractContextManager[None]:
        """Return a context in which operators belong to this module, for a parent that calls parts of it.

        Raises:
            ValueError: the module is no part of the tree.
        """
        if not self.is_named:
            raise ValueError(f"a {type(self).__name__} is called that {OUTSIDE}")
        return current_trace().scope(self.path, self.device)

    def sibling(self, name: str) -> str:
        """Return the path of a sibling of this module: a packed linear's checkpoint tensors are siblings."""
        parent = self.path.rpartition(".")[0]
        return f"{parent}.{name}" if parent else name


class Embedding(Module):
    """Rows of a table [num_rows, width], picked by token id. The look-up runs on the CPU unless placed.

    `scale` multiplies the checkpoint's table; it does not affect an LM head that is tied to the table. The ranks share
    the rows evenly, with rows of zeros at the end if necessary.
    """

    def __init__(self, num_rows: int, width: int, *, scale: float = 1.0, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.device = "cpu"
        self.shape, self.scale = (num_rows, width), scale
        self._ranks, self._rows = ranks, Share.even(num_rows, ranks)

    def declare(self) -> None:
        self.weight = Parameter(
            shape=(self._rows.length, self.shape[1]),
            checkpoint_tensors={f"{self.path}.weight": self.shape},
            combine=lambda table: self._scaled(self._rows.take(table)),
            axes=(self._rows, None),
        )

    def _scaled(self, table: Float32) -> Float32:
        return table if self.scale == 1 else table * np.float32(self.scale)

    def forward(self, token_ids: ir.Value) -> ir.Value:
        if self._ranks.are_alone:
            return ops.gather_rows(self.weight.value(), token_ids, name="output")
        first = self._ranks.rank * self._rows.length
        rows = ops.gather_share(self.weight.value(), token_ids, first=first, all_rows=self.shape[0], name="part")
        return ops.all_reduce(rows, name="output")


class RMSNorm(Module):
    """Root-mean-square normalisation (Zhang and Sennrich, 2019, equation 4).

    `offset` is added to the checkpoint's weight: 1 if the family multiplies by 1 + w.
    """

    def __init__(self, width: int, epsilon: float, *, offset: float = 0.0) -> None:
        super().__init__()
        self.width, self.epsilon, self.offset = width, epsilon, offset

    def declare(self) -> None:
        tensors: dict[str, tuple[int, ...]] = {f"{self.path}.weight": (self.width,)}
        self.weight = Parameter(shape=(self.width,), checkpoint_tensors=tensors, combine=self._shifted)

    def _shifted(self, weight: Float32) -> Float32:
        return weight + np.float32(self.offset) if self.offset else weight

    def forward(self, hidden: ir.Value) -> ir.Value:
        return ops.rms_normalization(hidden, self.weight.value(), epsilon=self.epsilon, name="output")


class LayerNorm(Module):
    """Layer normalisation with a weight and a bias (Ba, Kiros and Hinton, 2016)."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.width, self.epsilon = width, epsilon

    def declare(self) -> None:
        shape = (self.width,)
        self.weight, self.bias = (
            Parameter(shape=shape, checkpoint_tensors={f"{self.path}.{name}": shape}, combine=lambda values: values)
            for name in ("weight", "bias")
        )

    def forward(self, hidden: ir.Value) -> ir.Value:
        return ops.layer_normalization(
            hidden, self.weight.value(), self.bias.value(), epsilon=self.epsilon, name="output"
        )


class LearnedPositions(Module):
    """A table with a row for each position, which is added to the embeddings.

    Args:
        num_unused: number of rows before that of position 0.
    """

    def __init__(self, num_positions: int, width: int, *, num_unused: int = 0) -> None:
        super().__init__()
        self.shape, self.num_unused = (num_positions, width), num_unused

    def declare(self) -> None:
        positions, width = self.shape
        self.weight = Parameter(
            shape=self.shape,
            checkpoint_tensors={f"{self.path}.weight": (positions + self.num_unused, width)},
            combine=lambda table: table[self.num_unused :],
        )

    def forward(self, hidden: ir.Value) -> ir.Value:
        return ops.add_positions(hidden, self.weight.value(), name="sum")


class HeadNorm(Module):
    """RMSNorm of single heads. It runs on the CPU unless placed.

    Args:
        parts: number of consecutive heads for each checkpoint tensor `weight` [head_dim], a sibling of this module.
            Later heads pass through.
        offset: see `RMSNorm`.
        num_plain: number of heads after these that are normalised without a weight.
    """

    def __init__(
        self, parts: dict[str, int], head_dim: int, epsilon: float, *, offset: float = 0.0, num_plain: int = 0
    ) -> None:
        super().__init__()
        self.device = "cpu"
        self.parts, self.head_dim, self.epsilon, self.offset = parts, head_dim, epsilon, offset
        self.num_plain = num_plain

    def declare(self) -> None:
        numbers = [*self.parts.values(), self.num_plain]
        self.weight = Parameter(
            shape=(sum(numbers), self.head_dim),
            checkpoint_tensors={f"{self.sibling(part)}.weight": (self.head_dim,) for part in self.parts},
            combine=self._by_head,
            axes=(Share.of(len(numbers), np.repeat(np.arange(len(numbers)), numbers)), None),
        )

    def _by_head(self, *weights: Float32) -> Float32:
        rows = np.repeat(np.stack(weights), list(self.parts.values()), axis=0)
        rows = rows + np.float32(self.offset) if self.offset else rows
        return np.concatenate([rows, np.ones((self.num_plain, self.head_dim), np.float32)])

    def forward(self, value: ir.Value) -> ir.Value:
        return ops.head_norm(value, self.weight.value(), epsilon=self.epsilon, name="output")


class DepthwiseWeights(Module):
    """Weights of a convolution over each channel: weight [channels, 1, taps] and, with a bias, [channels].

    A convolution of one tap gets a leading zero tap, because kernels need at least two. `share` selects the rank's
    channels, in the order of the convolution's input; by default all channels in the checkpoint's order.
    """

    def __init__(self, channels: int, taps: int, *, bias: bool = False, share: Share | None = None) -> None:
        super().__init__()
        self.shape, self.has_bias = (channels, 1, taps), bias
        self._share = Share.whole(channels) if share is None else share

    def declare(self) -> None:
        channels, one, taps = self.shape
        self.weight = Parameter(
            shape=(self._share.length, one, max(taps, 2)),
            checkpoint_tensors={f"{self.path}.weight": self.shape},
            combine=lambda tensor: np.pad(self._share.take(tensor), [(0, 0), (0, 0), (max(2 - taps, 0), 0)]),
            axes=(self._share, None, None),
        )
        if self.has_bias:
            self.bias = Parameter(
                shape=(self._share.length,),
                checkpoint_tensors={f"{self.path}.bias": (channels,)},
                combine=self._share.take,
                axes=(self._share,),
            )


class Constant(Module):
    """Constant float32 values that are not in any checkpoint."""

    def __init__(self, values: Float32) -> None:
        super().__init__()
        self._values = values

    def declare(self) -> None:
        self.weight = Parameter(shape=self._values.shape, checkpoint_tensors={}, combine=lambda: self._values)

    def forward(self) -> ir.Value:
        return self.weight.value()
