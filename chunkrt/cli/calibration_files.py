"""Files of calibration tokens: texts, chats as JSON lines, and token ids.

Files are opened before a model is loaded, so a wrong name is reported at once. They are read only as far as the
requested number of tokens needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal, TextIO, cast

import numpy as np

from chunkrt.cli.prompts import check_messages
from chunkrt.compile.calibration_tokens import (
    DEFAULT_NUM_TOKENS,
    TokenIds,
    calibration_tokens,
    check_vocabulary,
    share_tokens,
    shipped_text,
    tokenizer_of,
    tokens_of_chats,
    tokens_of_text,
)
from chunkrt.errors import ConfigError, cause_of
from chunkrt.files import check_regular, parse_json
from chunkrt.graph.partition import Planned

NPY = b"\x93NUMPY"
MOST_CHARACTERS = 1 << 26
"""Largest number of characters in a line of JSON or of token ids."""

Kind = Literal["text", "chats", "ids"]


class TokenFile:
    """An open file of calibration tokens.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, kind: Kind, path: Path, opened: ExitStack) -> None:
        self._kind, self._path = kind, path
        try:
            self._file = opened.enter_context(path.open(encoding="utf-8-sig"))
        except OSError as error:
            raise self._unreadable(error) from error

    def tokens(self, planned: Planned, most: int) -> Sequence[int]:
        """Return the file's first tokens, at most `most`.

        Raises:
            ConfigError: the file is damaged or empty, or an id is outside the vocabulary; the message names the file.
            ModelError: the checkpoint has no tokenizer or no chat template that the file needs.
        """
        try:
            if self._kind == "ids":
                return self._ids(planned.plan.vocab_size, most)
            tokenizer = tokenizer_of(planned)
            if self._kind == "text":
                return tokens_of_text(tokenizer, self._file, most)
            if not tokenizer.has_chat_template:
                raise ConfigError("the model has no chat template for chats; give plain text with --text")
            return tokens_of_chats(tokenizer, _chats(self._file), most)
        except UnicodeDecodeError as error:
            raise ConfigError(f"the {self._kind} in {self._path} is not UTF-8: {error}") from error
        except OSError as error:
            raise self._unreadable(error) from error
        except ConfigError as error:
            raise ConfigError(f"{self._path}: {error}") from error

    def _unreadable(self, error: OSError) -> ConfigError:
        return ConfigError(f"cannot read the {self._kind} from {self._path}: {cause_of(error)}")

    def _ids(self, vocab_size: int, most: int) -> list[int]:
        if cast(BufferedReader, self._file.buffer).peek(len(NPY)).startswith(NPY):
            found = self._array(most)
            check_vocabulary(found, vocab_size)
        else:
            found = []
            for number, line in _lines(self._file):
                try:
                    ids = _ids_of(line)
                    check_vocabulary(ids, vocab_size)
                except (ValueError, ConfigError) as error:
                    raise ConfigError(f"line {number}: {error}") from error
                found += ids
                if len(found) >= most:
                    break
        if not found:
            raise ConfigError("the file holds no token ids")
        return found[:most]

    def _array(self, most: int) -> list[int]:
        """Return the first ids of a .npy file of any shape, in C order."""
        check_regular(self._path)
        try:
            array = np.load(self._path, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise ConfigError(f"the array cannot be read: {error}") from error
        if array.dtype.kind not in "iu":
            raise ConfigError(f"the array is of type {array.dtype}, expected whole numbers")
        ids: list[int] = array.flat[:most].tolist()
        return ids


def _chats(file: TextIO) -> Iterator[dict[str, Any]]:
    """Yield the chats of JSON lines, each with its messages and tools."""
    is_empty = True
    for number, line in _lines(file):
        try:
            chat = parse_json(line)
            tools = chat.get("tools") if isinstance(chat, dict) else None
            yield {"messages": check_messages(chat), "tools": tools}
        except (ValueError, ConfigError) as error:
            raise ConfigError(f"line {number}: {error}") from error
        is_empty = False
    if is_empty:
        raise ConfigError('the file holds no chats; expected one per line, e.g. {"messages": [...]}')


def _lines(file: TextIO) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, with their numbers."""
    number = 0
    while line := file.readline(MOST_CHARACTERS + 1):
        number += 1
        if len(line) > MOST_CHARACTERS:
            raise ConfigError(f"line {number} is longer than {MOST_CHARACTERS} characters; divide it")
        if line.strip():
            yield number, line


def _ids_of(line: str) -> list[int]:
    """Return the ids of a line: a JSON list, or whole numbers between spaces or commas. Raises ValueError."""
    if line.lstrip().startswith("["):
        found = parse_json(line)
    else:
        words = line.replace(",", " ").split()
        found = [int(word) if word.isascii() and word.isdecimal() else word for word in words]
    for each in found:
        if not isinstance(each, int) or isinstance(each, bool):
            raise ValueError(f"{each!r} is no token id; expected a list of whole numbers, e.g. [1, 2, 3]")
    return list(found)


@contextmanager
def opened_files(texts: Sequence[Path], chats: Sequence[Path], ids: Sequence[Path]) -> Iterator[list[TokenFile]]:
    """Open files of tokens. Raises ConfigError if one cannot be opened."""
    kinds: list[tuple[Kind, Sequence[Path]]] = [("text", texts), ("chats", chats), ("ids", ids)]
    with ExitStack() as opened:
        yield [TokenFile(kind, path, opened) for kind, paths in kinds for path in paths]


def tokens_of_files(planned: Planned, files: Sequence[TokenFile], num_tokens: int | None) -> TokenIds:
    """Return the calibration tokens of files, or of the text that is part of chunkrt if there are none.

    Args:
        num_tokens: number of tokens, shared by the files; None for at most DEFAULT_NUM_TOKENS.

    Raises:
        ConfigError, ModelError: see `TokenFile.tokens`, `share_tokens` and `calibration_tokens`.
    """
    if not files:
        return calibration_tokens(planned, shipped_text(), num_tokens)
    return share_tokens([file.tokens(planned, num_tokens or DEFAULT_NUM_TOKENS) for file in files], num_tokens)
