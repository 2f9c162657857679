"""The tokenizer of a Hugging Face folder: tokenizer.json, and what the configuration files say about it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from chunkrt.errors import ModelError, UnsupportedModelError
from chunkrt.tokenizer.text_settings import TextSettings, end_ids
from chunkrt.tokenizer.tokenizer import VOCABULARY_FILE, read_library


def read_folder(
    folder: Path, model_config: Mapping[str, Any]
) -> tuple[tokenizers.Tokenizer, TextSettings] | None:
    """The tokenizer that a folder holds, or None if it holds none.

    Args:
        model_config: config.json, for the token ids that the tokenizer's own files leave out.

    Raises:
        ModelError: a file is damaged, or names a token that the vocabulary lacks.
        UnsupportedModelError: the tokenizer is not in tokenizer.json, or puts more around a text than one
            token before it.
    """
    if not (folder / VOCABULARY_FILE).exists():
        if (folder / "tokenizer.model").exists():
            raise UnsupportedModelError(
                "it has tokenizer.model, but no tokenizer.json; Transformers' "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes one"
            )
        return None
    library = read_library(folder / VOCABULARY_FILE)
    config = _read_json(folder / "tokenizer_config.json")
    generation = _read_json(folder / "generation_config.json")
    bos_id = (
        _token_id(library, config["bos_token"]) if "bos_token" in config else model_config.get("bos_token_id")
    )
    add_bos = config.get("add_bos_token")
    if add_bos is None:
        prefix = _prefix(library)
        add_bos, bos_id = (True, prefix) if prefix is not None else (False, bos_id)
    declared = [_token_id(library, config.get("eos_token"))]
    for ids in (generation.get("eos_token_id"), model_config.get("eos_token_id")):
        declared += ids if isinstance(ids, list) else [ids]
    added = library.get_added_tokens_decoder()
    special = {token.content: token_id for token_id, token in added.items() if token.special}
    return library, TextSettings(
        bos_id=bos_id,
        eos_ids=end_ids((token_id for token_id in declared if token_id is not None), special),
        add_bos=add_bos,
        chat_template=_chat_template(folder, config),
    )


def _prefix(library: tokenizers.Tokenizer) -> int | None:
    """The token that tokenizer.json itself puts before a text."""
    bare = library.encode("a", add_special_tokens=False).ids
    framed = library.encode("a", add_special_tokens=True).ids
    if framed == bare:
        return None
    if framed[1:] == bare:
        return framed[0]
    raise UnsupportedModelError(
        f"its tokenizer.json encodes 'a' as {framed} with and {bare} without special tokens; "
        "only one token before the text is implemented"
    )


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, or what tokenizer_config.json has: a template, or several by name."""
    if (folder / "chat_template.jinja").exists():
        return _read_text(folder / "chat_template.jinja")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {named["name"]: named["template"] for named in template}.get("default")
    if not isinstance(template, str | None):
        raise ModelError(f"tokenizer_config.json: found a chat_template of type {type(template).__name__}")
    return template


def _token_id(library: tokenizers.Tokenizer, token: str | Mapping[str, Any] | None) -> int | None:
    """The id of a token that tokenizer_config.json names, as text or as an object with its "content"."""
    if token is None:
        return None
    text = token if isinstance(token, str) else token["content"]
    token_id = library.token_to_id(text)
    if token_id is None:
        raise ModelError(f"tokenizer_config.json names the token {text!r}, which tokenizer.json has not")
    return token_id


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty if there is no such file."""
    if not path.exists():
        return {}
    try:
        values = json.loads(_read_text(path))
    except ValueError as error:
        raise ModelError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path.name} holds {type(values).__name__}, expected an object")
    return values


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read {path.name}: {error}") from error
