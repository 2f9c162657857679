"""Chats to prompts, by the Jinja template that comes with a model.

A template is a program by strangers: it runs in Jinja's sandbox, sees plain data only, and is stopped when it
counts, multiplies or writes beyond what any prompt needs.

Source: Transformers, utils/chat_template_utils.py, for the environment that templates are written for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from chunkrt.errors import ConfigError, ModelError

MAX_PROMPT_LENGTH = 1 << 24
MAX_STEPS = 100_000
_PADDING = {"center", "expandtabs", "ljust", "rjust", "zfill"}


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja.

    Raises:
        ModelError: it does not compile.
    """

    def __init__(self, source: str) -> None:
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        try:
            self._template = environment.from_string(source)
        except Exception as error:
            raise ModelError(f"the model's chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        bos_token: str,
        eos_token: str,
    ) -> str:
        """The prompt.

        Raises:
            ConfigError: the messages are not a list of JSON objects, each with a role.
            ModelError: the template fails, refuses the messages, or goes beyond its bounds.
        """
        pieces, length = [], 0
        try:
            for piece in self._template.generate(
                messages=_plain(messages),
                add_generation_prompt=add_generation_prompt,
                bos_token=bos_token,
                eos_token=eos_token,
                range=_bounded_range(),
            ):
                length += len(piece)
                if length > MAX_PROMPT_LENGTH:
                    raise SecurityError(f"its prompt is longer than {MAX_PROMPT_LENGTH} characters")
                pieces.append(piece)
        except ConfigError:
            raise
        except Exception as error:
            raise ModelError(f"the model's chat template rejects these messages: {error}") from error
        return "".join(pieces)


class _Environment(ImmutableSandboxedEnvironment):
    """What chat templates are written for, less what makes long texts out of short ones."""

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters["tojson"] = _to_json
        del self.filters["center"]
        self.globals = {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "namespace": _Namespace,
            "dict": _new_dict,
        }

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or _size(left) * _size(right) > MAX_PROMPT_LENGTH:
            raise SecurityError(f"it computes a large {type(left).__name__} {operator} {type(right).__name__}")
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _PADDING and super().is_safe_attribute(obj, attr, value)


class _GenerationBlock(Extension):
    """`{% generation %}` marks the model's own words for training; here it means nothing."""

    tags = {"generation"}  # noqa: RUF012, as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Jinja's, without attributes that begin with an underscore, which lead to Python's internals."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"it sets the attribute {name!r} of a namespace")
        super().__setitem__(name, value)


def _size(value: Any) -> float:
    return abs(value) if isinstance(value, int | float) else len(value)


def _plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A copy of the messages out of JSON types alone."""
    try:
        plain = json.loads(json.dumps(messages))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the messages are not plain JSON data: {error}") from error
    if not isinstance(plain, list) or not plain:
        raise ConfigError(f"messages: found {type(messages).__name__}, expected a list with at least one message")
    for index, message in enumerate(plain):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError(f'message {index}: found {message!r:.80}, expected {{"role": ..., "content": ...}}')
    return plain


def _bounded_range() -> Callable[..., Iterator[int]]:
    """`range` for one rendering: its numbers are counted over all loops together."""
    steps_left = MAX_STEPS

    def bounded(*arguments: int) -> Iterator[int]:
        nonlocal steps_left
        steps = range(*arguments)
        steps_left -= len(steps)
        if steps_left < 0:
            raise SecurityError(f"it counts further than {MAX_STEPS}")
        return iter(steps)

    return bounded


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _new_dict(*arguments: Any, **values: Any) -> dict[Any, Any]:
    return dict(*arguments, **values)


def _to_json(value: Any, *, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
