"""Settings next to an ONNX decoder: genai_config.json of ONNX Runtime GenAI, or Transformers' config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chunkrt.checkpoints.checkpoint import GENAI
from chunkrt.errors import ModelError, cause_of
from chunkrt.files import read_text

TRANSFORMERS = "config.json"


def read_settings(folder: Path) -> tuple[str, Mapping[str, Any]]:
    """Return the family's name, "onnx" if no file states it, and config keys for the tokenizer and the context.

    Raises:
        ModelError: a file is damaged.
    """
    transformers, genai = _read(folder / TRANSFORMERS), _read(folder / GENAI).get("model", {})
    if not isinstance(genai, dict):
        raise ModelError(f"{folder / GENAI}: its model is {genai!r:.60}, expected an object")
    config = {
        "bos_token_id": genai.get("bos_token_id"),
        "eos_token_id": genai.get("eos_token_id"),
        "max_position_embeddings": genai.get("context_length"),
        "model_type": genai.get("type"),
    }
    config = {key: value for key, value in config.items() if value is not None} | transformers
    family = config.get("model_type", "onnx")
    if not isinstance(family, str):
        raise ModelError(f"{folder}: the model_type is {family!r:.60}, expected a name")
    return family, config


def named_file(folder: Path) -> Path | None:
    """Return the path of the model file that genai_config.json names. Raises ModelError if it does not exist."""
    model = _read(folder / GENAI).get("model")
    decoder = model.get("decoder") if isinstance(model, dict) else None
    name = decoder.get("filename") if isinstance(decoder, dict) else None
    if name is None:
        return None
    if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
        raise ModelError(f"{folder / GENAI} names the file {name!r:.80}, which is not next to it")
    return folder / name


def _read(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; empty if the file does not exist."""
    try:
        values = json.loads(read_text(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {cause_of(error)}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds {type(values).__name__}, expected an object")
    return values
