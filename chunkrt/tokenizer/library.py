"""The `tokenizers` library, whose errors have no type of their own, with ours."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import models

from chunkrt.errors import ModelError
from chunkrt.files import check_regular

VOCABULARY_FILE = "tokenizer.json"


def read_vocabulary(path: Path) -> tokenizers.Tokenizer:
    """A tokenizer.json. Raises ModelError if it cannot be read."""
    try:
        check_regular(path)
        return tokenizers.Tokenizer.from_buffer(path.read_bytes())
    except Exception as error:
        raise ModelError(f"{path.name} cannot be read: {error}") from error


def byte_pair_encoding(
    vocab: dict[str, int], merges: list[tuple[str, str]], **options: str | bool | None
) -> tokenizers.Tokenizer:
    """A tokenizer that merges and does nothing else. Raises ModelError if a merge is not in the vocabulary."""
    try:
        return tokenizers.Tokenizer(models.BPE(vocab, merges, **options))
    except Exception as error:
        raise ModelError(f"the vocabulary and its merges contradict each other: {error}") from error


def encode_text(library: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """The library's own encoding. Raises ModelError if it has none."""
    try:
        return library.encode(text, add_special_tokens=add_special_tokens).ids
    except Exception as error:
        raise ModelError(f"the tokenizer cannot encode {text!r:.80}: {error}") from error
