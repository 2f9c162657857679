"""Tokens of a calibration: from texts, from chats, or from lists of token ids.

Texts and chats are read in pieces, and only as far as the requested number of tokens needs.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
from numpy.typing import NDArray

from chunkrt.errors import ConfigError, ModelError
from chunkrt.tokenizer import Tokenizer

if TYPE_CHECKING:
    from chunkrt.graph.partition import Planned

TokenIds = NDArray[np.int64]

DEFAULT_NUM_TOKENS = 2048

LEAST_READ, MOST_READ = 1 << 14, 1 << 26
"""Smallest number of characters that are read at first from a text, and largest number that is read at once."""

USUAL_LENGTH, LARGEST_LENGTH = 8, 256
"""Number of characters of a token for which a text is read at first, and up to which it is read."""

CUT_TOKENS = 64
"""Number of tokens at the end of a piece that may differ from those of the complete text: those of a word that is cut,
and of the template's text after the last turn."""

log = logging.getLogger(__name__)


def shipped_text() -> str:
    """Return the calibration text that is part of chunkrt."""
    return resources.files("chunkrt").joinpath("calibration_text.txt").read_text("utf-8")


def calibration_tokens(planned: Planned, text: str, num_tokens: int | None) -> TokenIds:
    """Return the first tokens of a text, int64 [n]; see `tokens_of_text`.

    Raises:
        ConfigError: the text is empty, or has fewer tokens than requested.
        ModelError: the checkpoint has no tokenizer.
    """
    if num_tokens is not None and num_tokens < 1:
        raise ConfigError(f"the number of calibration tokens is {num_tokens}, expected at least 1")
    found = tokens_of_text(tokenizer_of(planned), io.StringIO(text), num_tokens or DEFAULT_NUM_TOKENS)
    return share_tokens([found], num_tokens)


def tokenizer_of(planned: Planned) -> Tokenizer:
    """Return a checkpoint's tokenizer. Raises ModelError if the checkpoint has none."""
    if not (tokenizer := Tokenizer.from_source(planned.source)):
        raise ModelError(
            f"{planned.source.path} has no tokenizer, which calibration on a text needs; add its tokenizer.json, or "
            "run `chunkrt calibrate MODEL --ids FILE -o ranges.npz` and set `calibration` to that file"
        )
    return tokenizer


def tokens_of_text(tokenizer: Tokenizer, file: TextIO, most: int) -> list[int]:
    """Return the first tokens of a text, at most `most`.

    For a model that was tuned for chat, the text's paragraphs become the turns of a conversation, because the tokens
    between turns cause larger values than words do.

    Raises:
        ConfigError: the text is empty.
    """
    has_template = tokenizer.has_chat_template
    text, room = "", max(USUAL_LENGTH * most, LEAST_READ)
    while True:
        room = min(room, MOST_READ)
        piece = file.read(room)
        text += piece
        found = list[int]()
        if has_template:
            try:
                found = _conversation(tokenizer, text)
            except ModelError as error:
                log.warning("calibrating on plain text: %s", error)
                has_template = False
        found = found or tokenizer.encode(text, add_special=True, parse_special=False)
        if len(piece) < room or len(found) >= most + CUT_TOKENS or len(text) >= LARGEST_LENGTH * most:
            break
        room = len(text)
    if not text.strip():
        raise ConfigError("the calibration text is empty")
    return found[:most]


def _conversation(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of alternating turns of a user and an assistant; empty if the text is."""
    paragraphs = [paragraph for paragraph in text.split("\n\n") if paragraph.strip()]
    turns = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(paragraphs)]
    return tokenizer.encode_chat(turns, add_generation_prompt=False) if turns else []


def tokens_of_chats(tokenizer: Tokenizer, chats: Iterable[Mapping[str, Any]], most: int) -> list[int]:
    """Return the first tokens of chats, at most `most`. Each chat is rendered alone by the model's chat template.

    Args:
        chats: objects with "messages" and optionally "tools", in the form of OpenAI's API. Only as many are read as are
            needed.

    Raises:
        ConfigError: the messages are malformed.
        ModelError: the model has no chat template, or the template refuses the messages.
    """
    found = list[int]()
    for number, chat in enumerate(chats, 1):
        try:
            found += tokenizer.encode_chat(chat["messages"], tools=chat.get("tools"), add_generation_prompt=False)
        except (ConfigError, ModelError) as error:
            raise type(error)(f"chat {number}: {error}") from error
        if len(found) >= most:
            break
    return found[:most]


def share_tokens(found: Sequence[Sequence[int]], num_tokens: int | None) -> TokenIds:
    """Return the tokens of several texts, one text after the other, int64 [n].

    Each text contributes an equal number of tokens, its first ones. A text with fewer tokens leaves the rest of its
    share to the others.

    Args:
        num_tokens: number of tokens to return; None for at most DEFAULT_NUM_TOKENS.

    Raises:
        ConfigError: the texts have fewer tokens than requested.
    """
    total = sum(map(len, found))
    if num_tokens is not None and total < num_tokens:
        raise ConfigError(f"the calibration text has {total} tokens, fewer than the requested {num_tokens}")
    left, counts = num_tokens or DEFAULT_NUM_TOKENS, [0] * len(found)
    for done, index in enumerate(sorted(range(len(found)), key=lambda index: len(found[index]))):
        counts[index] = min(len(found[index]), left // (len(found) - done))
        left -= counts[index]
    return np.concatenate([np.array(ids[:count], np.int64) for ids, count in zip(found, counts, strict=True)])


def check_vocabulary(token_ids: Sequence[int] | TokenIds, vocab_size: int) -> None:
    """Raise ConfigError if a token id is outside the vocabulary."""
    if wrong := [each for each in (min(token_ids, default=0), max(token_ids, default=0)) if not 0 <= each < vocab_size]:
        raise ConfigError(
            f"token id {wrong[0]} is outside the vocabulary of {vocab_size}; give ids of this model's tokenizer"
        )
