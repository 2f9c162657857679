"""Special behaviour of SentencePiece vocabularies like Gemma's and Phi-3's, on small ones and on the real one.

Gemma's own has 262144 tokens. Runs of spaces, tabs and line ends, and HTML tags, are user-defined tokens, which are
found in the text before any merge.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
from gguf import TokenType
from pulled_models import MODELS, tokenizer_of
from small_vocabularies import REFERENCE, TEXTS, make_tokenizer

from chunkrt.tokenizer import Tokenizer

TOKENS = REFERENCE["vocabularies"]["gemma"]["tokenizer.ggml.tokens"]
EOS, BOS, UNKNOWN = TOKENS.index("<eos>"), TOKENS.index("<bos>"), TOKENS.index("<unk>")
START_OF_TURN, END_OF_TURN = TOKENS.index("<start_of_turn>"), TOKENS.index("<end_of_turn>")
CHAT = """\
{{ bos_token }}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("user and assistant must alternate") }}
    {%- endif -%}
    {{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else 'user') + '\n' }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\n' }}
{%- endif -%}
"""
"""Write a vocabulary in Gemma's form."""


@pytest.fixture(scope="module")
def gemma() -> Tokenizer:
    return make_tokenizer("gemma")


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False, parse_special=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  ", ["  "]),
        (" " * 11, [" " * 8, "   "]),
        ("\n" * 8, ["\n" * 6, "\n\n"]),
        ("\t\t\t", ["\t\t", "\t"]),
        ("<b></b><s>", ["<b>", "</b>", "<s>"]),
        ("\u2581\u2581", ["  "]),
        (" \u2581 ", ["   "]),
    ],
)
def test_user_defined_tokens_are_found_before_anything_is_merged(gemma, text, expected):
    assert plain(gemma, text) == [TOKENS.index(token) for token in expected]
    assert gemma.decode(plain(gemma, text)) == text.replace("\u2581", " ")


def test_no_space_is_put_before_a_text(gemma):
    assert gemma.decode(plain(gemma, "hello")) == "hello"
    assert gemma.decode(plain(gemma, " hello")) == " hello"


def test_a_text_begins_with_the_beginning_token_and_a_turn_ends_a_generation(gemma):
    assert gemma.encode("", add_special=True, parse_special=False) == [BOS]
    assert gemma.eos_ids == {EOS, END_OF_TURN}


def test_control_tokens_in_a_users_text_are_text(gemma):
    text = "<start_of_turn>user\nHi<end_of_turn>"
    assert not {START_OF_TURN, END_OF_TURN} & set(plain(gemma, text))
    assert gemma.decode(plain(gemma, text)) == text
    parsed = gemma.encode(text, add_special=False, parse_special=True)
    assert (parsed[0], parsed[-1]) == (START_OF_TURN, END_OF_TURN)
    assert gemma.decode(parsed) == "user\nHi"


GEMMA4_MERGES = ["h e", "l l", "he ll", "hell o", "▁ w", "▁w o", "▁ ▁", "\n \n", "r l", "▁wo rl", "o \n"]
GEMMA4_TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
GEMMA4_TOKENS += [*"▁abcdehilnortw\né.", *(merge.replace(" ", "") for merge in GEMMA4_MERGES), "<turn|>", "<|channel>"]
KINDS = {"<turn|>": TokenType.CONTROL, "<|channel>": TokenType.USER_DEFINED, "<unk>": TokenType.UNKNOWN}
KINDS |= dict.fromkeys(("<pad>", "<eos>", "<bos>", "<mask>"), TokenType.CONTROL)
KINDS |= dict.fromkeys(GEMMA4_TOKENS[5:261], TokenType.BYTE)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello world", ["hello", "▁worl", "d"]),
        ("  hello\n\n\nworld", ["▁▁", "hello", "\n\n", "\n", "w", "o", "rl", "d"]),
        (" é x", ["▁", "é", "▁", "<0x78>"]),
        ("<|channel>hello<turn|>", ["<|channel>", "hello", "<turn|>"]),
        ("日 hello", ["<0xE6>", "<0x97>", "<0xA5>", "▁", "hello"]),
    ],
)
def test_vocabulary_of_gemma_4_has_merges(text, expected):
    """Transformers' GemmaTokenizer 5.23 gives these tokens for the same vocabulary and merges."""
    metadata = {
        "model": "gemma4",
        "tokens": GEMMA4_TOKENS,
        "token_type": [int(KINDS.get(token, TokenType.NORMAL)) for token in GEMMA4_TOKENS],
        "merges": GEMMA4_MERGES,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "add_space_prefix": False,
    }
    metadata = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    tokenizer = Tokenizer.from_source(SimpleNamespace(path=Path("small.gguf"), metadata=metadata, config={}))
    found = tokenizer.encode(text, add_special=False, parse_special=True)
    assert [GEMMA4_TOKENS[token] for token in found] == expected
    assert tokenizer.decode(found) == text.replace("<turn|>", "")


def test_text_without_piece_or_bytes_is_the_unknown_token():
    vocabulary = REFERENCE["vocabularies"]["gemma"]
    types = [1 if kind == 6 else kind for kind in vocabulary["tokenizer.ggml.token_type"]]
    tokens = [token.replace("<0x", "<no byte") for token in TOKENS]
    tokenizer = make_tokenizer("gemma", tokens=tokens, token_type=types)
    assert plain(tokenizer, "\U0001f9ff") == [UNKNOWN]


def test_a_chat_becomes_turns():
    tokenizer = make_tokenizer("gemma", chat_template=CHAT)
    messages = [
        {"role": "user", "content": " Hello "},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "a  b"},
    ]
    assert tokenizer.apply_chat_template(messages) == (
        "<bos><start_of_turn>user\nHello<end_of_turn>\n<start_of_turn>model\nHi<end_of_turn>\n"
        "<start_of_turn>user\na  b<end_of_turn>\n<start_of_turn>model\n"
    )
    ids = tokenizer.encode_chat(messages)
    assert [ids.count(token) for token in (BOS, START_OF_TURN, END_OF_TURN)] == [1, 4, 3]


def test_a_saved_tokenizer_is_the_same(gemma, tmp_path):
    gemma.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.settings == gemma.settings
    for text in [*TEXTS, "\u2581\u2581 \u2581"]:
        assert plain(loaded, text) == plain(gemma, text)


def test_phi3s_control_tokens_swallow_the_whitespace_after_them():
    phi3 = make_tokenizer("phi3")
    spaced, tight = (
        phi3.encode(text, add_special=False, parse_special=True)
        for text in ("<|user|> \n Hello<|end|>\n", "<|user|>Hello<|end|>")
    )
    assert spaced == tight
    assert plain(phi3, "<|user|> \n Hello") != plain(phi3, "<|user|>Hello")


def test_the_real_vocabulary_loses_nothing():
    if MODELS["gemma-3-270m"] is None:
        pytest.skip("gemma-3-270m is not there; `chunkrt pull gemma-3-270m` fetches it")
    tokenizer = tokenizer_of(MODELS["gemma-3-270m"])
    assert tokenizer.vocab_size == 262144
    for text in [*TEXTS, "\n" * 40 + " " * 40 + "\t" * 40]:
        assert tokenizer.decode(plain(tokenizer, text)) == text
