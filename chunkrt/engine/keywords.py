"""Keyword arguments of a generation, which `Engine.generate`, `Session.generate` and similar methods take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, TypedDict

from chunkrt.engine.arguments import require_whole, shows_fields
from chunkrt.engine.sampling import GREEDY, SamplingOptions
from chunkrt.errors import ConfigError, unknown_name


class GenerationOptions(TypedDict, total=False):
    """Keyword arguments of a generation, which include the fields of `SamplingOptions`.

    Attributes:
        max_new_tokens: maximum number of tokens, at least 1; 256 by default.
        max_tokens: another name of max_new_tokens.
        sampling: sampling options in place of their fields; greedy by default.
        stop: strings that end the generation; they are not part of the text.
    """

    max_new_tokens: int
    max_tokens: int
    sampling: SamplingOptions
    stop: Sequence[str]
    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    ignore_eos: bool
    min_new_tokens: int


MAX_NEW_TOKENS = 256
"""Default maximum number of tokens of a generation."""

_SAMPLING = tuple(field.name for field in fields(SamplingOptions))
_KNOWN = ("max_new_tokens", "max_tokens", "sampling", "stop", *_SAMPLING)


def read_generation_options(options: Mapping[str, Any], *others: str) -> tuple[int, SamplingOptions, Sequence[str]]:
    """Read the keyword arguments of a generation.

    Args:
        options: the arguments, by name.
        others: further keywords of the method, for the error of an unknown name.

    Returns:
        The maximum number of tokens, the sampling options, and the strings that end the generation.

    Raises:
        ConfigError: a name is unknown, a value is not allowed, or two arguments contradict each other.
    """
    for name in options:
        if name not in _KNOWN:
            raise unknown_name("option", name, (*_KNOWN, *others))
    given = {name: value for name, value in options.items() if name in _SAMPLING}
    found = {name: value for name, value in options.items() if name not in _SAMPLING}
    if "max_tokens" in found:
        if "max_new_tokens" in found:
            raise ConfigError("max_new_tokens and max_tokens are two names of one option; give one of them")
        found["max_new_tokens"] = found.pop("max_tokens")
    if given:
        if "sampling" in found:
            name = next(iter(given))
            raise ConfigError(f"sampling and {name} are both given; give {name} in SamplingOptions, or omit sampling")
        found["sampling"] = SamplingOptions(**given)
    max_new_tokens, sampling = found.get("max_new_tokens", MAX_NEW_TOKENS), found.get("sampling", GREEDY)
    if require_whole("max_new_tokens", max_new_tokens) < 1:
        raise ConfigError(f"max_new_tokens is {max_new_tokens}, expected at least 1")
    if not isinstance(sampling, SamplingOptions):
        raise ConfigError(f"sampling is {sampling!r}, expected SamplingOptions")
    if sampling.min_new_tokens > max_new_tokens:
        raise ConfigError(
            f"min_new_tokens is {sampling.min_new_tokens}, more than max_new_tokens, which is {max_new_tokens}"
        )
    return max_new_tokens, sampling, found.get("stop", ())


def _default(field: Field[Any]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()


shows_generation_options = shows_fields(
    {"max_new_tokens": ("int", MAX_NEW_TOKENS), "sampling": ("SamplingOptions", GREEDY), "stop": ("Sequence[str]", ())}
    | {field.name: (field.type, _default(field)) for field in fields(SamplingOptions)}
)
