"""Constrained answers: JSON with or without a schema, using the llguidance library."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.engine.generation import Constraint
from chunkrt.errors import ConstraintError
from chunkrt.server.errors import RequestError
from chunkrt.server.requests import ResponseFormat
from chunkrt.server.satisfiable import allows_nothing
from chunkrt.server.service import Service
from chunkrt.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_DATA = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are not schemas."""
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values map arbitrary names to schemas; a name may equal a keyword."""
JSON_OBJECT = {"type": "object"}
MOST_PROBED = 256
"""First bytes of every answer; the constraint is tested with them before the first answer is generated."""


def constraint_maker(service: Service, form: ResponseFormat | None) -> Callable[[], Constraint] | None:
    """Return a factory that makes a constraint for each choice; None if any text is allowed.

    Raises:
        RequestError: the schema is not supported, or llguidance is not installed.
    """
    if form is None or form.type == "text":
        return None
    if form.type == "json_schema" and form.json_schema is None:
        raise RequestError("response_format: json_schema is missing", param="response_format")
    schema = form.json_schema.schema if form.json_schema is not None else JSON_OBJECT
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise RequestError(
            'response_format: the server has no llguidance; pip install "chunkrt[structured]" there',
            status=501,
            param="response_format",
        ) from error
    vocab_size = service.engine.plan.vocab_size
    tokenizer = _tokenizer(service.tokenizer, vocab_size)
    try:
        # Unrestricted spaces and line ends would allow an endless answer.
        text = json.dumps(without_unknown_formats(schema, _knows_format))
        grammar = LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": False})
    except (ValueError, RecursionError) as error:
        problem = "the schema is nested too deeply" if "recursion" in str(error) else str(error)
        raise _refusal(f"the schema cannot be read: {problem}") from error
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if not matcher.is_error() and allows_nothing(schema):
        raise _refusal("the schema allows nothing: each value would have to contain another value, without end")
    probe = matcher.deep_copy()
    probe.consume_tokens(tokenizer.tokenize_bytes(probe.compute_ff_bytes()[:MOST_PROBED]))
    if problem := matcher.get_error() or probe.get_error():
        raise _refusal(_in_one_line(problem))
    return lambda: _Matching(matcher.deep_copy(), vocab_size)


def _refusal(problem: str) -> RequestError:
    return RequestError(f"response_format: {problem}", param="response_format")


def _in_one_line(problem: str) -> str:
    """Describe an error of llguidance in one line; further lines of its message contain the parser's state."""
    line = problem.splitlines()[0]
    if "items" in line:  # a row of the parser has an item for each open alternative
        return f"the schema's grammar is too large ({line}); give it fewer optional properties and alternatives"
    if line.startswith("oneOf"):  # llguidance suggests its own option here, which allows several alternatives to match
        return "oneOf is supported only if no value can satisfy two of its alternatives; use anyOf"
    if line.startswith("NoExtension"):
        return "the schema allows no continuation of the text so far"
    return line


@lru_cache(maxsize=256)
def _knows_format(name: str) -> bool:
    from llguidance import LLMatcher

    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(format_schema(name)))


@lru_cache(maxsize=1)
def _tokenizer(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    """Return the tokenizer for llguidance. Building it takes a second or two."""
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer.to_json(), n_vocab=vocab_size, eos_token=sorted(tokenizer.eos_ids))


class _Matching:
    """The state of a grammar after the tokens so far."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def allowed(self) -> NDArray[np.bool_]:
        """See `Constraint.allowed`. Raise ConstraintError if llguidance failed."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()  # in this case the mask contains only end tokens
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(bool)

    def accept(self, token_id: int) -> None:
        """See `Constraint.accept`. Raise ConstraintError if llguidance failed."""
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if problem := self._matcher.get_error():
            raise ConstraintError(f"response_format: {_in_one_line(problem)}")


def without_unknown_formats(schema: Any, is_known: Callable[[str], bool]) -> Any:
    """Return a schema without the formats of strings that llguidance does not support.

    `format` is an annotation unless a schema's dialect says otherwise, so an unknown format must not fail a schema.
    Source: JSON Schema 2020-12, Validation, section 7. Schema generators write many such formats: Pydantic writes
    "path" and "password", and OpenAPI uses "byte".

    Args:
        schema: decoded JSON; not modified.
        is_known: called for each format.

    Raises:
        RecursionError: the schema is nested too deeply.
    """
    if isinstance(schema, list):
        return [without_unknown_formats(each, is_known) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _DATA:
            found[key] = value
        elif key in _BY_NAME and isinstance(value, dict):
            found[key] = {name: without_unknown_formats(each, is_known) for name, each in value.items()}
        elif key != "format" or not isinstance(value, str) or is_known(value):
            found[key] = without_unknown_formats(value, is_known)
    return found


def format_schema(name: str) -> str:
    """Return a schema, as JSON text, that allows strings of one format."""
    return json.dumps({"type": "string", "format": name})
