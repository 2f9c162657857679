"""Rendered chats, in which control tokens that messages spell out stay text.

A template writes control tokens, e.g. "<|im_end|>", between messages. If a message holds the same characters, the
rendered text does not show who wrote them. So control tokens in messages are put between two marks before rendering;
afterwards the marks divide the text, and what stands between them is encoded as plain text.

Source: Transformers, `apply_chat_template(..., sanitize_control_tokens=True)` and utils/chat_template_utils.py.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from chunkrt.errors import ConfigError

_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Characters that Unicode reserves for a program's internal use, and that no text holds."""


@dataclass(frozen=True)
class ChatPrompt:
    """The prompt of a chat.

    Args:
        parts: pieces of the text, each with whether it is plain: without control tokens, whatever it spells.
    """

    parts: tuple[tuple[str, bool], ...]

    @property
    def text(self) -> str:
        """The whole prompt, as the template wrote it."""
        return "".join(text for text, _ in self.parts)

    def preceded_by(self, start: str) -> ChatPrompt:
        """The prompt with a text before it that the template might have written."""
        (first, is_plain), *others = self.parts
        return ChatPrompt(((start, False), *self.parts) if is_plain else ((start + first, False), *others))

    def followed_by(self, end: str) -> ChatPrompt:
        """The prompt with a text behind it that the template might have written."""
        *others, (last, is_plain) = self.parts
        return ChatPrompt((*self.parts, (end, False)) if is_plain else (*others, (last + end, False)))


class ControlTokens:
    """The control tokens of a vocabulary, to be found in messages.

    Args:
        tokens: their texts.
    """

    def __init__(self, tokens: Collection[str]) -> None:
        self._tokens = sorted(filter(None, tokens), key=len, reverse=True)  # a longer one before those that it contains
        self._ascending = sorted(self._tokens)

    def render(self, render: Callable[[Any], str], variables: Any) -> ChatPrompt:
        """Render variables in which control tokens are marked.

        Args:
            render: the template.
            variables: JSON values that come from a user, keys included.

        Raises:
            ConfigError: they are nested too deep, or use up all characters that marks are taken from.
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
            raise ConfigError("the messages are nested too deep") from error
        return ChatPrompt(tuple(self._divided(rendered, start, end)))

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._tokens)))

    def _joined(self, texts: Collection[str]) -> set[str]:
        """The texts that end with the beginning of a control token that another text goes on with."""
        return {text for text in texts if any(self._goes_on(rest, texts) for rest in self._rests(text))}

    def _rests(self, text: str) -> Iterator[str]:
        """Yield each text that completes the end of a text to a control token."""
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
        """The pieces of a rendered text. A template may part the marks of a token: a lone one divides the text, too."""
        pieces = re.split(f"{start}({self._pattern.pattern}){end}|[{start}{end}]", rendered)
        yield pieces[0], False
        for index, piece in enumerate(pieces[1:], 1):
            if piece:
                yield piece, index % 2 == 1


NO_CONTROL_TOKENS = ControlTokens(())


def _texts(value: Any) -> Iterator[str]:
    """Every text of a JSON value, keys included."""
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
        raise ConfigError("the messages hold all of Unicode's noncharacters U+FDD0 to U+FDEF; leave some of them out")
    return unused[0], unused[1]
