"""A prefix: what a state holds of its first tokens, in pieces that other states can be given.

A piece holds the keys and values of some positions, those of layers with a window among them if they were still there.
Recurrent tensors belong to one position. Tensors of one form lie in one array, so that a piece is a few arrays and not
two a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from chunkrt.runtime.buffers import Array
from chunkrt.runtime.state_tensors import StateTensors, Write


class Form(NamedTuple):
    """Caches or rings that are alike: [heads, positions, width] of a dtype, so many in a piece's array."""

    names: tuple[str, ...]
    heads: int
    width: int
    dtype: str

    @property
    def position_bytes(self) -> int:
        """Of all of them."""
        return len(self.names) * self.heads * self.width * np.dtype(self.dtype).itemsize

    def empty(self, num_positions: int) -> Array:
        """[tensors, heads, positions, width]."""
        return np.empty((len(self.names), self.heads, num_positions, self.width), self.dtype)


class PrefixPiece(NamedTuple):
    """Positions `start` to `end`: an array for each form of caches, and of rings if it has them."""

    start: int
    end: int
    caches: tuple[Array, ...]
    rings: tuple[Array, ...] | None


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """What a state is to hold at `position`.

    pieces: consecutive, up to the position; those before the state's own may be missing. rings_from: from where on to
        the position they all have rings. recurrent: a tensor for each of the state's, in their order.
    """

    forms: StateForms
    position: int
    rings_from: int
    pieces: tuple[PrefixPiece, ...]
    recurrent: tuple[Array, ...]


class StateForms:
    """How the tensors of states that are alike lie in pieces, whatever their capacity."""

    def __init__(self, tensors: StateTensors) -> None:
        self.caches = _forms(tensors.caches)
        self.rings = _forms(tensors.rings)
        self.recurrent = {name: array.shape for name, array in tensors.recurrent.items()}
        self.ring_slots = tensors.ring_slots if tensors.rings else 0
        self.window = tensors.window
        self.cache_bytes = sum(form.position_bytes for form in self.caches)
        """Of a position."""
        self.ring_bytes = sum(form.position_bytes for form in self.rings)
        """Of a position."""
        self.recurrent_bytes = sum(array.nbytes for array in tensors.recurrent.values())

    def describe(self) -> list[object]:
        """What two that understand each other's pieces have in common, for JSON."""
        return [[list(map(list, self.caches)), list(map(list, self.rings))], sorted(self.recurrent.items())]


def copied(tensors: StateTensors, forms: tuple[Form, ...], slots: slice | Array) -> tuple[Array, ...]:
    """What caches or rings hold at some slots, in the arrays of a piece."""
    found = []
    for form in forms:
        num_positions = slots.stop - slots.start if isinstance(slots, slice) else len(slots)
        into = form.empty(num_positions)
        for index, name in enumerate(form.names):
            into[index] = tensors.rows(name, slots)
        found.append(into)
    return tuple(found)


def writes_of(prefix: Prefix, tensors: StateTensors) -> tuple[Write, ...]:
    """What to write so that a state holds a prefix."""
    writes: list[Write] = []
    forms, size = prefix.forms, tensors.ring_slots
    for piece in prefix.pieces:
        end = min(piece.end, prefix.position)
        for form, values in zip(forms.caches, piece.caches, strict=True):
            slots, length = slice(piece.start, end), end - piece.start
            writes += [tensors.to_be_rows(n, slots, values[i, :, :length]) for i, n in enumerate(form.names)]
        first = max(piece.start, prefix.rings_from)
        if first < end and tensors.rings:
            assert piece.rings is not None
            in_rings, held = np.arange(first, end) % size, slice(first - piece.start, end - piece.start)
            for form, values in zip(forms.rings, piece.rings, strict=True):
                writes += [tensors.to_be_rows(n, in_rings, values[i, :, held]) for i, n in enumerate(form.names)]
    writes += [(array, ..., value) for array, value in zip(tensors.recurrent.values(), prefix.recurrent, strict=True)]
    return tuple(writes)


def _forms(arrays: Mapping[str, Array]) -> tuple[Form, ...]:
    alike: dict[tuple[int, int, str], list[str]] = {}
    for name, array in arrays.items():
        alike.setdefault((array.shape[0], array.shape[2], array.dtype.name), []).append(name)
    return tuple(Form(tuple(names), *form) for form, names in alike.items())
