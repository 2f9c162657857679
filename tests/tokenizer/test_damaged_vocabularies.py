"""Vocabularies that are damaged or hostile are refused with a message, and never end the process."""

import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_vocabularies import REFERENCE, make_tokenizer

from chunkrt.errors import ModelError
from chunkrt.tokenizer import Tokenizer

SOUND: dict[str, Any] = json.loads(make_tokenizer("byte_level", pre="smollm").to_json())
FOLDER = pytest.mark.parametrize("read", ["folder", "engine_directory"])


def write(folder: Path, **parts: Any) -> None:
    """Write a tokenizer.json with some parts replaced, and the settings next to it."""
    make_tokenizer("byte_level", pre="smollm").save(folder)
    (folder / "tokenizer.json").write_text(json.dumps(SOUND | parts), "utf-8")


def load(folder: Path, read: str) -> Tokenizer:
    """Load the tokenizer of a folder, as a checkpoint's or as an engine directory's."""
    if read == "folder":
        found = Tokenizer.from_source(SimpleNamespace(path=folder, config={}))
    else:
        found = Tokenizer.load(folder)
    assert found is not None
    return found


def with_largest_id(kind: str, token_id: int) -> dict[str, Any]:
    """Return parts of a tokenizer.json that give one token this id."""
    if kind == "added":
        first, *rest = SOUND["added_tokens"]
        return {"added_tokens": [first | {"id": token_id}, *rest]}
    vocab = SOUND["model"]["vocab"] | {"large": token_id}
    others = {"type": kind, "vocab": vocab, "unk_token": "large"}
    if kind == "WordPiece":
        others |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    return {"model": SOUND["model"] | {"vocab": vocab} if kind == "BPE" else others}


@FOLDER
@pytest.mark.parametrize("kind", ["BPE", "WordLevel", "WordPiece", "added"])
@pytest.mark.parametrize("token_id", [1 << 24, 2**31 - 1])
def test_an_id_beyond_any_vocabulary_is_refused(tmp_path, kind, token_id, read):
    write(tmp_path, **with_largest_id(kind, token_id))
    with pytest.raises(ModelError, match=f"tokenizer.json gives a token the id {token_id}; at most 16777215"):
        load(tmp_path, read)


@FOLDER
def test_an_id_is_refused_whichever_of_two_vocabularies_counts(tmp_path, read):
    write(tmp_path)
    text = json.dumps(SOUND)
    twice = text.replace('"vocab": {', '"vocab": {"large": 2147483647}, "vocab": {')
    (tmp_path / "tokenizer.json").write_text(twice, "utf-8")
    with pytest.raises(ModelError, match="names a key twice"):
        load(tmp_path, read)


def test_large_numbers_that_are_no_ids_are_accepted(tmp_path):
    truncation = {"direction": "Right", "max_length": 10**9, "strategy": "LongestFirst", "stride": 0}
    write(tmp_path, truncation=truncation)
    assert load(tmp_path, "folder").decode([67]) == load(tmp_path, "engine_directory").decode([67])


@FOLDER
@pytest.mark.parametrize("charsmap", [b"", b"\x04\x00\x00\x00\x01", b"\xff" * 8])
def test_a_panic_of_the_library_is_an_error(tmp_path, charsmap, read):
    normalizer = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()}
    write(tmp_path, normalizer=normalizer)
    with pytest.raises(ModelError, match=r"tokenizer.json cannot be read|cannot encode"):
        load(tmp_path, read).encode("a")


@FOLDER
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "text.json"])
def test_a_link_to_a_missing_file_is_an_error(tmp_path, file, read):
    if file == {"folder": "text.json", "engine_directory": "tokenizer_config.json"}[read]:
        pytest.skip("the file does not belong to this kind of folder")
    write(tmp_path)
    (tmp_path / file).unlink(missing_ok=True)
    (tmp_path / file).symlink_to(tmp_path / "missing")
    with pytest.raises(ModelError, match="No such file"):
        load(tmp_path, read)


def test_a_chat_template_that_is_a_link_to_a_missing_file_is_an_error(tmp_path):
    write(tmp_path)
    (tmp_path / "chat_template.jinja").symlink_to(tmp_path / "missing")
    with pytest.raises(ModelError, match=r"cannot read chat_template\.jinja"):
        load(tmp_path, "folder")


def test_byte_order_marks_are_no_part_of_a_file(tmp_path):
    write(tmp_path)
    for file, text in (
        ("tokenizer.json", json.dumps(SOUND)),
        ("tokenizer_config.json", '{"bos_token": "<|im_start|>"}'),
        ("generation_config.json", '{"eos_token_id": 2}'),
        ("chat_template.jinja", "{{ messages[0].content }}"),
    ):
        (tmp_path / file).write_text(text, "utf-8-sig")
    tokenizer = load(tmp_path, "folder")
    assert tokenizer.settings.bos_id == 1
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}]) == "a"


@pytest.mark.parametrize("length", [1025, 10**6])
def test_a_sentencepiece_token_without_end_is_refused(length):
    vocabulary = REFERENCE["vocabularies"]["sentence_piece"]
    tokens, types, scores = (list(vocabulary[f"tokenizer.ggml.{name}"]) for name in ("tokens", "token_type", "scores"))
    longest = {"tokens": [*tokens, "e" * length], "token_type": [*types, 1], "scores": [*scores, -1.0]}
    with pytest.raises(ModelError, match=f"has {length} characters; a piece of SentencePiece has at most 1024"):
        make_tokenizer("sentence_piece", **longest)


@pytest.mark.parametrize("pre", ["default", "qwen2"])
def test_pieces_that_a_file_calls_byte_level_are_refused(pre):
    """llama.cpp's converter writes Gemma's folders without tokenizer.model so; most texts would have no tokens."""
    metadata = REFERENCE["vocabularies"]["gemma"] | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.merges": ["a b"],
    }
    with pytest.raises(ModelError, match="'gpt2', which is byte-level BPE, but the tokens are SentencePiece's"):
        Tokenizer.from_source(SimpleNamespace(path=Path("small.gguf"), metadata=metadata, config={}))
