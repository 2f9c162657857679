"""Text halves of multimodal checkpoints.

The config.json of a multimodal model has the decoder's keys in `text_config`. The tensors of other halves are not used.
Source: Transformers' `Gemma3Config`, `Mistral3Config` and `Qwen3_5Config`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chunkrt.errors import ModelError

log = logging.getLogger(__name__)

SECTION = "text_config"


@dataclass(frozen=True, kw_only=True)
class Composite:
    """Transformers' defaults for a composite model_type: the model_type of its text half, and whether the LM head is
    tied.
    """

    text_type: str
    is_tied: bool


COMPOSITES = {
    "gemma3": Composite(text_type="gemma3_text", is_tied=True),
    "mistral3": Composite(text_type="mistral", is_tied=True),
    "qwen3_5": Composite(text_type="qwen3_5_text", is_tied=False),
}

_WHOLE = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")
"""Keys of the complete model that apply to its text half."""

_OTHER_HALVES = re.compile(r"(model\.)?(audio_tower|multi_modal_projector|vision_tower|visual)\.")


def text_half(config: Mapping[str, Any], path: Path) -> dict[str, Any] | None:
    """Return the config of the text half, under its own `model_type`; None if the model is not composite.

    Raises:
        ModelError: the config has no section for text, the section's model_type is not a word, or a flag is neither
            true nor false.
    """
    if (composite := COMPOSITES.get(config["model_type"])) is None:
        return None
    text = config.get(SECTION)
    if not isinstance(text, Mapping):
        raise ModelError(f"{path} has no {SECTION}, which the model_type {config['model_type']!r} needs")
    text_type = text.get("model_type", composite.text_type)
    if not isinstance(text_type, str):
        raise ModelError(f"{path}: the model_type of its {SECTION} is {text_type!r}, expected a word")
    ties = [half["tie_word_embeddings"] for half in (config, text) if half.get("tie_word_embeddings") is not None]
    if odd := [tie for tie in ties if not isinstance(tie, bool)]:
        raise ModelError(f"{path}: tie_word_embeddings is {odd[0]!r:.80}, expected true or false")
    whole = {key: config[key] for key in _WHOLE if config.get(key) is not None}
    return {**text, **whole, "model_type": text_type, "tie_word_embeddings": any(ties) if ties else composite.is_tied}


def tensors_of_other_halves(names: Iterable[str], path: Path) -> set[str]:
    """Return the names of tensors that the text half does not read, and log one line about them."""
    found = {name: match[0] for name in names if (match := _OTHER_HALVES.match(name))}
    if found:
        parts = ", ".join(f"{part}*" for part in sorted(set(found.values())))
        log.warning("%s: only text is read; ignoring %d tensors: %s", path.name, len(found), parts)
    return set(found)
