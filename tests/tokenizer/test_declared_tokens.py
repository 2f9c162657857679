"""Tokens that configuration files declare: ends, beginnings, suffixes of embeddings, pooling.

Expected values are those of Transformers 5.23 on the same files, or of llama.cpp's llama-vocab.cpp where it is named.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
from small_vocabularies import REFERENCE, make_tokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

from chunkrt.errors import ModelError
from chunkrt.tokenizer import Tokenizer

BOS, EOS = 256, 257


def write_folder(folder, *, single=None, **files):
    """Write a folder with all bytes, "<s>" and "</s>", and files of JSON."""
    alphabet = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    library = tokenizers.Tokenizer(models.BPE(alphabet, []))
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    library.add_special_tokens(["<s>", "</s>"])
    if single is not None:
        ids = [("<s>", BOS), ("</s>", EOS)]
        library.post_processor = processors.TemplateProcessing(single=single, pair="$A $B", special_tokens=ids)
    library.save(str(folder / "tokenizer.json"))
    for name, contents in files.items():
        path = folder / (name.replace("__", "/") + ".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(contents), "utf-8")
    return Tokenizer.from_source(SimpleNamespace(path=folder, config={}))


@pytest.mark.parametrize(
    ("files", "added", "eos"),
    [
        (
            {"special_tokens_map": {"eos_token": "<|im_end|>", "bos_token": {"content": "<s>"}}},
            {"<|im_end|>": 258},
            258,
        ),
        (
            {
                "tokenizer_config": {
                    "eos_token": "</s>",
                    "added_tokens_decoder": {"256": {"content": "<s>", "special": True}},
                },
                "special_tokens_map": {"eos_token": "<|im_end|>"},
            },
            {},
            257,
        ),
        (
            {
                "tokenizer_config": {
                    "eos_token": "<|im_end|>",
                    "added_tokens_decoder": {
                        "299": {"content": "<x>", "special": False},
                        "290": {"content": "<|im_end|>", "special": True},
                    },
                }
            },
            {"<|im_end|>": 258, "<x>": 259},
            258,
        ),
        ({"tokenizer_config": {"eos_token": "</s>", "extra_special_tokens": ["<|im_end|>"]}}, {"<|im_end|>": 258}, 257),
        (
            {
                "tokenizer_config": {
                    "eos_token": "</s>",
                    "additional_special_tokens": ["<|im_end|>"],
                    "pad_token": "[PAD]",
                    "foo_token": "<foo>",
                }
            },
            {"[PAD]": 258, "<foo>": 259, "<|im_end|>": 260},
            257,
        ),
        ({"added_tokens": {"<tool>": 280}, "tokenizer_config": {"eos_token": "</s>"}}, {"<tool>": 258}, 257),
    ],
)
def test_declared_tokens_are_added_at_the_next_ids(tmp_path, files, added, eos):
    tokenizer = write_folder(tmp_path, **files)
    for token, token_id in added.items():
        assert tokenizer.encode(f"hi{token}", add_special=False, parse_special=True) == [71, 72, token_id]
    assert tokenizer.settings.eos_ids[0] == eos
    assert tokenizer.vocab_size == 258 + len(added)


def test_a_declared_end_is_control_and_others_are_not(tmp_path):
    tokens = {"299": {"content": "<x>"}, "298": {"content": "<y>", "special": True}}
    tokenizer = write_folder(tmp_path, tokenizer_config={"eos_token": "<z>", "added_tokens_decoder": tokens})
    assert [tokenizer.special_id(token) for token in ("<y>", "<x>", "<z>")] == [258, None, 260]


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": []},
        {"added_tokens_decoder": {"x": {"content": "<x>"}}},
        {"added_tokens_decoder": {"300": {}}},
        {"added_tokens_decoder": {"300": 3}},
        {"extra_special_tokens": [3]},
        {"pad_token": {"content": 3}},
        {"eos_token": "\ud800"},
    ],
)
def test_a_declaration_that_is_damaged_is_a_model_error(tmp_path, config):
    with pytest.raises(ModelError):
        write_folder(tmp_path, tokenizer_config=config)


@pytest.mark.parametrize(
    ("single", "config", "prompt", "embedded"),
    [
        (None, {}, [64, 65], [64, 65]),
        ("$A </s>", {}, [64, 65], [64, 65, EOS]),
        ("<s> $A </s>", {}, [BOS, 64, 65], [BOS, 64, 65, EOS]),
        ("$A </s> </s>", {}, [64, 65], [64, 65, EOS, EOS]),
        (None, {"add_eos_token": True, "eos_token": "</s>"}, [64, 65], [64, 65, EOS]),
        ("$A </s>", {"add_eos_token": True, "eos_token": "</s>"}, [64, 65], [64, 65, EOS]),
    ],
)
def test_tokens_behind_a_text_are_for_embeddings_alone(tmp_path, single, config, prompt, embedded):
    tokenizer = write_folder(tmp_path, single=single, tokenizer_config=config)
    assert tokenizer.encode("ab") == prompt
    assert tokenizer.encode_for_embedding("ab") == embedded
    tokenizer.save(tmp_path)
    assert Tokenizer.load(tmp_path).encode_for_embedding("ab") == embedded


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode_cls_token": True}, None),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, None),
    ],
)
def test_pooling_is_read_from_sentence_transformers_file(tmp_path, config, expected):
    assert write_folder(tmp_path, **{"1_Pooling__config": config}).settings.pooling == expected


def test_chats_with_tools_use_the_template_for_tools(tmp_path):
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].name }}"}]
    tokenizer = write_folder(tmp_path, tokenizer_config={"chat_template": templates})
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(messages) == "plain"
    assert tokenizer.apply_chat_template(messages, tools=[{"name": "f"}]) == "f"
    assert tokenizer.takes_tools
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file {{ tools | length }}")
    tokenizer = Tokenizer.from_source(SimpleNamespace(path=tmp_path, config={}))
    assert tokenizer.apply_chat_template(messages, tools=[{"name": "f"}]) == "file 1"


@pytest.mark.parametrize("kind", [1, 3, 4])
def test_end_tokens_of_a_gguf_file_are_control_tokens_of_any_type(kind):
    tokens = ["<|im_start|>", "<|im_end|>", "<|return|>", "</s>", "Ġ", "a"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, kind, kind, kind, 1, 1],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 0,
    }
    tokenizer = Tokenizer.from_source(SimpleNamespace(path="x.gguf", metadata=metadata, config={}))
    assert tokenizer.eos_ids == ({0, 1, 2, 3} if kind == 3 else {0, 1, 2})  # "</s>" is a tag of HTML, too
    assert tokenizer.encode("a<|im_end|>", add_special=False, parse_special=True) == [5, 1]
    assert tokenizer.decode([5, 1, 2]) == "a"


def test_the_end_of_a_message_is_no_end_where_messages_are_parts_of_an_answer():
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-4o",
        "tokenizer.ggml.tokens": ["<|end|>", "<|return|>", "<|call|>", "a"],
        "tokenizer.ggml.token_type": [3, 3, 3, 1],
        "tokenizer.ggml.merges": [],
    }
    tokenizer = Tokenizer.from_source(SimpleNamespace(path="x.gguf", metadata=metadata, config={}))
    assert tokenizer.eos_ids == {1, 2}
    metadata["tokenizer.ggml.tokens"][1] = "<|other|>"
    tokenizer = Tokenizer.from_source(SimpleNamespace(path="x.gguf", metadata=metadata, config={}))
    assert tokenizer.eos_ids == {0, 2}


def test_ends_by_keys_of_a_gguf_file_end_a_generation():
    keys = {
        f"{name}_token_id": 20 + index for index, name in enumerate(("eot", "eom", "fim_pad", "fim_rep", "fim_sep"))
    }
    assert make_tokenizer("byte_level", pre="smollm", **keys).eos_ids >= set(range(20, 25))


@pytest.mark.parametrize("none", [-1, 2**32 - 1])
@pytest.mark.parametrize("vocabulary", ["byte_level", "sentence_piece"])
def test_an_id_of_minus_one_in_a_gguf_file_is_no_token(vocabulary, none):
    """llama.cpp uses the default, which SentencePiece has and byte-level BPE does not."""
    options = {"pre": "smollm"} if vocabulary == "byte_level" else {}
    keys = {f"{name}_token_id": none for name in ("bos", "eot", "eom", "unknown", "padding", "fim_pad")}
    without = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    metadata = {k: v for k, v in REFERENCE["vocabularies"][vocabulary].items() if k not in without}
    expected = Tokenizer.from_source(
        SimpleNamespace(path=Path("a.gguf"), config={}, metadata=metadata | {"tokenizer.ggml.pre": "smollm"})
    )
    found = make_tokenizer(vocabulary, **options, **keys)
    assert expected is not None
    assert (found.settings.bos_id, found.settings.eos_ids) == (expected.settings.bos_id, expected.settings.eos_ids)
    assert found.encode("hello") == expected.encode("hello")


def test_a_beginning_of_minus_one_in_a_config_is_no_token(tmp_path):
    make_tokenizer("byte_level", pre="smollm").save(tmp_path)
    tokenizer = Tokenizer.from_source(SimpleNamespace(path=tmp_path, config={"vocab_size": 903, "bos_token_id": -1}))
    assert tokenizer is not None
    assert tokenizer.settings.bos_id is None


def test_gguf_file_specifies_suffix_tokens_of_embeddings():
    plain = make_tokenizer("byte_level", pre="smollm", add_eos_token=False)
    ending = make_tokenizer("byte_level", pre="smollm", add_eos_token=True)
    assert plain.encode_for_embedding("hello") == plain.encode("hello")
    assert ending.encode_for_embedding("hello") == [*plain.encode("hello"), ending.settings.eos_ids[0]]
    assert ending.encode("hello") == plain.encode("hello")


@pytest.mark.parametrize(
    ("number", "expected"), [(0, None), (1, "mean"), (2, None), (3, "last"), (4, None), (None, None)]
)
def test_gguf_file_specifies_pooling(number, expected):
    metadata = {
        "general.architecture": "qwen3",
        "qwen3.pooling_type": number,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.merges": [],
    }
    tokenizer = Tokenizer.from_source(SimpleNamespace(path="x.gguf", metadata=metadata, config={}))
    assert tokenizer.settings.pooling == expected


@pytest.mark.parametrize("start", ["", "{{ bos_token }}", "{{- bos_token -}}"])
def test_a_chat_of_a_gguf_file_begins_with_one_beginning_token(start):
    """llama.cpp adds the token when add_bos_token is true, and removes the template's own."""
    template = start + "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "<s>hello"}]
    tokenizer = make_tokenizer("sentence_piece", chat_template=template, add_bos_token=True)
    ids = tokenizer.encode_chat(messages)
    assert ids[0] == tokenizer.settings.bos_id
    assert ids.count(tokenizer.settings.bos_id) == 1
    without = make_tokenizer("sentence_piece", chat_template=template, add_bos_token=False).encode_chat(messages)
    assert without == (ids if start else ids[1:])


def test_added_tokens_keep_their_flags(tmp_path):
    decoder = {"258": {"content": "<x>", "lstrip": True, "rstrip": True, "special": True, "normalized": False}}
    tokenizer = write_folder(tmp_path, tokenizer_config={"added_tokens_decoder": decoder})
    assert tokenizer.encode("a <x> b", add_special=False, parse_special=True) == [64, 258, 65]
