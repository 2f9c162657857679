"""Read the tokenizer of a Hugging Face folder: tokenizer.json, with settings from the configuration files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import AddedToken

from chunkrt.errors import ModelError, UnsupportedModelError, cause_of
from chunkrt.files import read_text
from chunkrt.tokenizer.text_settings import TextSettings, advised_sampling, end_ids
from chunkrt.tokenizer.tokenizer import VOCABULARY_FILE, add_tokens, encode_text, library_errors, read_vocabulary

LARGEST_WITHOUT_TEKKEN = 100_000
"""Largest number of tokens of a Mistral vocabulary that may be SentencePiece's; tekken has 131,072 tokens."""
_MISTRAL = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")


def read_folder(folder: Path, model_config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, TextSettings] | None:
    """Return the tokenizer of a folder, or None if the folder has no tokenizer.

    Args:
        model_config: content of config.json, for token ids that the tokenizer's own files omit.

    Raises:
        ModelError: a file is damaged, or names a token that the vocabulary lacks.
        UnsupportedModelError: the tokenizer is not in tokenizer.json, or puts several tokens before a text.
    """
    if not os.path.lexists(folder / VOCABULARY_FILE):  # a broken link is an error, unlike an absent file
        if (folder / "tokenizer.model").exists():
            raise UnsupportedModelError(
                "it has tokenizer.model, but no tokenizer.json; Transformers' "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes one"
            )
        return None
    library = read_vocabulary(folder / VOCABULARY_FILE)
    config = _config(folder)
    if config.get("fix_mistral_regex") is True and _may_have_the_wrong_split(library, model_config):
        library = _with_tekken_split(library)
    _add_declared_tokens(library, folder, config)
    generation = _read_json(folder / "generation_config.json")
    bos_id = _token_id(library, config["bos_token"]) if "bos_token" in config else model_config.get("bos_token_id")
    if bos_id == -1:  # explicitly none
        bos_id = None
    eos_id = _token_id(library, config.get("eos_token"))
    prefix_ids, suffix_ids = _frame(library)
    if not suffix_ids and eos_id is not None and config.get("add_eos_token") is True:
        suffix_ids = (eos_id,)
    add_bos = config.get("add_bos_token")
    if add_bos is None:
        if len(prefix_ids) > 1:
            raise UnsupportedModelError(
                f"its tokenizer.json puts {len(prefix_ids)} tokens before a text; at most one is implemented"
            )
        add_bos, bos_id = (True, prefix_ids[0]) if prefix_ids else (False, bos_id)
    chat_template, tool_template = _chat_templates(folder, config)
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
        chat_template=chat_template,
        tool_template=tool_template,
        suffix_ids=suffix_ids,
        pooling=_pooling(folder),
        sampling=advised_sampling(generation, is_random=generation.get("do_sample") is True),
    )


def _may_have_the_wrong_split(library: tokenizers.Tokenizer, model_config: Mapping[str, Any]) -> bool:
    """Return True if `fix_mistral_regex` has an effect on the model's tokenizer in Transformers.

    It affects large vocabularies of checkpoints that Transformers before version 5 wrote. Source: Transformers,
    TokenizersBackend.
    """
    if library.get_vocab_size() <= LARGEST_WITHOUT_TEKKEN or library.pre_tokenizer is None:
        return False
    major = str(model_config.get("transformers_version") or "0").partition(".")[0]
    return model_config.get("model_type") in _MISTRAL and not (major.isdecimal() and int(major) >= 5)


def _with_tekken_split(library: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return a tokenizer that splits texts into words like tekken, Mistral's own tokenizer.

    Raises ModelError if that fails.
    """
    from chunkrt.tokenizer.gguf_vocabulary import PRE_TOKENIZERS

    state = json.loads(library.to_str())
    pattern = {"Regex": PRE_TOKENIZERS["tekken"].splits[0]}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    given = state["pre_tokenizer"]
    if given["type"] == "Sequence":
        rest = given["pretokenizers"][1:]
    elif given["type"] == "Metaspace":
        rest = [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]
    else:
        rest = [given]
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, *rest]}
    with library_errors("fix_mistral_regex cannot be applied to its pre-tokenizer"):
        return tokenizers.Tokenizer.from_str(json.dumps(state))


def _config(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json. Without `added_tokens_decoder`, names in special_tokens_map.json take precedence.

    Source: Transformers, PreTrainedTokenizerBase._from_pretrained.
    """
    config = _read_json(folder / "tokenizer_config.json")
    return config if "added_tokens_decoder" in config else config | _read_json(folder / "special_tokens_map.json")


def _add_declared_tokens(library: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any]) -> None:
    """Add the tokens that the configuration declares and tokenizer.json lacks, at the next free ids.

    Source: Transformers, TokenizersBackend.__init__: tokens of `added_tokens_decoder` (in older files, of
    added_tokens.json) by their ids, then the named tokens, which are control tokens.

    Raises:
        ModelError: a declaration is neither text nor an object with its "content".
    """
    decoder = config.get("added_tokens_decoder")
    if decoder is None:
        old = _read_json(folder / "added_tokens.json")
        decoder = {token_id: {"content": token, "special": False} for token, token_id in old.items()}
    if not isinstance(decoder, dict):
        raise ModelError(f"added_tokens_decoder is {decoder!r:.80}, expected an object")
    try:
        by_id = [token for _, token in sorted(decoder.items(), key=lambda item: int(item[0]))]
    except (TypeError, ValueError) as error:
        raise ModelError(f"a token of added_tokens_decoder or added_tokens.json has no number: {error}") from error
    extra = [config.get(key) or () for key in ("extra_special_tokens", "additional_special_tokens")]
    listed = [token for several in extra for token in (several.values() if isinstance(several, dict) else several)]
    named = [token for key, token in config.items() if key.endswith("_token") and isinstance(token, str | dict)]
    named = [*named, *listed]
    names = {_content(token) for token in named}
    known = {token.content for token in library.get_added_tokens_decoder().values()}
    added = [_added(token, special=_content(token) in names) for token in by_id]
    added += [_added(token, special=True) for token in named]
    add_tokens(library, list({token.content: token for token in added if token.content not in known}.values()))


def _added(token: Any, *, special: bool) -> AddedToken:
    flags = token if isinstance(token, dict) else {}
    is_special = special or flags.get("special") is True
    flag = {name: flags.get(name) is True for name in ("single_word", "lstrip", "rstrip")}
    return AddedToken(_content(token), special=is_special, normalized=flags.get("normalized", not is_special), **flag)


def _frame(library: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens that tokenizer.json itself puts before a text, and after it."""
    bare = encode_text(library, "a").ids
    framed = encode_text(library, "a", add_special_tokens=True).ids
    for start in range(len(framed) - len(bare) + 1):
        if bare and framed[start : start + len(bare)] == bare:
            return tuple(framed[:start]), tuple(framed[start + len(bare) :])
    if framed == bare:
        return (), ()
    raise UnsupportedModelError(
        f"its tokenizer.json encodes 'a' as {framed} with and {bare} without special tokens; "
        "only tokens before and after a text are implemented"
    )


def _pooling(folder: Path) -> Literal["last", "mean"] | None:
    """Return the pooling that a Sentence Transformers folder specifies, "last" or "mean"; None for no or another
    pooling.

    Source: sentence_transformers.models.Pooling.
    """
    found = _read_json(folder / "1_Pooling" / "config.json")
    modes = [key for key, value in found.items() if key.startswith("pooling_mode_") and value is True]
    if isinstance(mode := found.get("pooling_mode"), str):
        modes = [f"pooling_mode_{mode}"]
    keys = ("pooling_mode_lasttoken",), ("pooling_mode_mean",), ("pooling_mode_mean_tokens",)
    if tuple(modes) not in keys:
        return None
    return "last" if modes == ["pooling_mode_lasttoken"] else "mean"


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the chat template, and the template for chats with tools if it differs.

    Source: Transformers, `get_chat_template`: either chat_template.jinja with further templates in
        additional_chat_templates, or tokenizer_config.json with one template or several templates by name.
    """
    found = config.get("chat_template")
    several = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    by_name = {each.get("name"): each.get("template") for each in several}
    templates = {"default": None if isinstance(found, list) else found} | by_name
    files = {"default": folder / "chat_template.jinja", "tool_use": folder / "additional_chat_templates/tool_use.jinja"}
    templates |= {name: _read_text(path) for name, path in files.items() if os.path.lexists(path)}
    return templates["default"], templates.get("tool_use")


def _token_id(library: tokenizers.Tokenizer, token: Any) -> int | None:
    """Return the id of a token that tokenizer_config.json names, as text or as an object with its "content"."""
    if token is None:
        return None
    token_id = library.token_to_id(_content(token))
    if token_id is None:
        raise ModelError(f"tokenizer_config.json names the token {token!r:.80}, which is missing in tokenizer.json")
    return token_id


def _content(token: Any) -> str:
    """Return the text of a declared token. Raise ModelError if it has none."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str) or any("\ud800" <= character <= "\udfff" for character in text):
        raise ModelError(f"tokenizer_config.json names the token {text!r:.80}, expected text")
    return text


def _ids(value: Any) -> list[int]:
    """Return the ids of eos_token_id, which may be a single id or a list."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise ModelError(f"eos_token_id is {value!r:.80}, expected token ids")
    return ids


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; return an empty object if the file does not exist."""
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
        raise ModelError(f"cannot read {path.name}: {cause_of(error)}") from error
