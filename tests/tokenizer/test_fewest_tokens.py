"""The lower bound on the number of tokens holds for all steps before the vocabulary."""

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from small_vocabularies import REFERENCE, TEXTS, make_tokenizer
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from chunkrt.tokenizer import Tokenizer
from chunkrt.tokenizer.decoding import byte_alphabet
from chunkrt.tokenizer.text_settings import TextSettings

SETTINGS = TextSettings(bos_id=None, eos_ids=(), add_bos=False, chat_template=None)
SHRINKING = {
    "NFC": normalizers.NFC(),
    "NFD": normalizers.NFD(),
    "NFKC": normalizers.NFKC(),
    "NFKD": normalizers.NFKD(),
    "Lowercase": normalizers.Lowercase(),
    "Strip": normalizers.Strip(),
    "StripAccents": normalizers.StripAccents(),
    "Replace by less": normalizers.Replace("abcdefgh", "b"),
    "Replace by nothing": normalizers.Replace("b", ""),
    "Replace a pattern": normalizers.Replace(Regex(" +"), " "),
    "Nmt": normalizers.Nmt(),
    "Bert": normalizers.BertNormalizer(),
    "Sequence": normalizers.Sequence([normalizers.Lowercase(), normalizers.NFKC(), normalizers.Strip()]),
}
LONG = [
    " " * 500,
    "\u3000\u00a0\u2028" * 99,
    "\u03b9\u0308\u0301" * 99,
    "\u1fbe\u0308\u0301" * 99,
    "\U0001d6ca\u0308\u0301" * 99,
    "\U0001d400" * 200,
    "\u212a" * 200,
    "\u1112\u1161\u11ab" * 99,
    "abcdefgh" * 99,
    "b" * 500,
    "<x>" + " " * 500,
    "\u200b\u0007" * 200,
    "e\u0301" * 99,
]


def byte_level(normalizer=None, pre_tokenizer=None, added=()):
    """Longest token: eight letters, one byte of text each."""
    letters = [*byte_alphabet(), "abcdefgh"]
    library = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, [], ignore_merges=True))
    byte_step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    steps = [byte_step] if pre_tokenizer is None else [pre_tokenizer, byte_step]
    library.normalizer, library.pre_tokenizer = normalizer, pre_tokenizers.Sequence(steps)
    library.decoder = decoders.ByteLevel()
    library.add_tokens(list(added))
    return Tokenizer(library, SETTINGS)


def expect_bound(tokenizer, text):
    assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, add_special=False)), text[:20]


@pytest.mark.parametrize("vocabulary", REFERENCE["vocabularies"])
@pytest.mark.parametrize("parse_special", [False, True])
def test_fewest_tokens_of_vocabularies(vocabulary, parse_special):
    tokenizer = make_tokenizer(vocabulary)
    for text in (*TEXTS, *LONG, "<|end|>   " * 50):
        number = len(tokenizer.encode(text, add_special=False, parse_special=parse_special))
        assert tokenizer.fewest_tokens(text) <= number, text[:20]


@pytest.mark.parametrize("name", SHRINKING)
def test_fewest_tokens_where_a_text_shrinks(name):
    tokenizer = byte_level(SHRINKING[name])
    for text in (*TEXTS, *LONG):
        expect_bound(tokenizer, text)


@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        pre_tokenizers.Whitespace(),
        pre_tokenizers.WhitespaceSplit(),
        pre_tokenizers.BertPreTokenizer(),
        pre_tokenizers.Split("b", "removed"),
        pre_tokenizers.Split("b", "isolated"),
        pre_tokenizers.Punctuation("removed"),
        pre_tokenizers.CharDelimiterSplit("b"),
    ],
    ids=str,
)
def test_fewest_tokens_where_pre_tokenizers_drop_text(pre_tokenizer):
    tokenizer = byte_level(pre_tokenizer=pre_tokenizer)
    for text in (*TEXTS, *LONG):
        expect_bound(tokenizer, text)


def test_fewest_tokens_where_an_added_token_takes_the_spaces_around():
    tokenizer = byte_level(added=[AddedToken("<x>", rstrip=True)])
    expect_bound(tokenizer, "<x>" + " " * 500)
    assert tokenizer.fewest_tokens("<x>" * 800) > 99


@pytest.mark.parametrize("fuse_unk", [False, True])
@pytest.mark.parametrize("unk_token", [None, "?"])
def test_fewest_tokens_of_unknown_characters(fuse_unk, unk_token):
    model = models.BPE({"?": 0, "a": 1}, [], unk_token=unk_token, fuse_unk=fuse_unk)
    library = tokenizers.Tokenizer(model)
    library.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(library, SETTINGS)
    for text in ("\U0001f600" * 100, "b" * 100, "ab" * 100):
        expect_bound(tokenizer, text)


def test_fewest_tokens_grows_with_the_text():
    """Otherwise no long text would ever be refused."""
    assert byte_level().fewest_tokens("a" * 8000) == 1000
    assert byte_level().fewest_tokens("\u00e4" * 4000) == 1000
    assert byte_level(normalizers.NFC()).fewest_tokens("a" * 8000) == 250
    assert byte_level(normalizers.Strip()).fewest_tokens("a " * 8000) == 1000
    assert byte_level().fewest_tokens("") == 0


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=50).map(lambda text: text * 20))
@example("\u1fbe\u0308\u0301" * 20)
def test_fewest_tokens_of_any_text(text):
    for tokenizer in ANY:
        expect_bound(tokenizer, text)


ANY = [byte_level(SHRINKING[name]) for name in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase")]
