"""A prefix: the contents of a state for its first tokens, as pieces that can be copied into other states.

A piece contains the keys and values of consecutive positions. For layers with a window it contains them only if they
were still available. Recurrent tensors belong to one position. Tensors of the same form share one array, so a piece
consists of a few arrays instead of two for each layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from chunkrt.runtime.buffers import Array
from chunkrt.runtime.state_tensors import Stack, StateTensors, Write


class PrefixPiece(NamedTuple):
    """Contents of the positions `start` to `end`: an array for each form of caches, and, if available, one for each
    form of rings.
    """

    start: int
    end: int
    caches: tuple[Array, ...]
    rings: tuple[Array, ...] | None


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """Contents of a state at `position`.

    Attributes:
        pieces: consecutive pieces up to the position; pieces that the state already contains may be missing.
        rings_from: the position from which all pieces contain rings.
        recurrent: the recurrent tensors, in the order of the state's.
    """

    position: int
    rings_from: int
    pieces: tuple[PrefixPiece, ...]
    recurrent: tuple[Array, ...]


class StateForms:
    """Layout of pieces, which is the same for all states with the same tensors, regardless of their capacity. Its
    stacks have no slots.
    """

    def __init__(self, tensors: StateTensors) -> None:
        self.caches = tuple(stack._replace(array=stack.empty(0)) for stack in tensors.cache_stacks)
        self.rings = tuple(stack._replace(array=stack.empty(0)) for stack in tensors.ring_stacks)
        self.recurrent = {name: array.shape for name, array in tensors.recurrent.items()}
        self.ring_slots = tensors.ring_slots if tensors.rings else 0
        self.window = tensors.window
        self.cache_bytes = sum(stack.slot_bytes for stack in self.caches)
        """Bytes of one position in all caches."""
        self.ring_bytes = sum(stack.slot_bytes for stack in self.rings)
        """Bytes of one position in all rings."""
        self.recurrent_bytes = sum(array.nbytes for array in tensors.recurrent.values())

    def describe(self) -> list[object]:
        """Return a JSON description. It is equal for states that can exchange pieces."""
        forms = [[_described(stack) for stack in stacks] for stacks in (self.caches, self.rings)]
        return [forms, sorted(self.recurrent.items())]


def copied(tensors: StateTensors, stacks: tuple[Stack, ...], slots: slice | Array) -> tuple[Array, ...]:
    """Copy the contents of caches or rings at the given slots into new arrays of a piece."""
    found = []
    for stack in stacks:
        num_positions = slots.stop - slots.start if isinstance(slots, slice) else len(slots)
        found.append(stack.empty(num_positions))
        tensors.rows_of_all(stack, slots, found[-1])
    return tuple(found)


def is_held(piece: PrefixPiece, tensors: StateTensors) -> bool:
    """Return True if the caches of a state still contain a piece that was copied from or to them."""
    return bool(piece.caches) and tensors.contains(piece.start, piece.caches[0])


def hold(piece: PrefixPiece, tensors: StateTensors) -> None:
    """Record that the caches of a state contain a piece."""
    if piece.caches:
        tensors.note_piece(piece.start, piece.end, piece.caches[0])


def writes_of(prefix: Prefix, tensors: StateTensors) -> tuple[Write, ...]:
    """Return the writes that copy a prefix into a state, except for the caches that `is_held` finds there."""
    writes: list[Write] = []
    size = tensors.ring_slots
    for piece in prefix.pieces:
        end = min(piece.end, prefix.position)
        slots, length = slice(piece.start, end), end - piece.start
        if not is_held(piece, tensors):
            for stack, values in zip(tensors.cache_stacks, piece.caches, strict=True):
                writes += tensors.to_be_rows_of_all(stack, slots, values[:, :, :length])
        first = max(piece.start, prefix.rings_from)
        if first < end and tensors.rings:
            assert piece.rings is not None
            in_rings, held = np.arange(first, end) % size, slice(first - piece.start, end - piece.start)
            for stack, values in zip(tensors.ring_stacks, piece.rings, strict=True):
                writes += tensors.to_be_rows_of_all(stack, in_rings, values[:, :, held])
    writes += [(array, ..., value) for array, value in zip(tensors.recurrent.values(), prefix.recurrent, strict=True)]
    return tuple(writes)


def _described(stack: Stack) -> list[object]:
    _, heads, _, width = stack.array.shape
    return [stack.names, heads, width, stack.array.dtype.name]
