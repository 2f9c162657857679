"""Batchers: which rows make the next chunk, of the sequences that wait.

A batcher is pure, like a policy: it sees who waits, names rows, and keeps nothing. The conductor and the simulator ask
the same objects. No batcher can change a result, only when it comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from chunkrt.errors import ChunkrtError, ConfigError
from chunkrt.plugins import PluginGroup

DEFAULT_BATCHER = "packed"

MOST_PASSED_OVER = 8
"""Chunks that a prompt lets go by without a row of its own, before it comes first."""


class Waiting(NamedTuple):
    """A sequence that waits for rows.

    num_tokens: that wait, at least 1. is_decode: whether it decodes: somebody waits for its one token. num_passed: the
    chunks without a row of it that have been formed since its last. step: its tokens may be parted after multiples of
    so many only, since other bits would come of them.
    """

    num_tokens: int
    is_decode: bool
    num_passed: int
    step: int


class Take(NamedTuple):
    """Rows of the next chunk: which of those that wait, by its place among them, and how many of its tokens."""

    place: int
    num_tokens: int


class Batcher(Protocol):
    """Forms chunks."""

    name: str

    def next_chunk(self, waiting: Sequence[Waiting], chunk_length: int) -> Sequence[Take]:
        """Name the rows of the next chunk.

        Args:
            waiting: at least one, those that came first first.
            chunk_length: rows that the chunk has room for.

        Returns:
            At least one, in the order in which their rows shall lie; each of `waiting` at most once.
        """
        ...


class Sequential:
    """One sequence a chunk, and the first that came until it is done: as if each caller had the engine alone."""

    name = "sequential"

    def next_chunk(self, waiting: Sequence[Waiting], chunk_length: int) -> Sequence[Take]:
        """All that fits of the first."""
        return [Take(0, min(waiting[0].num_tokens, chunk_length))]


class Packed:
    """Fills every chunk: sequences that decode come first, then prompts, the oldest first.

    So a sequence that waits for one row never waits behind a long prompt, which takes the rows that are left. A prompt
    that has been passed over for long comes before all.

    Source: Agrawal et al., Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve, OSDI 2024.
    """

    name = "packed"

    def next_chunk(self, waiting: Sequence[Waiting], chunk_length: int) -> Sequence[Take]:
        """As many rows as there is room for."""

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
    """How many of a sequence's tokens go into a chunk that has room for so many; perhaps none."""
    if one.num_tokens <= room:
        return one.num_tokens
    return room if room == chunk_length else room - room % one.step


BATCHERS: dict[str, Batcher] = {batcher.name: batcher for batcher in (Packed(), Sequential())}


def _check_plugin(name: str, found: Any) -> str:
    if isinstance(found, type):
        return "is a class, expected a batcher made of it"
    if not callable(getattr(found, "next_chunk", None)):
        return "is no batcher: expected name and next_chunk"
    return "" if getattr(found, "name", None) == name else f"is named {getattr(found, 'name', None)!r}, not {name!r}"


PLUGINS: PluginGroup[Batcher] = PluginGroup(
    "chunkrt.batchers", error=ConfigError, own=tuple(BATCHERS), check=_check_plugin
)
"""Each is a batcher, of the entry point's name."""


def batcher_names() -> tuple[str, ...]:
    """Our batchers, and those of plug-ins."""
    return (*BATCHERS, *PLUGINS.names)


def find_batcher(name: str) -> Batcher:
    """Look a batcher up by name, ours or a plug-in's.

    Raises:
        ConfigError: there is none of that name, and the message offers the nearest and lists all; or the plug-in is
            broken.
    """
    return PLUGINS.choose(name, BATCHERS, "batcher")


def next_chunk(batcher: Batcher, waiting: Sequence[Waiting], chunk_length: int) -> list[Take]:
    """What a batcher names, whoever wrote it.

    Raises:
        ConfigError: it failed, or named what cannot be.
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
            return f"took {num_tokens} tokens of sequence {place}, which there are not"
        is_parted = num_tokens < waiting[place].num_tokens and num_tokens < chunk_length
        if is_parted and num_tokens % waiting[place].step:
            return f"parted sequence {place} after {num_tokens} tokens, no multiple of its step {waiting[place].step}"
    return ""
