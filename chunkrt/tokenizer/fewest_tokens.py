"""A lower bound on the number of tokens of a text, computed without encoding the text.

Every token stands for a bounded number of bytes of the text, so the number of bytes bounds the number of tokens from
below. Steps before the vocabulary may shrink a text: Unicode normalisation shrinks it by a bounded factor, and other
steps drop white space or other characters. A vocabulary may lack characters. If no bound is known, the bound is 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import tokenizers
from tokenizers import models

from chunkrt.tokenizer.decoding import byte_alphabet

WHITE_SPACE = (
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
"""The characters with Unicode's property White_Space (PropList.txt)."""

_SHRINKING = {"NFC": 4, "NFD": 4, "NFKC": 8, "NFKD": 8, "Lowercase": 4, "Prepend": 1, "ByteLevel": 1}
"""Maximum number of bytes of a text that become one byte, by normalizer.

The worst known case of NFC is U+1FBE with two combining marks: 7 bytes become U+0390, which has 2. The worst known case
of NFKC is a mathematical letter with marks: 10 bytes become 3.
"""
_PRE_TOKENIZERS = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength")
"""Pre-tokenizers that drop nothing."""


@dataclass(frozen=True, kw_only=True)
class TokenBound:
    """Maximum number of bytes of a text that a token stands for.

    Attributes:
        most_bytes: the maximum; None if no bound is known.
        uncounted: characters that may have no token.
        is_ascii: only ASCII characters are counted, because other characters may be unknown, and one token may stand
            for any number of unknown characters.
    """

    most_bytes: int | None = None
    uncounted: str = ""
    is_ascii: bool = False

    @staticmethod
    def of(library: tokenizers.Tokenizer) -> TokenBound:
        """Return the bound for a tokenizer."""
        if not isinstance(library.model, models.BPE):
            return TokenBound()
        vocabulary, added = library.get_vocab(), library.get_added_tokens_decoder().values()
        steps = [*_steps(library.normalizer, "normalizers"), *_steps(library.pre_tokenizer, "pretokenizers")]
        factor, uncounted = 1.0, WHITE_SPACE if any(token.lstrip or token.rstrip for token in added) else ""
        for step in steps:
            if (shrinks := _shrinking(step)) is None:
                return TokenBound()
            if shrinks == 0:
                uncounted = WHITE_SPACE
            factor *= shrinks or 1
        is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
        longest = max(map(len if is_byte_level else _utf8_length, vocabulary), default=0)
        longest = max([longest, 1, *(_utf8_length(token.content) for token in added)])
        unknown = _unknown_bytes(library.model, vocabulary, steps, is_byte_level=is_byte_level)
        if unknown and (is_byte_level or factor > 1 or not all(map(_keeps_ascii, steps))):
            return TokenBound()
        unknown_ascii = "".join(map(chr, sorted(byte for byte in unknown if byte < 128)))
        uncounted += "".join(character for character in unknown_ascii if character not in uncounted)
        return TokenBound(most_bytes=ceil(longest * factor), uncounted=uncounted, is_ascii=bool(unknown))

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound on the number of tokens of the text."""
        if self.most_bytes is None:
            return 0
        if text.isascii():
            num_bytes = len(text)
        elif self.is_ascii:
            num_bytes = len(text.encode("ascii", errors="ignore"))
        else:
            num_bytes = _utf8_length(text)
        for character in self.uncounted:
            if character.isascii() or not self.is_ascii:
                num_bytes -= text.count(character) * _utf8_length(character)
        return ceil(num_bytes / self.most_bytes)


def _utf8_length(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


def _steps(part: Any, key: str) -> list[Mapping[str, Any]]:
    """Return the steps of a normalizer or a pre-tokenizer, in the library's JSON form."""
    if part is None:
        return []
    waiting, found = [json.loads(part.__getstate__())], []
    while waiting:
        step = waiting.pop(0)
        if step["type"] == "Sequence":
            waiting = [*step[key], *waiting]
        else:
            found.append(step)
    return found


def _shrinking(step: Mapping[str, Any]) -> float | None:
    """Return the maximum number of bytes that become one byte in a step; 0 if it drops only white space, None without a
    bound."""
    kind = step["type"]
    if kind in _SHRINKING:
        return _SHRINKING[kind]
    if kind in _PRE_TOKENIZERS:
        return 1
    if kind == "Replace":
        pattern, content = step["pattern"].get("String"), step["content"]
        return max(1.0, len(pattern.encode()) / len(content.encode())) if pattern and content else None
    if kind in ("Strip", "Whitespace", "WhitespaceSplit"):
        return 0
    if kind in ("Split", "Punctuation"):
        return None if step["behavior"] == "Removed" else 1
    return None


def _keeps_ascii(step: Mapping[str, Any]) -> bool:
    """Return True if a step changes no ASCII character, except spaces, which become the vocabulary's character for a
    space."""
    return step["type"] != "Replace" or (step["pattern"].get("String"), step["content"]) == (" ", "▁")


def _unknown_bytes(
    model: models.BPE, vocabulary: Mapping[str, int], steps: list[Mapping[str, Any]], *, is_byte_level: bool
) -> set[int]:
    """Return the bytes that may have no token: ASCII characters, or parts of other characters."""
    if is_byte_level:
        return {byte for character, byte in byte_alphabet().items() if character not in vocabulary}
    replaces = any(step["type"] in ("Replace", "Metaspace") for step in steps)
    spelled = {byte: chr(byte) for byte in range(128)} | ({0x20: "▁"} if replaces else {})
    return {
        byte
        for byte in range(256)
        if spelled.get(byte) not in vocabulary and not (model.byte_fallback and f"<0x{byte:02X}>" in vocabulary)
    }
