"""Calls of the `tokenizers` library, with its untyped exceptions converted to chunkrt's errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

from chunkrt.errors import ModelError
from chunkrt.files import BYTE_ORDER_MARK, check_regular

VOCABULARY_FILE = "tokenizer.json"

LARGEST_ID = (1 << 24) - 1
"""Limit of token ids. The library allocates memory by the largest id, so a huge one would end the process."""

_MAY_BE_TOO_LARGE = re.compile(rb":\s*\d{8}")
"""Pattern of a JSON number with eight or more digits; 2^24 has eight digits."""


@contextmanager
def library_errors(problem: str, *, panics_alone: bool = False) -> Iterator[None]:
    """Raise ModelError in place of the library's exceptions.

    A panic of the library is a BaseException named PanicException, which `except Exception` does not catch.

    Args:
        panics_alone: convert only panics; other exceptions propagate.
    """
    try:
        yield
    except ModelError:
        raise
    except BaseException as error:
        is_error = isinstance(error, Exception) and not panics_alone
        if not is_error and type(error).__name__ != "PanicException":
            raise  # for example, an interrupt
        raise ModelError(f"{problem}: {error}") from error


def read_vocabulary(path: Path) -> tokenizers.Tokenizer:
    """Read a tokenizer.json. Raise ModelError if it cannot be read."""
    with library_errors(f"{path.name} cannot be read"):
        check_regular(path)
        contents = path.read_bytes().removeprefix(BYTE_ORDER_MARK.encode())
        if _MAY_BE_TOO_LARGE.search(contents):
            _check_ids(contents)
        library = tokenizers.Tokenizer.from_buffer(contents)
        library.no_truncation()
        library.no_padding()
        return library


def byte_pair_encoding(
    vocab: dict[str, int], merges: list[tuple[str, str]], **options: str | bool | None
) -> tokenizers.Tokenizer:
    """Return a tokenizer that only merges. Raise ModelError if a merge is not in the vocabulary."""
    with library_errors("the vocabulary and its merges contradict each other"):
        return tokenizers.Tokenizer(models.BPE(vocab, merges, **options))


def add_tokens(library: tokenizers.Tokenizer, tokens: list[AddedToken]) -> None:
    """Add tokens that are found in a text before it is split further. Raise ModelError if that fails."""
    with library_errors("the added tokens cannot be read"):
        library.add_tokens(tokens)


def copy_of(library: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return an independent library object with the same tokens. Raise ModelError if that fails."""
    with library_errors("the vocabulary cannot be copied"):
        return tokenizers.Tokenizer.from_str(library.to_str())


def encode_text(library: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool = False) -> tokenizers.Encoding:
    """Encode a text while other threads run. Raise ModelError if the library cannot encode it.

    The library releases Python's lock in `encode_batch`, but not in `encode`.
    """
    with library_errors(f"the tokenizer cannot encode {text!r:.80}"):
        return library.encode_batch([text], add_special_tokens=add_special_tokens)[0]


def _check_ids(contents: bytes) -> None:
    """Raise ModelError if a tokenizer.json gives a token an id larger than LARGEST_ID, or repeats a key."""
    parsed = json.loads(contents, object_pairs_hook=_object)
    model = parsed.get("model") if isinstance(parsed, dict) else None
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocab.values()) if isinstance(vocab, dict) else []
    added = parsed.get("added_tokens") if isinstance(parsed, dict) else None
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    if too_large := [token_id for token_id in ids if type(token_id) is int and token_id > LARGEST_ID]:
        raise ModelError(f"{VOCABULARY_FILE} gives a token the id {too_large[0]}; at most {LARGEST_ID} is accepted")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raise ModelError if it repeats a key, because parsers differ in the value that they use."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ModelError(f"an object of {VOCABULARY_FILE} names a key twice")
    return found
