"""Rendered chats, in which control tokens spelled out in messages stay plain text.

A template writes control tokens, e.g. "<|im_end|>", between messages. If a message contains the same characters, the
rendered text does not show their origin. So control tokens in messages are enclosed in two marks before rendering.
Afterwards the text is split at the marks, and the text between two marks is encoded as plain text.

Source: Transformers, `apply_chat_template(..., sanitize_control_tokens=True)` and utils/chat_template_utils.py.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from os.path import commonprefix
from typing import Any

from chunkrt.errors import ConfigError

_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Noncharacters, which Unicode reserves for a program's internal use and which no text should contain."""


@dataclass(frozen=True)
class ChatPrompt:
    """The prompt of a chat.

    Args:
        parts: pieces of the text with flags; True marks plain text, in which control tokens are not parsed.
    """

    parts: tuple[tuple[str, bool], ...]

    @property
    def text(self) -> str:
        """Return the complete prompt as the template wrote it."""
        return "".join(text for text, _ in self.parts)

    def preceded_by(self, start: str) -> ChatPrompt:
        """Return the prompt with a text before it, as if the template had written that text."""
        (first, is_plain), *others = self.parts
        return ChatPrompt(((start, False), *self.parts) if is_plain else ((start + first, False), *others))

    def followed_by(self, end: str) -> ChatPrompt:
        """Return the prompt with a text after it, as if the template had written that text."""
        *others, (last, is_plain) = self.parts
        return ChatPrompt((*self.parts, (end, False)) if is_plain else (*others, (last + end, False)))


class ControlTokens:
    """The control tokens of a vocabulary, for searching in messages.

    Args:
        tokens: texts of the control tokens.
    """

    def __init__(self, tokens: Collection[str]) -> None:
        self._tokens = sorted(filter(None, tokens), key=len, reverse=True)  # longer tokens come before their substrings
        self._ascending = sorted(self._tokens)

    def render(self, render: Callable[[Any], str], variables: Any) -> ChatPrompt:
        """Render variables in which control tokens are marked.

        Args:
            render: the template.
            variables: JSON values that come from a user, including keys.

        Raises:
            ConfigError: the variables are nested too deeply, or contain all characters that can serve as marks.
        """
        if not self._tokens:
            return ChatPrompt(((render(variables), False),))
        try:
            texts = set(_texts(variables))
            joined = self._joined(texts)
            if not joined and not any(map(self._pattern.search, texts)):
                return ChatPrompt(((render(variables), False),))
            start, end = _unused_characters(texts)
            rendered = render(self._marked(variables, start, end, joined))
        except RecursionError as error:
            raise ConfigError("the messages are nested too deeply") from error
        return ChatPrompt(tuple(self._divided(rendered, start, end)))

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(_any_of(self._ascending))

    def _joined(self, texts: Collection[str]) -> set[str]:
        """Return the texts that end with the start of a control token that another text may complete."""
        return {text for text in texts if any(self._goes_on(rest, texts) for rest in self._rests(text))}

    def _rests(self, text: str) -> Iterator[str]:
        """Yield each suffix that completes the end of a text to a control token."""
        for length in range(1, min(len(text), len(self._tokens[0]) - 1) + 1):
            begin = text[-length:]
            at = bisect_left(self._ascending, begin)
            while at < len(self._ascending) and self._ascending[at].startswith(begin):
                yield self._ascending[at][length:]
                at += 1

    @staticmethod
    def _goes_on(rest: str, texts: Collection[str]) -> bool:
        return bool(rest) and any(text.startswith(rest) or (text and rest.startswith(text)) for text in texts)

    def _marked(self, value: Any, start: str, end: str, joined: Collection[str]) -> Any:
        if isinstance(value, str):
            marked = self._pattern.sub(f"{start}\\g<0>{end}", value)
            return marked + start if value in joined else marked
        if isinstance(value, dict):
            items = ((self._marked(k, start, end, ()), self._marked(v, start, end, joined)) for k, v in value.items())
            return dict(items)
        if isinstance(value, list):
            return [self._marked(each, start, end, joined) for each in value]
        return value

    def _divided(self, rendered: str, start: str, end: str) -> Iterator[tuple[str, bool]]:
        """Yield the pieces of a rendered text. A template may separate the two marks of a token, so each mark splits
        the text."""
        pieces = re.split(f"{start}({self._pattern.pattern}){end}|[{start}{end}]", rendered)
        yield pieces[0], False
        for index, piece in enumerate(pieces[1:], 1):
            if piece:
                yield piece, index % 2 == 1


def _any_of(tokens: Sequence[str]) -> str:
    """Return a regular expression that matches the longest of some texts, which are in ascending order.

    Common prefixes are factored out: a vocabulary may have thousands of control tokens that begin with "<", and a plain
    alternation would try each of them at every such character.
    """
    branches = []
    for _, group in groupby(tokens, key=itemgetter(0)):
        several = list(group)
        start = commonprefix(several)  # noqa: RUF071, of texts rather than paths
        rests = [token.removeprefix(start) for token in several]
        longer = _any_of(list(filter(None, rests)))
        branches.append(re.escape(start) + (f"(?:{longer}){'?' if '' in rests else ''}" if longer else ""))
    return "|".join(branches)


NO_CONTROL_TOKENS = ControlTokens(())


def _texts(value: Any) -> Iterator[str]:
    """Yield every text of a JSON value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def _unused_characters(texts: Collection[str]) -> tuple[str, str]:
    unused = [character for character in _NONCHARACTERS if not any(character in text for text in texts)]
    if len(unused) < 2:
        raise ConfigError("the messages contain all of Unicode's noncharacters U+FDD0 to U+FDEF; remove some of them")
    return unused[0], unused[1]
