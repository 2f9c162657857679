"""Split the tokens of a text into windows, each of which runs in a fresh session."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from chunkrt.errors import ConfigError

DEFAULT_WINDOW_LENGTH = 512
DEFAULT_NUM_WINDOWS = 16


@dataclass(frozen=True, kw_only=True)
class TextPart:
    """One of `count` equal parts of a text, by tokens. `index` counts from 1."""

    index: int = 1
    count: int = 1

    @staticmethod
    def parse(text: str) -> TextPart:
        """Parse "2/3". Raise ConfigError if the text is malformed or the part does not exist."""
        found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
        part = TextPart(index=int(found[1]), count=int(found[2])) if found else None
        if part is None or not 1 <= part.index <= part.count:
            raise ConfigError(f"the part is {text!r}, expected K/N with K from 1 to N, as in 2/2 for the second half")
        return part

    def of(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the tokens of this part. The parts of a text do not overlap, and together they cover the complete
        text."""
        return tokens[(self.index - 1) * len(tokens) // self.count : self.index * len(tokens) // self.count]

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def cut_windows(tokens: Sequence[int], length: int, *, bos_id: int | None) -> list[list[int]]:
    """Split tokens into consecutive windows without overlap.

    Args:
        tokens: the tokens of the text, without a beginning token.
        length: number of positions of a window, including its beginning token.
        bos_id: id of the token that each window begins with, if the model wants one.

    Returns:
        Windows of 2 tokens or more. The last window may be shorter than the others.

    Raises:
        ConfigError: the length is less than 2, or the tokens are too few to score one.
    """
    if length < 2:
        raise ConfigError(
            f"the window is {length}, expected at least 2 tokens: the first token of a window is not scored"
        )
    start = [] if bos_id is None else [bos_id]
    step = length - len(start)
    windows = [[*start, *tokens[at : at + step]] for at in range(0, len(tokens), step)]
    windows = [window for window in windows if len(window) >= 2]
    if not windows:
        raise ConfigError(f"there are too few tokens to evaluate ({len(tokens)}); give a longer text, or fewer parts")
    return windows


def spread(windows: Sequence[list[int]], number: int | None) -> list[list[int]]:
    """Select `number` windows, evenly spread; a short window is omitted if complete windows exist.

    Args:
        number: number of windows, at least 1; None for DEFAULT_NUM_WINDOWS, or for all windows if there are fewer.

    Raises:
        ConfigError: fewer windows exist.
    """
    whole = [window for window in windows if len(window) == len(windows[0])]
    wanted = min(DEFAULT_NUM_WINDOWS, len(whole)) if number is None else number
    if not 1 <= wanted <= len(whole):
        raise ConfigError(
            f"{wanted} windows were requested, but the text has {len(whole)}; choose 1 to {len(whole)}, or all"
        )
    return [whole[(2 * i + 1) * len(whole) // (2 * wanted)] for i in range(wanted)]
