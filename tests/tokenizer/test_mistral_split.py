"""`fix_mistral_regex` in tokenizer_config.json: texts are cut into words as in Mistral's own tokenizer."""

import json
from types import SimpleNamespace

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from chunkrt.tokenizer import Tokenizer

WRONG = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLIT = pre_tokenizers.Split(Regex(WRONG), "isolated")
TO_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def encode(folder, text, flag, has_split=True, size=100_001, **config):
    """Return a text's tokens, as texts, for a vocabulary of all bytes, "oW", "12" and fillers."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*characters, "oW", "12"])}
    vocab |= {f"token {index}": index for index in range(len(vocab), size)}
    library = tokenizers.Tokenizer(models.BPE(vocab, [("o", "W"), ("1", "2")]))
    library.pre_tokenizer = pre_tokenizers.Sequence([SPLIT, TO_BYTES]) if has_split else TO_BYTES
    library.decoder = decoders.ByteLevel()
    library.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({} if flag is None else {"fix_mistral_regex": flag})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_source(SimpleNamespace(path=folder, config=config))
    assert tokenizer is not None
    return [library.id_to_token(token_id) for token_id in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("flag", "config", "is_fixed"),
    [
        (True, {"model_type": "mistral"}, True),
        (True, {"model_type": "mistral3", "transformers_version": "4.52.4"}, True),
        (True, {"model_type": "mistral", "transformers_version": "5.0.0"}, False),
        (True, {"model_type": "llama"}, False),
        (False, {"model_type": "mistral"}, False),
        (None, {"model_type": "mistral"}, False),
        (True, {"model_type": "mistral", "size": 100_000}, False),
    ],
)
def test_fix_mistral_regex_is_followed_as_transformers_does(tmp_path, flag, config, is_fixed):
    """Transformers 5.23 gives these tokens for the same folders."""
    expected = ["l", "o", "W", "i", "1", "2"] if is_fixed else ["l", "oW", "i", "12"]
    assert encode(tmp_path, "loWi12", flag, **config) == expected


def test_fix_mistral_regex_adds_the_split_where_there_is_none(tmp_path):
    assert encode(tmp_path, "oW12", True, has_split=False, model_type="mistral") == ["o", "W", "1", "2"]
