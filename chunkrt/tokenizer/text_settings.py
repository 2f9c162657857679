"""Settings that tokenizer.json lacks: beginning and end tokens, the chat template, and recommended sampling options."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from chunkrt.errors import ModelError

SETTINGS_FILE = "text.json"

TEXT_FORMAT = 1
"""Part of the name under which a compiled model is cached. Raise it when other settings are read from a checkpoint."""

END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<eos>",
    "</s>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "[e~[",
    "<\uff5cend▁of▁sentence\uff5c>",
    "<end_of_utterance>",
    # padding, and the borders of files and repositories in code
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
)
"""Control tokens that end a generation in every vocabulary that has them, regardless of its declarations.

Source: llama.cpp, src/llama-vocab.cpp, the tokens that it counts as end of generation.
"""

_PART_MESSAGES = (("<|call|>", "<|return|>"), ("<|call|>", "<|flush|>"), ("<|calls|>", "<|flush|>"))
"""In a vocabulary with both tokens of a pair, "<|end|>" separates the messages of one answer and does not end it.
Source: llama.cpp, src/llama-vocab.cpp."""


ADVISED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling options for which makers of models recommend values."""


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """Text settings, kept in the engine directory as text.json.

    Args:
        bos_id: the token that begins a text, if one exists.
        eos_ids: all tokens that end a generation; chat templates call the first token eos_token.
        add_bos: a text that is not a chat starts with `bos_id`.
        chat_template: Jinja source, if the model was tuned for chat.
        sampling: values of the options in ADVISED that the model's makers recommend for chats; empty for greedy
            decoding.
        suffix_ids: tokens that follow a text whose embedding is computed.
        chat_adds_bos: add `bos_id` to a chat that does not begin with it, because the template of a GGUF file may leave
            this to the tokenizer.
        tool_template: Jinja source for chats with tools, if it differs.
        pooling: pooling of the model's embeddings, "last" or "mean", if its makers specify it.

    Raises:
        ModelError: a value has the wrong type, or `add_bos` is set without a `bos_id`.
    """

    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool
    chat_template: str | None = field(repr=False)
    sampling: Mapping[str, float] = field(default_factory=dict)
    suffix_ids: tuple[int, ...] = ()
    chat_adds_bos: bool = False
    tool_template: str | None = field(default=None, repr=False)
    pooling: Literal["last", "mean"] | None = None

    def __post_init__(self) -> None:
        if self.bos_id is not None and not _is_id(self.bos_id):
            raise ModelError(f"the beginning token is {self.bos_id!r}, expected a token id")
        if not all(map(_is_id, self.suffix_ids)):
            raise ModelError(f"the tokens after a text are {self.suffix_ids!r:.80}, expected token ids")
        if self.pooling not in (None, "last", "mean"):
            raise ModelError(f"the pooling is {self.pooling!r:.80}, expected last or mean")
        if not all(map(_is_id, self.eos_ids)):
            raise ModelError(f"the end tokens are {self.eos_ids!r:.80}, expected token ids")
        if not isinstance(self.add_bos, bool):
            raise ModelError(f"add_bos_token is {self.add_bos!r:.80}, expected true or false")
        if not isinstance(self.chat_adds_bos, bool):
            raise ModelError(f"chat_adds_bos is {self.chat_adds_bos!r:.80}, expected true or false")
        for template in (self.chat_template, self.tool_template):
            if not isinstance(template, str | None):
                raise ModelError(f"the chat_template is of type {type(template).__name__}, expected text")
        if not isinstance(self.sampling, Mapping) or _numbers(self.sampling) != self.sampling:
            raise ModelError(f"the sampling options are {self.sampling!r:.80}, expected numbers by name")
        if self.add_bos and self.bos_id is None:
            raise ModelError("the tokenizer is to begin every text with its beginning token, but declares none")

    def to_json(self) -> str:
        """Return the settings as JSON text."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> TextSettings:
        """Parse the output of `to_json`.

        Raises:
            ModelError: the text is not such an output.
        """
        try:
            values = json.loads(text)
            return TextSettings(
                **{**values, "eos_ids": tuple(values["eos_ids"]), "suffix_ids": tuple(values.get("suffix_ids", ()))}
            )
        except (ValueError, TypeError, KeyError, RecursionError, ModelError) as error:
            raise ModelError(f"{SETTINGS_FILE}: {error!r}") from error


def _is_id(value: object) -> bool:
    return type(value) is int and value >= 0


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that belong to sampling options and are finite numbers."""
    known = ((name, values.get(name)) for name in ADVISED)
    return {name: v for name, v in known if isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)}


def advised_sampling(values: Mapping[str, Any], *, is_random: bool) -> dict[str, float]:
    """Return a model's recommended sampling options, by their names in Transformers' generation_config.json.

    As in that file, a `top_k` of 0 keeps all tokens. Values that are not numbers are ignored.

    Args:
        is_random: answers are sampled; if False, answers are greedy, regardless of the other values.
    """
    numbers = _numbers(values)
    if not is_random:
        return {name: v for name, v in numbers.items() if name == "repetition_penalty"}
    if not numbers.get("top_k"):
        numbers.pop("top_k", None)
    return {"temperature": 1.0} | numbers


def known_ends(vocab: Container[str]) -> list[str]:
    """Return the tokens of END_TOKENS that a vocabulary has and that end a generation there."""
    parts_messages = any(all(token in vocab for token in pair) for pair in _PART_MESSAGES)
    return [token for token in END_TOKENS if token in vocab and not (token == "<|end|>" and parts_messages)]


def end_ids(declared: Iterable[int], special: Mapping[str, int]) -> tuple[int, ...]:
    """Return the declared end tokens, followed by those of END_TOKENS in `special` (control tokens by text)."""
    return tuple(dict.fromkeys([*declared, *(special[token] for token in known_ends(special))]))
