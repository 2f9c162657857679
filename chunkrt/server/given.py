"""Remove fields that request nothing, before a body is parsed.

Clients with typed objects send every field. A null means "not given" in every field. A field that this server does not
support is dropped if its value requests the default behaviour; with any other value, the field is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

NEUTRAL: Mapping[str, Sequence[Any]] = {
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "cache_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "id_slot": (-1,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "min_keep": (0,),
    "mirostat": (0,),
    "n": (1,),
    "n_probs": (0,),
    "parallel_tool_calls": (True,),
    "post_sampling_probs": (False,),
    "priority": (0,),
    "repeat_penalty": (1,),
    "return_token_ids": (False,),
    "return_tokens": (False,),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "stream": (False,),
    "suffix": ("",),
    "temperature": (1,),
    "tfs_z": (1,),
    "timings_per_token": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_n_sigma": (-1,),
    "top_p": (1,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
}
"""Values that request nothing, by names of fields of OpenAI's, llama.cpp's and vLLM's APIs."""

OPTIONS = ("stream_options", "response_format", "json_schema", "tools", "function")
"""Fields that contain objects of options, or lists of such objects; other objects have arbitrary content."""

LISTS_OF_IDS = ("prompt", "input", "tokens")

LARGEST_EXACT = 2**53
"""Largest integer up to which all integers are exact in floating point (RFC 8259, section 6)."""


def given(body: Any, known: Set[str]) -> Any:
    """Return a body without the fields that request nothing, and with whole numbers as integers.

    Args:
        body: decoded JSON; returned unchanged if it is not an object.
        known: names of the fields that the request supports.
    """
    if not isinstance(body, dict):
        return body
    return {
        name: _whole(value) if name not in LISTS_OF_IDS else _whole_all(value)
        for name, value in _without_nulls(body).items()
        if name in known or not _is_neutral(name, value)
    }


def _without_nulls(options: Any) -> Any:
    if isinstance(options, list):
        return [_without_nulls(one) for one in options]
    if not isinstance(options, dict):
        return options
    return {
        name: _without_nulls(value) if name in OPTIONS else value
        for name, value in options.items()
        if value is not None
    }


def _is_neutral(name: str, value: Any) -> bool:
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in NEUTRAL.get(name, ()))


def _whole(value: Any) -> Any:
    """Convert a floating-point number with an integer value to an integer. Languages without integers write 16.0 for
    16."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) <= LARGEST_EXACT
    return int(value) if is_whole else value


def _whole_all(value: Any) -> Any:
    return [_whole_all(one) for one in value] if isinstance(value, list) else _whole(value)
