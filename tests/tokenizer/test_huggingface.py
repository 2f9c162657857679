"""The tokenizer of a Hugging Face folder is assembled from its several files."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_vocabularies import make_tokenizer

from chunkrt.errors import ModelError, UnsupportedModelError
from chunkrt.tokenizer import Tokenizer

END_OF_TEXT, IM_START, IM_END = 0, 1, 2
BEGINS_WITH_IM_START = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [IM_START], "tokens": ["<|im_start|>"]}},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a folder with only a tokenizer.json."""
    make_tokenizer("byte_level", pre="smollm").save(tmp_path)
    (tmp_path / "text.json").unlink()
    return tmp_path


def read(folder: Path, **config: Any) -> Tokenizer | None:
    """Load the tokenizer of a folder whose config.json holds `config`."""
    return Tokenizer.from_source(SimpleNamespace(path=folder, config=config))


def write(folder: Path, file: str, **contents: Any) -> None:
    """Write a JSON file."""
    (folder / file).write_text(json.dumps(contents), "utf-8")


def change_vocabulary(folder: Path, **parts: Any) -> None:
    """Replace parts of tokenizer.json."""
    contents = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    write(folder, "tokenizer.json", **(contents | parts))


def test_without_a_tokenizer_there_is_none(tmp_path):
    assert read(tmp_path) is None


def test_a_sentencepiece_model_alone_is_not_implemented(tmp_path):
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(UnsupportedModelError, match="save_pretrained"):
        read(tmp_path)


def test_ids_come_from_the_model_configuration_where_nothing_else_says(folder):
    tokenizer = read(folder, bos_token_id=IM_START, eos_token_id=[7, 8])
    assert tokenizer.settings.bos_id == IM_START
    assert tokenizer.settings.eos_ids == (7, 8, IM_END, END_OF_TEXT)
    assert not tokenizer.settings.add_bos


def test_tokenizer_config_comes_first_then_generation_config(folder):
    write(folder, "tokenizer_config.json", bos_token={"content": "<|endoftext|>"}, eos_token="<|im_end|>")
    write(folder, "generation_config.json", eos_token_id=[9, IM_END])
    tokenizer = read(folder, bos_token_id=5, eos_token_id=6)
    assert tokenizer.settings.bos_id == END_OF_TEXT
    assert tokenizer.settings.eos_ids == (IM_END, 9, 6, END_OF_TEXT)


@pytest.mark.parametrize(
    ("generation", "advised"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.9}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        (
            {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
            {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
        ),
        ({"do_sample": True, "top_k": 0, "temperature": None}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": "hot", "min_p": True}, {"temperature": 1.0}),
        ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
    ],
)
def test_sampling_advice_is_read_like_in_transformers(folder, generation, advised):
    write(folder, "generation_config.json", **generation)
    assert read(folder).settings.sampling == advised


def test_a_null_beginning_token_is_none(folder):
    write(folder, "tokenizer_config.json", bos_token=None)
    assert read(folder, bos_token_id=5).settings.bos_id is None


@pytest.mark.parametrize(
    ("processor", "add_bos_token", "expected"),
    [
        (None, None, False),
        (None, True, True),
        (BEGINS_WITH_IM_START, None, True),
        (BEGINS_WITH_IM_START, False, False),
    ],
)
def test_whether_a_text_begins_with_a_token(folder, processor, add_bos_token, expected):
    change_vocabulary(folder, post_processor=processor)
    write(folder, "tokenizer_config.json", bos_token="<|im_start|>", add_bos_token=add_bos_token)
    ids = read(folder).encode("a", add_special=True, parse_special=False)
    assert ids[:-1] == ([IM_START] if expected else [])


def test_more_than_one_token_before_a_text_is_not_implemented(folder):
    pieces = BEGINS_WITH_IM_START["single"]
    change_vocabulary(folder, post_processor=BEGINS_WITH_IM_START | {"single": [pieces[0], *pieces]})
    with pytest.raises(UnsupportedModelError, match="puts 2 tokens before a text"):
        read(folder)


def test_truncation_in_the_file_is_ignored(folder):
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    change_vocabulary(folder, truncation=truncation)
    assert read(folder).decode(read(folder).encode("x" * 99, add_special=False, parse_special=False)) == "x" * 99


@pytest.mark.parametrize(
    ("in_config", "in_file", "expected"),
    [
        (None, None, None),
        ("A", None, "A"),
        ("A", "B", "B"),
        ([{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}], None, "D"),
        ([{"name": "tool_use", "template": "T"}], None, None),
    ],
)
def test_where_the_chat_template_is_found(folder, in_config, in_file, expected):
    write(folder, "tokenizer_config.json", chat_template=in_config)
    if in_file:
        (folder / "chat_template.jinja").write_text(in_file, "utf-8")
    assert read(folder).settings.chat_template == expected


def test_a_decoder_of_another_kind_is_named(folder):
    change_vocabulary(folder, decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})
    with pytest.raises(UnsupportedModelError, match="decoder is WordPiece; byte-level and SentencePiece"):
        read(folder)


@pytest.mark.parametrize(
    ("file", "contents", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", "[" * 10**6, "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", '{"bos_token": "\\ud800"}', "expected text"),
        ("tokenizer_config.json", "[]", "holds list, expected an object"),
        ("tokenizer_config.json", '{"bos_token": ""}', "names the token '', which is missing in tokenizer.json"),
        ("tokenizer_config.json", '{"eos_token": 3}', "names the token 3"),
        ("tokenizer_config.json", '{"add_bos_token": true}', "declares none"),
        ("tokenizer_config.json", '{"add_bos_token": "yes"}', "add_bos_token"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default", "template": 3}]}', "chat_template"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id is 'x'"),
        ("generation_config.json", '{"eos_token_id": [[1]]}', "eos_token_id is [[1]]"),
    ],
)
def test_a_damaged_file_is_a_model_error_that_names_it(folder, file, contents, message):
    (folder / file).write_text(contents, "utf-8")
    with pytest.raises(ModelError) as caught:
        read(folder)
    assert message in str(caught.value)


@pytest.mark.parametrize("token_id", [1000, -1, 10**9])
def test_an_end_that_the_model_cannot_give_is_refused(folder, token_id):
    with pytest.raises(ModelError, match=f"eos_token_id is {token_id}, outside the vocabulary of 1000"):
        read(folder, vocab_size=1000, eos_token_id=[3, token_id])
