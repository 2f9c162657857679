"""Encoding, decoding token by token, storage in an engine directory, and errors of damaged vocabularies."""

import json
import sys
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from small_vocabularies import REFERENCE, TEXTS, make_tokenizer

from chunkrt.errors import ConfigError, ModelError, UnsupportedModelError
from chunkrt.tokenizer import IncrementalDecoder, TextSettings, Tokenizer
from chunkrt.tokenizer.gguf_vocabulary import read_metadata

BYTE_LEVEL = make_tokenizer("byte_level", pre="smollm")
SENTENCE_PIECE = make_tokenizer("sentence_piece")
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCE_PIECE], ids=["byte_level", "sentence_piece"])
BOS, EOS, END_OF_TEXT = 1, 2, 0

spelled_controls = st.sampled_from(["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<s>", "</s>", "<unk>", "<0x0A>"])
texts = st.lists(st.text(max_size=8) | spelled_controls | st.sampled_from([" ", "\n", "<", "s>"]), max_size=6)


@BOTH
@given(parts=texts)
def test_no_text_of_a_user_becomes_a_control_token(tokenizer, parts):
    ids = tokenizer.encode("".join(parts), add_special=False, parse_special=False)
    assert not tokenizer.token_bytes.special_ids & set(ids)


@BOTH
@given(parts=texts)
def test_encoding_loses_nothing(tokenizer, parts):
    text = "".join(parts)
    assert tokenizer.decode(tokenizer.encode(text, add_special=False, parse_special=False)) == text


@BOTH
@given(data=st.data())
def test_pieces_add_up_to_the_whole_and_are_never_broken(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    decoder = IncrementalDecoder(tokenizer)
    pieces = [decoder.push(token_id) for token_id in ids]
    assert "".join(pieces) + decoder.flush() == tokenizer.decode(ids)
    shown = b"".join(tokenizer.token_bytes[i] for i in ids if i not in tokenizer.token_bytes.special_ids)
    if tokenizer is SENTENCE_PIECE:
        shown = shown.removeprefix(b" ")
    assert tokenizer.decode(ids) == shown.decode(errors="replace")


@BOTH
def test_a_character_appears_with_its_last_byte(tokenizer):
    ids = tokenizer.encode("\U0001f9ff", add_special=False, parse_special=False)
    decoder = IncrementalDecoder(tokenizer)
    pieces = [decoder.push(token_id) for token_id in ids]
    assert len(ids) >= 3
    assert pieces == [""] * (len(ids) - 1) + ["\U0001f9ff"]


def test_a_character_cut_off_at_the_end_is_a_replacement_character():
    decoder = IncrementalDecoder(BYTE_LEVEL)
    ids = BYTE_LEVEL.encode("\U0001f9ff", add_special=False, parse_special=False)
    assert decoder.push(ids[0]) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


def test_a_continued_text_keeps_the_space_before_its_first_word():
    ids = SENTENCE_PIECE.encode("x", add_special=False, parse_special=False)
    for follows_text, expected in ((False, "x"), (True, " x")):
        decoder = IncrementalDecoder(SENTENCE_PIECE, follows_text=follows_text)
        assert "".join(map(decoder.push, ids)) + decoder.flush() == expected


def test_control_tokens_are_read_only_on_request_and_have_no_text():
    text = "<|im_end|>"
    assert BYTE_LEVEL.encode(text, add_special=False, parse_special=True) == [EOS]
    assert EOS not in BYTE_LEVEL.encode(text, add_special=False, parse_special=False)
    assert BYTE_LEVEL.decode([EOS]) == ""


def test_the_beginning_token_is_added_where_the_model_wants_it():
    assert SENTENCE_PIECE.encode("", add_special=True, parse_special=False) == [BOS]
    assert SENTENCE_PIECE.encode("", add_special=False, parse_special=False) == []
    assert BYTE_LEVEL.encode("", add_special=True, parse_special=False) == []
    assert make_tokenizer("byte_level", pre="llama-bpe").settings.add_bos
    assert not make_tokenizer("byte_level", pre="llama-bpe", add_bos_token=False).settings.add_bos
    assert not make_tokenizer("sentence_piece", add_bos_token=False).settings.add_bos


def test_every_end_token_ends_a_generation_the_declared_one_first():
    assert BYTE_LEVEL.settings.eos_ids == (EOS, END_OF_TEXT)
    assert BYTE_LEVEL.eos_ids == {EOS, END_OF_TEXT}
    assert make_tokenizer("byte_level", pre="smollm", eot_token_id=5).eos_ids == {EOS, END_OF_TEXT, 5}


@pytest.mark.parametrize("token_id", [-1, 10**6, 2**40])
def test_a_token_outside_the_vocabulary_is_an_error(token_id):
    with pytest.raises(ConfigError, match=f"token {token_id} has no text: the vocabulary holds"):
        BYTE_LEVEL.decode([token_id])


def test_rows_of_the_model_without_a_token_have_no_text(tmp_path):
    """Transformers decodes such ids to nothing, too."""
    BYTE_LEVEL.save(tmp_path)
    size = BYTE_LEVEL.vocab_size
    padded = Tokenizer.load(tmp_path, size + 3)
    assert padded.missing_ids.tolist() == [size, size + 1, size + 2]
    hi = padded.encode("hi")
    assert padded.decode([size, *hi, size + 2]) == "hi"
    with pytest.raises(ConfigError, match=f"token {size + 3} has no text"):
        padded.decode([size + 3])


def test_holes_of_a_vocabulary_are_missing_ids(tmp_path):
    BYTE_LEVEL.save(tmp_path)
    contents = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))
    vocabulary = contents["model"]["vocab"]
    letter = max(vocabulary, key=vocabulary.get)
    hole = vocabulary[letter]
    vocabulary[letter] = hole + 40
    (tmp_path / "tokenizer.json").write_text(json.dumps(contents), "utf-8")
    tokenizer = Tokenizer.load(tmp_path, hole + 42)
    assert tokenizer.missing_ids.tolist() == [*range(hole, hole + 40), hole + 41]
    assert tokenizer.decode([hole, hole + 41]) == ""


def test_a_lone_surrogate_is_an_error():
    with pytest.raises(ConfigError, match="not valid Unicode"):
        BYTE_LEVEL.encode("a\ud800", add_special=False, parse_special=False)


@BOTH
def test_a_saved_tokenizer_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded is not None
    assert loaded.settings == tokenizer.settings
    assert {path.name for path in tmp_path.iterdir()} == {"tokenizer.json", "text.json"}
    for text in TEXTS:
        for parse_special in (False, True):
            ids = tokenizer.encode(text, add_special=True, parse_special=parse_special)
            assert loaded.encode(text, add_special=True, parse_special=parse_special) == ids
            assert loaded.decode(ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("first", ["a", "#version", "a b"])
def test_saved_tokenizer_keeps_every_merge(tmp_path, first):
    merges = [(first, "c"), ("c", "d")]
    vocabulary = {token: index for index, token in enumerate([first, "c", "d", f"{first}c", "cd"])}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    library.decoder = tokenizers.decoders.ByteLevel()
    Tokenizer(library, BYTE_LEVEL.settings, len(vocabulary)).save(tmp_path)
    loaded = Tokenizer.load(tmp_path, len(vocabulary))
    assert loaded is not None
    assert loaded.to_json() == library.to_str()


def test_threads_that_parse_differently_do_not_disturb_each_other():
    found = {True: set(), False: set()}

    def encode(parse_special: bool) -> None:
        for _ in range(300):
            found[parse_special].add(
                tuple(BYTE_LEVEL.encode("<|im_end|>", add_special=False, parse_special=parse_special))
            )

    threads = [Thread(target=encode, args=(parse,)) for parse in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[True] == {(EOS,)}
    assert len(found[False]) == 1


def test_encoding_lets_other_threads_run():
    begin, ran = Event(), []

    def run():
        begin.wait()
        ran.append(True)

    thread = Thread(target=run)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # a thread yields only where it releases Python's lock by itself
    try:
        begin.set()
        BYTE_LEVEL.encode("some words " * 100_000)
        ran_meanwhile = bool(ran)
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert ran_meanwhile


def test_a_folder_without_a_tokenizer_has_none(tmp_path):
    assert Tokenizer.load(tmp_path) is None


SOUND = '"bos_id": null, "eos_ids": [], "add_bos": false, "chat_template": null'


def test_settings_of_older_versions_have_no_sampling_options(tmp_path):
    BYTE_LEVEL.save(tmp_path)
    (tmp_path / "text.json").write_text(f"{{{SOUND}}}")
    loaded = Tokenizer.load(tmp_path)
    assert loaded is not None
    assert loaded.settings.sampling == {}


@pytest.mark.parametrize(
    ("file", "contents"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", '{"model": {"type": "BPE"}}'),
        ("text.json", "{"),
        ("text.json", "[]"),
        ("text.json", "{}"),
        ("text.json", '{"bos_id": "1", "eos_ids": [], "add_bos": false, "chat_template": null}'),
        ("text.json", '{"bos_id": null, "eos_ids": [-1], "add_bos": false, "chat_template": null}'),
        ("text.json", '{"bos_id": null, "eos_ids": [], "add_bos": true, "chat_template": null}'),
        ("text.json", f'{{{SOUND}, "sampling": ["temperature"]}}'),
        ("text.json", f'{{{SOUND}, "sampling": {{"temperature": "hot"}}}}'),
        ("text.json", f'{{{SOUND}, "sampling": {{"heat": 1.0}}}}'),
        ("text.json", None),
    ],
)
def test_a_damaged_engine_directory_is_a_model_error(tmp_path, file, contents):
    BYTE_LEVEL.save(tmp_path)
    (tmp_path / file).unlink()
    if contents is not None:
        (tmp_path / file).write_text(contents, "utf-8")
    with pytest.raises(ModelError, match=f"{file}.*compile the model again"):
        Tokenizer.load(tmp_path)


def test_settings_survive_json():
    settings = TextSettings(
        bos_id=3, eos_ids=(9, 2), add_bos=True, chat_template="{{ 'é' }}", sampling={"temperature": 0.7, "top_k": 20}
    )
    assert TextSettings.from_json(settings.to_json()) == settings
    assert json.loads(settings.to_json())["chat_template"] == "{{ 'é' }}"


@pytest.mark.parametrize(
    ("vocabulary", "options", "error", "message"),
    [
        (
            "byte_level",
            {"model": "bert"},
            UnsupportedModelError,
            "'bert' is not implemented; supported: gemma4, gpt2, llama",
        ),
        (
            "byte_level",
            {"pre": "novel"},
            UnsupportedModelError,
            "'novel' is not implemented; supported: default, gpt-2",
        ),
        ("byte_level", {"pre": ["smollm"]}, ModelError, "tokenizer.ggml.pre is of type list"),
        ("byte_level", {"tokens": None}, ModelError, "tokenizer.ggml.tokens is missing"),
        ("byte_level", {"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, ModelError, "holds 'a' twice"),
        ("byte_level", {"token_type": [1]}, ModelError, "token_type has 1 entries for"),
        ("byte_level", {"merges": None}, ModelError, "tokenizer.ggml.merges is missing"),
        ("byte_level", {"merges": ["nowhere tobefound"]}, ModelError, "contradict each other"),
        ("byte_level", {"bos_token_id": 10**6}, ModelError, "bos_token_id is 1000000, but the vocabulary has"),
        ("byte_level", {"eos_token_id": -1}, ModelError, "eos_token_id is -1"),
        ("byte_level", {"bos_token_id": None, "add_bos_token": True}, ModelError, "declares none"),
        ("sentence_piece", {"scores": [0.0]}, ModelError, "scores has 1 entries for"),
        ("sentence_piece", {"scores": None}, ModelError, "scores is missing"),
    ],
)
def test_a_contradictory_vocabulary_is_an_error_that_names_the_file(vocabulary, options, error, message):
    defaults = {"pre": "smollm"} if vocabulary == "byte_level" else {}
    with pytest.raises(error) as caught:
        make_tokenizer(vocabulary, **(defaults | options))
    assert type(caught.value) is error
    assert str(caught.value).startswith("small.gguf: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "advised"),
    [
        ({}, {}),
        ({"top_k": 20}, {}),
        ({"penalty_repeat": 1.1}, {"repetition_penalty": 1.1}),
        (
            {"temp": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
            {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
        ),
    ],
)
def test_sampling_advice_is_read_from_gguf(given, advised):
    metadata = REFERENCE["vocabularies"]["byte_level"] | {"tokenizer.ggml.pre": "smollm"}
    metadata |= {f"general.sampling.{name}": value for name, value in given.items()}
    _, settings = read_metadata(metadata)
    assert settings.sampling == advised


def test_a_checkpoint_without_a_vocabulary_has_no_tokenizer():
    for metadata in ({}, {"tokenizer.ggml.model": "none"}):
        assert Tokenizer.from_source(SimpleNamespace(path=Path("x.gguf"), metadata=metadata, config={})) is None
