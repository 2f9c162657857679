"""Batchers choose the rows of the next chunk from the waiting sequences.

A batcher is pure, like a policy: it receives the waiting sequences, returns rows, and keeps no state. The scheduler and
the simulator use the same objects. A batcher cannot change a result, only the time at which it is available.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from chunkrt.errors import ChunkrtError, ConfigError
from chunkrt.plugins import PluginGroup

DEFAULT_BATCHER = "packed"

MOST_WHILE_DECODING = 2
"""Maximum number of chunks in flight while a sequence decodes, because its token waits for all earlier chunks."""

MOST_PASSED_OVER = 8
"""Number of consecutive chunks without a row of a prompt after which this prompt takes precedence."""


class Waiting(NamedTuple):
    """A sequence that waits for rows.

    Attributes:
        num_tokens: number of waiting tokens, at least 1.
        is_decode: True if the sequence decodes, so a caller waits for its single token.
        num_passed: number of chunks formed since the last chunk that contained a row of the sequence.
        step: the tokens may be split only after a multiple of this number, because other splits would change results.
    """

    num_tokens: int
    is_decode: bool
    num_passed: int
    step: int


Take = tuple[int, int]
"""Rows of the next chunk: the index of a waiting sequence, and the number of its tokens."""


class Sharer(Protocol):
    """A request, real or simulated, that shares chunks. See `Waiting` for the attributes."""

    num_passed: int

    @property
    def num_left(self) -> int:
        """Number of tokens that no chunk has taken yet."""
        ...

    @property
    def is_decode(self) -> bool:
        """True if the request waits for the row of a single token."""
        ...

    @property
    def step(self) -> int:
        """See `Waiting.step`."""
        ...


AnySharer = TypeVar("AnySharer", bound=Sharer)


class Batcher(Protocol):
    """Rule that forms chunks from waiting sequences."""

    name: str

    def next_chunk(self, waiting: Sequence[Waiting], chunk_length: int) -> Sequence[Take]:
        """Choose the rows of the next chunk.

        Args:
            waiting: the waiting sequences in order of arrival, at least one.
            chunk_length: maximum number of rows of the chunk.

        Returns:
            At least one entry, in the order of the rows in the chunk. Each sequence occurs at most once.
        """
        ...


class SequentialBatcher:
    """Batcher that processes one sequence after the other, in order of arrival, without sharing chunks."""

    name = "sequential"

    def next_chunk(self, waiting: Sequence[Waiting], chunk_length: int) -> Sequence[Take]:
        """Fill the chunk with tokens of the first sequence only."""
        return [(0, min(waiting[0].num_tokens, chunk_length))]


class Packed:
    """Batcher that fills every chunk: decoding sequences come first, then prompts in order of arrival.

    So a decoding sequence never waits behind a long prompt, because prompts only take the remaining rows. A prompt
    takes precedence if several consecutive chunks contained none of its rows.

    Source: Agrawal et al., Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve, OSDI 2024.
    """

    name = "packed"

    def next_chunk(self, waiting: Sequence[Waiting], chunk_length: int) -> Sequence[Take]:
        """Fill the chunk with rows of all waiting sequences, in order of precedence."""

        def rank(index: int) -> tuple[bool, bool, int, int]:
            one = waiting[index]
            is_late = one.num_passed >= MOST_PASSED_OVER
            return not is_late, not one.is_decode, -one.num_passed if one.is_decode else 0, index

        taken, room = [], chunk_length
        for index in sorted(range(len(waiting)), key=rank):
            if num_tokens := most_tokens(waiting[index], room, chunk_length):
                taken.append((index, num_tokens))
                room -= num_tokens
        return taken


def most_tokens(one: Waiting, room: int, chunk_length: int) -> int:
    """Return the number of a sequence's tokens that fit into `room` rows of a chunk, possibly 0."""
    if one.num_tokens <= room:
        return one.num_tokens
    return room if room == chunk_length else room - room % one.step


BATCHERS: dict[str, Batcher] = {batcher.name: batcher for batcher in (Packed(), SequentialBatcher())}


def _check_plugin(name: str, found: Any) -> str:
    if isinstance(found, type):
        return "is a class, expected an instance of it"
    if not callable(getattr(found, "next_chunk", None)):
        return "is not a batcher: expected name and next_chunk"
    return "" if getattr(found, "name", None) == name else f"is named {getattr(found, 'name', None)!r}, not {name!r}"


PLUGINS: PluginGroup[Batcher] = PluginGroup(
    "chunkrt.batchers", error=ConfigError, own=tuple(BATCHERS), check=_check_plugin
)
"""Entry points of plug-in batchers. The name of an entry point is the name of its batcher."""


def batcher_names() -> tuple[str, ...]:
    """Return the names of the built-in batchers, and of those from plug-ins."""
    return (*BATCHERS, *PLUGINS.names)


def find_batcher(batcher: str | Batcher) -> Batcher:
    """Find a built-in or plug-in batcher by name; return a batcher unchanged.

    Raises:
        ConfigError: no batcher has that name (the message suggests the nearest name and lists all), or the plug-in is
            broken; or the object is no batcher.
    """
    return PLUGINS.choose(batcher, BATCHERS, "batcher")


def may_enter(num_in_flight: int, requests: Sequence[Sharer]) -> bool:
    """Return True if another chunk may enter the chunks in flight, next to the requests that have not ended."""
    return num_in_flight < MOST_WHILE_DECODING or not any(request.is_decode for request in requests)


def next_rows(batcher: Batcher, requests: Sequence[AnySharer], chunk_length: int) -> list[tuple[AnySharer, int]]:
    """Choose the rows of the next chunk with a batcher, built-in or from a plug-in, and count the chunks that each
    request waits.

    Args:
        batcher: a batcher.
        requests: the requests with waiting tokens in order of arrival, at least one.
        chunk_length: maximum number of rows of the chunk.

    Returns:
        Requests, with the number of tokens that the chunk takes from each.

    Raises:
        ConfigError: the batcher failed, or returned invalid rows.
    """
    waiting = [Waiting(one.num_left, one.is_decode, one.num_passed, one.step) for one in requests]
    taken = [(requests[place], num_tokens) for place, num_tokens in _checked(batcher, waiting, chunk_length)]
    for one in requests:
        one.num_passed += 1
    for one, _ in taken:
        one.num_passed = 0
    return taken


def _checked(batcher: Batcher, waiting: Sequence[Waiting], chunk_length: int) -> list[Take]:
    try:
        rows = batcher.next_chunk(waiting, chunk_length)
        taken = [(operator.index(place), operator.index(num_tokens)) for place, num_tokens in rows]
    except ChunkrtError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"batcher {batcher.name!r} failed: {what}; choose another") from error
    if problem := _problem(taken, waiting, chunk_length):
        raise ConfigError(f"batcher {batcher.name!r} {problem}; choose another")
    return taken


def _problem(taken: Sequence[Take], waiting: Sequence[Waiting], chunk_length: int) -> str:
    if not taken:
        return f"took no tokens although {len(waiting)} wait"
    if len({place for place, _ in taken}) < len(taken) or sum(num_tokens for _, num_tokens in taken) > chunk_length:
        return f"took {taken} for a chunk of {chunk_length} rows"
    for place, num_tokens in taken:
        if not 0 <= place < len(waiting) or not 1 <= num_tokens <= waiting[place].num_tokens:
            return f"took {num_tokens} tokens of sequence {place}, which do not exist"
        is_parted = num_tokens < waiting[place].num_tokens and num_tokens < chunk_length
        if is_parted and num_tokens % waiting[place].step:
            return f"split sequence {place} after {num_tokens} tokens, not a multiple of its step {waiting[place].step}"
    return ""
