"""A radix tree over tokens, in steps of 32, whose nodes contain the contents of states for these tokens.

A node contains 32 tokens, or fewer at the end of a prompt that no longer prompt continues. Caches and rings can be cut
at any token, so a hit may end within a node. Recurrent tensors are kept only at some positions; with such tensors a hit
can end only at these positions.

An interrupt may occur at any point. Therefore every change is a single assignment, after which the tree is consistent.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from chunkrt.runtime.buffers import Array
from chunkrt.runtime.prefix import Prefix, PrefixPiece, StateForms
from chunkrt.runtime.state_tensors import first_seen

STEP = 32
"""Number of tokens of a node."""

NODE_BYTES = 1024
"""Approximate size of a node without its arrays."""

Tokens = tuple[int, ...]


Root = tuple[str, int]
"""Properties, in addition to tokens, that the prefixes of one tree have in common: a salt, which separates trust
domains, because a prefix under one salt is never found under another; and the first row of the rotary tables that the
states use.
"""


class TreeNode:
    """Tokens that follow the tokens of `parent`, with a state's contents for these tokens.

    Attributes:
        recurrent: recurrent tensors by position.
        used: time of the last use, on the tree's clock.
    """

    __slots__ = ("children", "parent", "piece", "recurrent", "tokens", "used")

    def __init__(self, parent: TreeNode | None, tokens: Tokens, piece: PrefixPiece, used: int) -> None:
        self.parent, self.tokens, self.piece, self.used = parent, tokens, piece, used
        self.children: dict[Tokens, TreeNode] = {}
        self.recurrent: dict[int, tuple[Array, ...]] = {}

    def begins(self, tokens: Tokens) -> bool:
        """Return True if the given tokens begin with all tokens of the node."""
        return self.tokens == tokens[: len(self.tokens)]

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the node, without its children."""
        arrays = (*self.piece.caches, *(self.piece.rings or ()), *(a for kept in self.recurrent.values() for a in kept))
        return NODE_BYTES + sum(array.nbytes for array in arrays)


@dataclass(frozen=True, kw_only=True)
class Addition:
    """Contents that a tree lacks: new nodes, or missing rings or recurrent tensors of existing nodes.

    Attributes:
        pieces: pieces in the order of their positions; a piece without caches adds rings to an existing node.
        recurrent: recurrent tensors by position.
    """

    pieces: tuple[PrefixPiece, ...]
    recurrent: dict[int, tuple[Array, ...]]


class PrefixTree:
    """Tree for states with the same tensors and the same offset in the rotary tables. It is not thread-safe."""

    def __init__(self, forms: StateForms, step: int) -> None:
        self.forms = forms
        self._step = step
        """Hits end at multiples of this number."""
        self._root = TreeNode(None, (), PrefixPiece(0, 0, (), None), 0)
        self._num_bytes: int | None = 0
        """Number of bytes; None during a change, or after an interrupt during a change."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all nodes."""
        if self._num_bytes is None:
            self._num_bytes = sum(node.num_bytes for node in self.nodes())
        return self._num_bytes

    @property
    def is_empty(self) -> bool:
        """True if the tree contains no node."""
        return not self._root.children

    def path(self, tokens: Sequence[int]) -> list[TreeNode]:
        """Return the nodes along the given tokens. Only the first tokens of the last node may match."""
        found, node, position = list[TreeNode](), self._root, 0
        while child := node.children.get(tuple(tokens[position : position + STEP])):
            found.append(child)
            if len(child.tokens) < STEP:
                return found
            node, position = child, position + STEP
        rest = tuple(tokens[position : position + STEP])
        alike = max(node.children.values(), key=lambda child: shared(child.tokens, rest), default=None)
        if alike is not None and shared(alike.tokens, rest):
            found.append(alike)
        return found

    def find(self, tokens: Sequence[int], after: int, limit: int, clock: int) -> Prefix | None:
        """Return the longest stored prefix of the given tokens that ends after `after`, and at most at `limit`."""
        path = self.path(tokens)
        for node in path:
            node.used = clock
        for index in reversed(range(len(path))):
            node = path[index]
            start = node.piece.start
            limit = min(limit, start + shared(node.tokens, tokens[start : start + STEP]))
            for position in self._ends(node, limit):
                if position <= after:
                    return None
                if (rings_from := self._rings_from(path[: index + 1], position)) is not None:
                    first = min(after, rings_from) if self.forms.rings else after
                    pieces = tuple(one.piece for one in path[: index + 1] if one.piece.end > first)
                    kept = node.recurrent[position] if self.forms.recurrent else ()
                    return Prefix(position=position, rings_from=rings_from, pieces=pieces, recurrent=kept)
        return None

    def missing(self, tokens: Sequence[int], rings_first: int, clock: int) -> list[tuple[Tokens, int, bool]]:
        """Return the steps that a state with these tokens could add. Each step consists of its tokens, its start, and
        True if caches are missing.

        Args:
            rings_first: the first position that the state's rings contain.
        """
        found: list[tuple[Tokens, int, bool]] = []
        path = self.path(tokens)
        for node in path:
            node.used = clock
        for start in range(0, len(tokens), STEP):
            part = tuple(tokens[start : start + STEP])
            known = path[start // STEP] if start // STEP < len(path) else None
            if known is None or known.tokens[: len(part)] != part:
                found.append((part, start, True))
            elif self.forms.rings and known.piece.rings is None and rings_first <= start and known.tokens == part:
                found.append((part, start, False))
        return found

    def matched(self, tokens: Sequence[int]) -> int:
        """Return the number of first tokens that the tree contains, even if no hit may end there."""
        path = self.path(tokens)
        if not path:
            return 0
        start = path[-1].piece.start
        return start + shared(path[-1].tokens, tokens[start : start + STEP])

    def lacks_recurrent(self, tokens: Sequence[int]) -> bool:
        """Return True if the tree lacks recurrent tensors at the end of these tokens."""
        if not self.forms.recurrent:
            return False
        return self.matched(tokens) < len(tokens) or len(tokens) not in self.path(tokens)[-1].recurrent

    def add(self, tokens: Sequence[int], addition: Addition, clock: int) -> None:
        """Add the parts that are still missing, except for parts after a node that was removed in the meantime."""
        before, self._num_bytes = self.num_bytes, None
        self._num_bytes = before + self._add(tokens, addition, clock)

    def _add(self, tokens: Sequence[int], addition: Addition, clock: int) -> int:
        """Add parts like `add`, and return the number of added bytes."""
        pieces = {piece.start: piece for piece in addition.pieces}
        node, added = self._root, 0
        for start in range(0, len(tokens), STEP):
            part = tuple(tokens[start : start + STEP])
            child = _beginning_with(node, part)
            piece = pieces.get(start)
            if child is None:
                if piece is None or len(piece.caches) < len(self.forms.caches):
                    return added
                added -= sum(one.num_bytes for one in node.children.values() if one.begins(part))
                child = self._grown(node, part, piece, clock)
                added += child.num_bytes
            elif piece is not None and child.piece.rings is None and child.tokens == part:
                child.piece = child.piece._replace(rings=piece.rings)
                added += sum(array.nbytes for array in piece.rings or ())
            child.used = clock
            for position, kept in addition.recurrent.items():
                if start < position <= start + len(part) and position not in child.recurrent:
                    child.recurrent[position] = kept
                    added += sum(array.nbytes for array in kept)
            node = child
        return added

    def remove(self, leaf: TreeNode) -> None:
        """Remove a node without children."""
        assert leaf.parent is not None
        before, self._num_bytes = self.num_bytes, None
        leaf.parent.children.pop(leaf.tokens, None)
        self._num_bytes = before - leaf.num_bytes

    def nodes(self) -> Iterator[TreeNode]:
        """Yield all nodes, a parent before its children."""
        waiting = [*self._root.children.values()]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()

    def _grown(self, parent: TreeNode, tokens: Tokens, piece: PrefixPiece, clock: int) -> TreeNode:
        """Add a child. It replaces children that contain only the first of its tokens."""
        node = TreeNode(parent, tokens, piece, clock)
        shorter = [child for child in parent.children.values() if child.begins(tokens)]
        for child in shorter:
            node.recurrent |= child.recurrent
        if shorter:
            left = {key: child for key, child in parent.children.items() if child not in shorter}
            parent.children = {**left, tokens: node}
        else:
            parent.children[tokens] = node
        return node

    def _ends(self, node: TreeNode, limit: int) -> list[int]:
        """Return the positions in a node at which a hit may end, in descending order."""
        if self.forms.recurrent:
            return sorted((p for p in node.recurrent if p <= limit and not p % self._step), reverse=True)
        last = limit - limit % self._step
        return [last] if last > node.piece.start else []

    def _rings_from(self, path: Sequence[TreeNode], position: int) -> int | None:
        """Return the position from which nodes contain all rings up to a given position. Return None if the window at
        the given position begins earlier.
        """
        if not self.forms.rings:
            return 0
        first = position
        for node in reversed(path):
            if node.piece.rings is None:
                break
            first = node.piece.start
        first = max(first, position - self.forms.ring_slots)
        return first if first <= first_seen(self.forms.window, position) else None


def _beginning_with(node: TreeNode, tokens: Tokens) -> TreeNode | None:
    """Return a child whose tokens begin with the given tokens."""
    if found := node.children.get(tokens):
        return found
    if len(tokens) == STEP:
        return None
    return next((child for child in node.children.values() if child.tokens[: len(tokens)] == tokens), None)


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common beginning of two token sequences."""
    if one == other:
        return len(one)
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def evict(trees: Sequence[PrefixTree], limit: int, kept: Collection[TreeNode] = ()) -> None:
    """Remove leaves if the trees exceed a limit, the least recently used first, except for nodes in `kept`.

    A little more than necessary is removed, so not every call has to search for leaves.
    """
    num_bytes = sum(tree.num_bytes for tree in trees)
    if num_bytes <= limit:
        return
    order, least = count(), limit - limit // 16
    nodes = ((node, tree) for tree in trees for node in tree.nodes() if not node.children)
    leaves = [(node.used, next(order), node, tree) for node, tree in nodes if node not in kept]
    heapq.heapify(leaves)
    while leaves and num_bytes > least:
        _, _, leaf, tree = heapq.heappop(leaves)
        parent = leaf.parent
        assert parent is not None
        num_bytes -= leaf.num_bytes
        tree.remove(leaf)
        if not parent.children and parent.parent is not None and parent not in kept:
            heapq.heappush(leaves, (parent.used, next(order), parent, tree))
