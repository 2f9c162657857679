"""Tokenizer files next to an exported model, in Hugging Face's format."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from chunkrt.errors import ConfigError
from chunkrt.files import written_aside
from chunkrt.graph.partition import Planned
from chunkrt.tokenizer import Tokenizer
from chunkrt.tokenizer.tokenizer import VOCABULARY_FILE

TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
"""Names of the tokenizer files in a Hugging Face folder."""

Files = dict[str, bytes]


def tokenizer_files(planned: Planned) -> Files:
    """Map file names to contents: a folder's own tokenizer files or, for a GGUF file, files made from its tokenizer.

    Raises:
        ModelError: the checkpoint's tokenizer is damaged.
        UnsupportedModelError: the tokenizer's kind is not implemented.
    """
    source = planned.source.path
    if source.is_dir():
        return {name: (source / name).read_bytes() for name in TOKENIZER_FILES if (source / name).is_file()}
    tokenizer = Tokenizer.from_source(planned.source)
    if tokenizer is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        vocabulary = (Path(folder) / VOCABULARY_FILE).read_bytes()
    settings = tokenizer.settings
    tokens = {"bos_token": settings.bos_id, "eos_token": next(iter(settings.eos_ids), None)}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": settings.add_bos}
    config |= {
        key: tokenizer.token_bytes[index].decode(errors="replace") for key, index in tokens.items() if index is not None
    }
    if settings.suffix_ids:
        config["add_eos_token"] = True
    named = {"default": settings.chat_template, "tool_use": settings.tool_template}
    templates = {name: _as_folders_have_it(t, settings.chat_adds_bos) for name, t in named.items() if t is not None}
    if len(templates) > 1:
        config["chat_template"] = [{"name": name, "template": template} for name, template in templates.items()]
    elif templates:
        (config["chat_template"],) = templates.values()
    generation = {"bos_token_id": settings.bos_id, "eos_token_id": list(settings.eos_ids)}
    return {
        VOCABULARY_FILE: vocabulary,
        "tokenizer_config.json": json.dumps(config, indent=1).encode(),
        "generation_config.json": json.dumps(generation, indent=1).encode(),
    }


def _as_folders_have_it(template: str, chat_adds_bos: bool) -> str:
    """Return a GGUF file's chat template, preceded by the beginning token if the tokenizer would add this token."""
    return "{{- bos_token }}" + template if chat_adds_bos and "bos_token" not in template else template


def check_beside(folder: Path, files: Files) -> None:
    """Raise ConfigError if a different file exists under one of the names."""
    for name, content in files.items():
        path = folder / name
        if path.exists() and (not path.is_file() or path.read_bytes() != content):
            raise ConfigError(f"{path} exists already and belongs to another model; write to another folder")


def write_beside(folder: Path, files: Files) -> None:
    """Write missing files, each to a temporary name that is then renamed. Raises ConfigError if writing fails."""
    for name, content in files.items():
        if (folder / name).exists():
            continue
        try:
            with written_aside(folder / name) as aside:
                aside.write_bytes(content)
        except OSError as error:
            raise ConfigError(f"cannot write {folder / name}: {error.strerror or error}") from error
