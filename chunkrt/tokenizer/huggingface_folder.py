"""The tokenizer of a Hugging Face folder: tokenizer.json, and what the configuration files say about it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from chunkrt.errors import ModelError, UnsupportedModelError
from chunkrt.files import read_text
from chunkrt.tokenizer.library import VOCABULARY_FILE, encode_text, read_vocabulary
from chunkrt.tokenizer.text_settings import TextSettings, advised_sampling, end_ids


def read_folder(folder: Path, model_config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, TextSettings] | None:
    """The tokenizer that a folder holds, or None if it holds none.

    Args:
        model_config: config.json, for the token ids that the tokenizer's own files leave out.

    Raises:
        ModelError: a file is damaged, or names a token that the vocabulary lacks.
        UnsupportedModelError: the tokenizer is not in tokenizer.json, or puts more around a text than one
            token before it.
    """
    if not os.path.lexists(folder / VOCABULARY_FILE):  # a link to a file that is missing is an error, not its absence
        if (folder / "tokenizer.model").exists():
            raise UnsupportedModelError(
                "it has tokenizer.model, but no tokenizer.json; Transformers' "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes one"
            )
        return None
    library = read_vocabulary(folder / VOCABULARY_FILE)
    config = _read_json(folder / "tokenizer_config.json")
    generation = _read_json(folder / "generation_config.json")
    bos_id = _token_id(library, config["bos_token"]) if "bos_token" in config else model_config.get("bos_token_id")
    add_bos = config.get("add_bos_token")
    if add_bos is None:
        prefix = _prefix(library)
        add_bos, bos_id = (True, prefix) if prefix is not None else (False, bos_id)
    eos_id = _token_id(library, config.get("eos_token"))
    declared = [*_ids(eos_id), *_ids(generation.get("eos_token_id")), *_ids(model_config.get("eos_token_id"))]
    size = model_config.get("vocab_size")
    if isinstance(size, int) and (outside := [token_id for token_id in declared if not 0 <= token_id < size]):
        raise ModelError(f"eos_token_id is {outside[0]}, outside the vocabulary of {size}")
    added = library.get_added_tokens_decoder()
    special = {token.content: token_id for token_id, token in added.items() if token.special}
    return library, TextSettings(
        bos_id=bos_id,
        eos_ids=end_ids(declared, special),
        add_bos=add_bos,
        chat_template=_chat_template(folder, config),
        sampling=advised_sampling(generation, is_random=generation.get("do_sample") is True),
    )


def _prefix(library: tokenizers.Tokenizer) -> int | None:
    """The token that tokenizer.json itself puts before a text."""
    bare = encode_text(library, "a").ids
    framed = encode_text(library, "a", add_special_tokens=True).ids
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
    if os.path.lexists(folder / "chat_template.jinja"):
        return _read_text(folder / "chat_template.jinja")
    template = config.get("chat_template")
    if isinstance(template, list):
        defaults = [each for each in template if isinstance(each, dict) and each.get("name") == "default"]
        template = defaults[0].get("template") if defaults else None
    return template


def _token_id(library: tokenizers.Tokenizer, token: Any) -> int | None:
    """The id of a token that tokenizer_config.json names, as text or as an object with its "content"."""
    if token is None:
        return None
    text = token.get("content") if isinstance(token, dict) else token
    try:
        token_id = library.token_to_id(text) if isinstance(text, str) else None
    except UnicodeEncodeError:  # a lone surrogate
        token_id = None
    if token_id is None:
        raise ModelError(f"tokenizer_config.json names the token {text!r:.80}, which tokenizer.json has not")
    return token_id


def _ids(value: Any) -> list[int]:
    """An eos_token_id, which may be one or several."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise ModelError(f"eos_token_id is {value!r:.80}, expected token ids")
    return ids


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty if there is no such file."""
    if not os.path.lexists(path):
        return {}
    try:
        values = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path.name} holds {type(values).__name__}, expected an object")
    return values


def _read_text(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read {path.name}: {error}") from error
