"""Batchers choose the rows of the next chunk from the waiting sequences.

A batcher is pure, like a policy: it gets the waiting sequences, names rows, and keeps no state. The conductor and the
simulator use the same objects. A batcher cannot change a result, only the time at which it is available.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from chunkrt.errors import ChunkrtError, ConfigError
from chunkrt.plugins import PluginGroup

DEFAULT_BATCHER = "packed"

MOST_PASSED_OVER = 8
"""Number of chunks without a row of a prompt after which that prompt comes first."""


class Waiting(NamedTuple):
    """A sequence that waits for rows.

    num_tokens: waiting tokens, at least 1. is_decode: True if the sequence decodes, so that a caller waits for its one
    token. num_passed: number of chunks formed since the last one that held a row of the sequence. step: the tokens may
    only be split after multiples of this number, because other splits would give different bits.
    """

    num_tokens: int
    is_decode: bool
    num_passed: int
    step: int


class Take(NamedTuple):
    """Rows of the next chunk: the index of a waiting sequence, and the number of its tokens."""

    place: int
    num_tokens: int


class Batcher(Protocol):
    """Rule that forms chunks from waiting sequences."""

    name: str

    def next_chunk(self, waiting: Sequence[Waiting], chunk_length: int) -> Sequence[Take]:
        """Name the rows of the next chunk.

        Args:
            waiting: at least one sequence, in order of arrival.
            chunk_length: rows that the chunk has room for.

        Returns:
            At least one entry, in the order of the rows in the chunk; each of `waiting` at most once.
        """
        ...


class Sequential:
    """One sequence a chunk, in order of arrival until it is done: as if each caller had the engine alone."""

    name = "sequential"

    def next_chunk(self, waiting: Sequence[Waiting], chunk_length: int) -> Sequence[Take]:
        """Take as many tokens of the first sequence as fit."""
        return [Take(0, min(waiting[0].num_tokens, chunk_length))]


class Packed:
    """Batcher that fills every chunk: decoding sequences come first, then prompts, the oldest first.

    So a sequence that waits for one row never waits behind a long prompt, which takes the remaining rows. A prompt that
    has been passed over for long comes first.

    Source: Agrawal et al., Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve, OSDI 2024.
    """

    name = "packed"

    def next_chunk(self, waiting: Sequence[Waiting], chunk_length: int) -> Sequence[Take]:
        """Take as many rows as fit."""

        def rank(index: int) -> tuple[bool, bool, int, int]:
            one = waiting[index]
            is_late = one.num_passed >= MOST_PASSED_OVER
            return not is_late, not one.is_decode, -one.num_passed if one.is_decode else 0, index

        taken, room = [], chunk_length
        for index in sorted(range(len(waiting)), key=rank):
            if num_tokens := most_tokens(waiting[index], room, chunk_length):
                taken.append(Take(index, num_tokens))
                room -= num_tokens
        return taken


def most_tokens(one: Waiting, room: int, chunk_length: int) -> int:
    """Return how many of a sequence's tokens fit into `room` rows of a chunk; perhaps none."""
    if one.num_tokens <= room:
        return one.num_tokens
    return room if room == chunk_length else room - room % one.step


BATCHERS: dict[str, Batcher] = {batcher.name: batcher for batcher in (Packed(), Sequential())}


def _check_plugin(name: str, found: Any) -> str:
    if isinstance(found, type):
        return "is a class, expected an instance of it"
    if not callable(getattr(found, "next_chunk", None)):
        return "is not a batcher: expected name and next_chunk"
    return "" if getattr(found, "name", None) == name else f"is named {getattr(found, 'name', None)!r}, not {name!r}"


PLUGINS: PluginGroup[Batcher] = PluginGroup(
    "chunkrt.batchers", error=ConfigError, own=tuple(BATCHERS), check=_check_plugin
)
"""Entry points that each refer to a batcher with the entry point's name."""


def batcher_names() -> tuple[str, ...]:
    """Return the names of the built-in batchers, and of those from plug-ins."""
    return (*BATCHERS, *PLUGINS.names)


def find_batcher(name: str) -> Batcher:
    """Find a built-in or plug-in batcher by name.

    Raises:
        ConfigError: no batcher has that name (the message offers the nearest and lists all), or the plug-in is broken.
    """
    return PLUGINS.choose(name, BATCHERS, "batcher")


def next_chunk(batcher: Batcher, waiting: Sequence[Waiting], chunk_length: int) -> list[Take]:
    """Call a batcher, built-in or from a plug-in, and check its answer.

    Raises:
        ConfigError: the batcher failed, or named impossible rows.
    """
    try:
        taken = [Take(*take) for take in batcher.next_chunk(waiting, chunk_length)]
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
        return f"took nothing although {len(waiting)} wait"
    if len({take.place for take in taken}) < len(taken) or sum(take.num_tokens for take in taken) > chunk_length:
        return f"took {taken} for a chunk of {chunk_length} rows"
    for place, num_tokens in taken:
        if not 0 <= place < len(waiting) or not 1 <= num_tokens <= waiting[place].num_tokens:
            return f"took {num_tokens} tokens of sequence {place}, which do not exist"
        is_parted = num_tokens < waiting[place].num_tokens and num_tokens < chunk_length
        if is_parted and num_tokens % waiting[place].step:
            return f"split sequence {place} after {num_tokens} tokens, not a multiple of its step {waiting[place].step}"
    return ""
