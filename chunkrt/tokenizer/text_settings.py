"""What a tokenizer.json does not say: where texts begin and end, and how a chat becomes a prompt."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields

from chunkrt.errors import ModelError

END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<EOT>",
    "<\uff5cend▁of▁sentence\uff5c>",
    "<end_of_utterance>",
)
"""Control tokens that end a generation wherever a vocabulary has them, whatever else it declares.

Source: llama.cpp, src/llama-vocab.cpp, the tokens it counts as end of generation.
"""


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """Kept in the engine directory as text.json.

    Args:
        bos_id: the token that begins a text, if there is one.
        eos_ids: every token that ends a generation; the first is what chat templates call eos_token.
        add_bos: whether a text that is not a chat starts with `bos_id`.
        chat_template: Jinja source, if the model was tuned for chat.

    Raises:
        ModelError: `add_bos` without a `bos_id`.
    """

    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool
    chat_template: str | None

    def __post_init__(self) -> None:
        if self.add_bos and self.bos_id is None:
            raise ModelError(
                "the tokenizer is to begin every text with its beginning token, but declares none"
            )

    def to_json(self) -> str:
        """The settings as JSON text."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False)

    @staticmethod
    def from_json(text: str) -> TextSettings:
        """Read what `to_json` wrote. Raises ModelError if it is anything else."""
        try:
            values = json.loads(text)
            if set(values) != {field.name for field in fields(TextSettings)}:
                raise ValueError(f"found the keys {sorted(values)}")
            bos_id, eos_ids, chat_template = values["bos_id"], values["eos_ids"], values["chat_template"]
            for token_id in [*eos_ids, *([] if bos_id is None else [bos_id])]:
                if type(token_id) is not int or token_id < 0:
                    raise ValueError(f"found the token id {token_id!r}")
            if not isinstance(values["add_bos"], bool) or not isinstance(chat_template, str | None):
                raise ValueError("add_bos is not a boolean, or chat_template not text")
            return TextSettings(**{**values, "eos_ids": tuple(eos_ids)})
        except (ValueError, TypeError) as error:
            raise ModelError(f"text.json is damaged ({error}); compile the model again") from error


def end_ids(declared: Iterable[int], special: dict[str, int]) -> tuple[int, ...]:
    """The declared end tokens, then those that `special` (control tokens by text) has of END_TOKENS."""
    known = [special[token] for token in END_TOKENS if token in special]
    return tuple(dict.fromkeys([*declared, *known]))
