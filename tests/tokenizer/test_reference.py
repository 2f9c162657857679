"""Tokens of GGUF vocabularies equal llama.cpp's, for small vocabularies and for the real model's."""

import unicodedata
from typing import Any

import pytest
from pulled_models import MODELS, tokenizer_of
from small_vocabularies import REFERENCE, TEXTS, make_tokenizer

COMPOSING = ("qwen2", "qwen35")
"""The pre-tokenisers of vocabularies that compose characters first (NFC)."""


def known_difference(vocabulary: str, options: dict[str, Any], text: str) -> str | None:
    """Reason why llama.cpp's tokens of a text differ from the model's own, if they do."""
    if options.get("pre") in COMPOSING and not unicodedata.is_normalized("NFC", text):
        return "llama.cpp leaves out the composition that Qwen's tokenizer.json asks for"
    if options.get("pre") in ("tekken", "gpt-4o") and any(unicodedata.category(c).startswith("M") for c in text):
        return "llama.cpp's regular expressions know no combining marks"
    if options.get("add_space_prefix") is False and text.startswith("<s>"):
        return "llama.cpp merges '<' and 's>' in a user's text into the control token '<s>'"
    if vocabulary.startswith("gemma") and "</s>" in text:
        return "llama.cpp takes Gemma's '</s>', an HTML tag, for an end token"
    return None


@pytest.mark.parametrize("case", REFERENCE["cases"], ids=lambda case: f"{case['vocabulary']} {case['options']}")
def test_tokens_are_those_of_llama_cpp(case):
    tokenizer = make_tokenizer(case["vocabulary"], **case["options"])
    for index, (text, plain) in enumerate(zip(TEXTS, case["plain"], strict=True)):
        special = case["special"].get(str(index), plain)
        found_plain = tokenizer.encode(text, add_special=False, parse_special=False)
        found_special = tokenizer.encode(text, add_special=False, parse_special=True)
        if not known_difference(case["vocabulary"], case["options"], text):
            assert (found_plain, found_special) == (plain, special), ascii(text)


@pytest.mark.parametrize("case", REFERENCE["cases"], ids=lambda case: f"{case['vocabulary']} {case['options']}")
def test_plain_tokens_decode_to_the_text(case):
    tokenizer = make_tokenizer(case["vocabulary"], **case["options"])
    for text in TEXTS:
        if case["options"].get("pre") in COMPOSING:
            text = unicodedata.normalize("NFC", text)
        if tokenizer.token_bytes.strips_first_space and "<tool>" in text:
            continue  # SentencePiece puts a space before the text after a whole-word token
        assert tokenizer.decode(tokenizer.encode(text, add_special=False, parse_special=False)) == text


@pytest.mark.parametrize("pre", COMPOSING)
def test_qwen_composes_characters(pre):
    tokenizer = make_tokenizer("byte_level", pre=pre)
    composed, decomposed = (
        tokenizer.encode(unicodedata.normalize(form, "\u00e9"), add_special=False, parse_special=False)
        for form in ("NFC", "NFD")
    )
    assert composed == decomposed


@pytest.mark.parametrize("name", REFERENCE["models"])
def test_tokens_of_the_real_model_are_those_of_llama_cpp(name):
    path = MODELS[name]
    if path is None:
        pytest.skip(f"{name} is not there; `chunkrt pull {name}` fetches it")
    tokenizer = tokenizer_of(path)
    expected = REFERENCE["models"][name]
    for index, (text, plain) in enumerate(zip(TEXTS, expected["plain"], strict=True)):
        special = expected["special"].get(str(index), plain)
        if not known_difference(name, {}, text):
            assert tokenizer.encode(text, add_special=False, parse_special=False) == plain, ascii(text)
            assert tokenizer.encode(text, add_special=False, parse_special=True) == special, ascii(text)
