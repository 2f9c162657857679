"""Answers in a form: JSON, by a schema or any, with the llguidance library."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from chunkrt.engine.generation import Constraint
from chunkrt.server.errors import RequestError
from chunkrt.server.requests import ResponseFormat
from chunkrt.server.service import Service
from chunkrt.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

JSON_OBJECT = {"type": "object"}


def constraint_maker(service: Service, form: ResponseFormat | None) -> Callable[[], Constraint] | None:
    """What makes a constraint for each choice; None, if any text will do.

    Raises:
        RequestError: the schema is none that can be followed, or llguidance is not installed.
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
            "response_format: the server has no llguidance; pip install 'chunkrt[structured]' there",
            status=501,
            param="response_format",
        ) from error
    tokenizer = _tokenizer(service.tokenizer, service.engine.plan.vocab_size)
    # Spaces and line ends wherever they may stand would go on for ever.
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_flexible": False})
    if problem := LLMatcher(tokenizer, grammar, log_level=0).get_error():
        raise RequestError(f"response_format: {problem.splitlines()[0]}", param="response_format")
    return lambda: _Matching(LLMatcher(tokenizer, grammar, log_level=0), service.engine.plan.vocab_size)


@lru_cache(maxsize=1)
def _tokenizer(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    """It takes a second or two to make."""
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer.to_json(), n_vocab=vocab_size, eos_token=sorted(tokenizer.eos_ids))


class _Matching:
    """A grammar, as far as tokens have taken it."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def allowed(self) -> NDArray[np.bool_]:
        """See `Constraint.allowed`."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(bool)

    def accept(self, token_id: int) -> None:
        """See `Constraint.accept`."""
        self._matcher.consume_token(token_id)
