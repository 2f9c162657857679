"""Conversion of token ids to text. Each token consists of bytes, and a character appears as soon as its bytes are
complete.

The `tokenizers` library decodes lists of tokens; a stream needs the bytes of each token. The library's decoder reveals
which of two schemes applies: byte-level (a character is a byte) or SentencePiece ("▁" is a space, "<0x0A>" a byte).
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from numbers import Integral
from typing import TYPE_CHECKING, Any

import tokenizers

from chunkrt.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from chunkrt.tokenizer.tokenizer import Tokenizer

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Return the bytes of every token of a vocabulary.

    Args:
        num_rows: number of rows of the model's LM head. A row without a token, e.g. for padding, has no bytes.

    Raises:
        UnsupportedModelError: the library's decoder is neither byte-level nor SentencePiece's.
    """

    def __init__(self, library: tokenizers.Tokenizer, num_rows: int = 0) -> None:
        self._library, self._num_rows = library, num_rows
        added = library.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes_of, self.strips_first_space = _scheme(library.decoder)
        literal = added if self._bytes_of is _byte_level else self.special_ids
        self._known = {token_id: added[token_id].content.encode() for token_id in literal}

    def __getitem__(self, token_id: int) -> bytes:
        """Return a token's bytes. Raise ConfigError if the token does not exist, or the id is not an integer."""
        known = self._known.get(token_id) if type(token_id) is int else None
        if known is None:
            if isinstance(token_id, bool) or not isinstance(token_id, Integral):
                raise ConfigError(f"a token id is {token_id!r:.80}, expected a whole number")
            token = self._library.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
            if token is None:
                if 0 <= token_id < self._num_rows:
                    return b""
                size = self._library.get_vocab_size()
                raise ConfigError(f"token {token_id} has no text: the vocabulary holds {size} tokens")
            known = self._known[int(token_id)] = self._bytes_of(token)
        return known


class IncrementalDecoder:
    """Converts tokens to text one by one; the joined pieces equal `Tokenizer.decode` of all tokens.

    A character whose bytes are spread over several tokens appears with the last of these tokens; invalid UTF-8 becomes
    U+FFFD. Control tokens, and rows of the model's LM head without a token, have no text.

    Args:
        follows_text: the tokens continue a text, so a leading space, which SentencePiece would otherwise remove, is
            kept.
    """

    def __init__(self, tokenizer: Tokenizer, *, follows_text: bool = False) -> None:
        self._bytes = tokenizer.token_bytes
        self._strips_first_space = self._bytes.strips_first_space and not follows_text
        self._strip_next = self._strips_first_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the text that this token completes, possibly empty. Raise ConfigError if the token does not exist."""
        piece = self._bytes[token_id]
        if token_id in self._bytes.special_ids or not piece:
            return ""
        if self._strip_next:
            self._strip_next = False
            piece = piece.removeprefix(b" ")
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """Return the rest of the text at its end: U+FFFD if the last character is incomplete. Afterwards a new text may
        begin."""
        rest = self._utf8.decode(b"", final=True)
        self._strip_next = self._strips_first_space
        return rest


def byte_alphabet() -> dict[str, int]:
    """Map byte-level BPE's characters to bytes. Source: GPT-2, encoder.py, bytes_to_unicode."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()


def _sentence_piece(token: str) -> bytes:
    if match := _BYTE_PIECE.fullmatch(token):
        return bytes.fromhex(match[1])
    return token.replace("▁", " ").encode()


def _scheme(decoder: Any) -> tuple[Callable[[str], bytes], bool]:
    """Return a function that maps a token to its bytes, and a flag: True if the first space of a text is dropped."""
    steps = [json.loads(decoder.__getstate__())] if decoder is not None else []
    if steps and steps[0]["type"] == "Sequence":
        steps = steps[0]["decoders"]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level, False
    if kinds == ["Metaspace"] and steps[0]["replacement"] == "▁":
        return _sentence_piece, steps[0]["prepend_scheme"] != "never"
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and steps[0]["pattern"] == {"String": "▁"}:
        if kinds[3:] == []:
            return _sentence_piece, False
        if kinds[3:] == ["Strip"] and (steps[3]["content"], steps[3]["start"], steps[3]["stop"]) == (
            " ",
            1,
            0,
        ):
            return _sentence_piece, True
    raise UnsupportedModelError(
        f"the tokenizer's decoder is {' + '.join(kinds) or 'missing'}; byte-level and SentencePiece are implemented"
    )
