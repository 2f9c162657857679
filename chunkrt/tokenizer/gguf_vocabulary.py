"""A GGUF file's own vocabulary as a `tokenizers` tokenizer.

A GGUF file contains tokens, their types and merges or scores, and refers to other settings by name: "gpt2" is
byte-level BPE, with the pre-tokeniser in `tokenizer.ggml.pre`; "llama" is SentencePiece BPE with byte fallback,
and "gemma4" is the same with merges in place of scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tokenizers
from gguf import PoolingType, TokenType
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers

from chunkrt.errors import ModelError, UnsupportedModelError
from chunkrt.tokenizer.text_settings import TextSettings, advised_sampling, end_ids, known_ends
from chunkrt.tokenizer.tokenizer import add_tokens, byte_pair_encoding

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_CAPITAL, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITAL}*{_SMALL}+|[^\r\n\p{{L}}\p{{N}}]?{_CAPITAL}+{_SMALL}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITAL}*{_SMALL}+{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{_CAPITAL}+{_SMALL}*{_SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """Rules by which byte-level BPE cuts a text into words before it merges bytes.

    Args:
        splits: regular expressions, applied one after the other; matches and the text between them are words.
        ignore_merges: a word that is a token is used unchanged, regardless of the merges.
        add_bos: default for adding the beginning token to texts, used if the file does not specify it.
        composes: the text is first converted to Unicode's composed form (NFC).
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    composes: bool = False


_LLAMA_BPE = PreTokenizer(splits=(_LLAMA3,), ignore_merges=True, add_bos=True)
_DIGIT_BY_DIGIT = PreTokenizer(splits=(r"\p{N}", _GPT2))

PRE_TOKENIZERS = {
    "default": PreTokenizer(splits=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer(splits=(_GPT2,)),
    "smollm": _DIGIT_BY_DIGIT,
    "starcoder": _DIGIT_BY_DIGIT,
    "refact": _DIGIT_BY_DIGIT,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "falcon3": _LLAMA_BPE,
    "pixtral": _LLAMA_BPE,
    "lfm2": _LLAMA_BPE,
    "smaug-bpe": PreTokenizer(splits=(_LLAMA3,)),
    "dbrx": PreTokenizer(splits=(_LLAMA3,)),
    "qwen2": PreTokenizer(splits=(_QWEN2,), composes=True),
    "qwen35": PreTokenizer(splits=(_QWEN35,), composes=True),
    "deepseek-r1-qwen": PreTokenizer(splits=(_QWEN2,)),
    "tekken": PreTokenizer(splits=(_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o": PreTokenizer(splits=(_GPT4O,)),
}
"""Pre-tokenisers by their names in `tokenizer.ggml.pre`. Source: llama.cpp, src/llama-vocab.cpp. The regular
expressions are in their original form, from the models' tokenizer.json files.

Models use these names: Llama 3 "llama-bpe", LFM2 "lfm2", Qwen2 to Qwen3 "qwen2", Qwen3.5 "qwen35", Mistral Nemo
"tekken", Phi-4 "dbrx", and Phi-4-mini "gpt-4o". Gemma, Phi-3 and the earlier Mistral models use SentencePiece, which
has no pre-tokeniser.
"""

MOST_CHARACTERS = 1024
"""Maximum number of characters of a SentencePiece token. The time to find the merges of a token grows with the square
of its length.

SentencePiece's own limit, max_sentencepiece_length, is 16 by default."""

_BYTE_FALLBACK = frozenset(f"<0x{byte:02X}>" for byte in range(256))
"""SentencePiece's byte tokens, for text outside its pieces."""
_NO_TOKEN = (-1, 2**32 - 1)
"""Ids that mean that the token does not exist: -1, which some converters write as an unsigned number."""
_CONTROL = (TokenType.CONTROL, TokenType.UNKNOWN)
_OTHER_ENDS = ("eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""Keys in addition to "eos" whose tokens end a generation. Source: llama.cpp, src/llama-vocab.cpp."""
_POOLING: dict[Any, Literal["last", "mean"]] = {PoolingType.MEAN.value: "mean", PoolingType.LAST.value: "last"}
_KEEPS_SPACE_AFTER = ("<unk>", "<s>", "<|endoftext|>")
"""Phi-3's control and user-defined tokens swallow the whitespace after them, except for these. GGUF does not record
this property.

Source: llama.cpp, src/llama-vocab.cpp; "rstrip" in the models' tokenizer.json.
"""

_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
"""GGUF's names of the sampling options of Transformers. Source: gguf.constants.Keys.General."""


def read_metadata(metadata: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, TextSettings] | None:
    """Return the tokenizer that GGUF metadata describes, or None if it describes none.

    Raises:
        ModelError: parts of the metadata contradict each other.
        UnsupportedModelError: the model or pre-tokeniser is not implemented; the message lists those that are
            supported.
    """
    kind = read_kind(metadata)
    if kind is None:
        return None
    model, pre = kind
    tokens = _list(metadata, "tokens", str)
    types = _list(metadata, "token_type", int, len(tokens), default=TokenType.NORMAL)
    adds_space = model == "llama" and bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    in_normalised_text = model == "llama" and not adds_space
    if in_normalised_text:
        tokens = [_with_visible_spaces(*token) for token in zip(tokens, types, strict=True)]
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocab[token] != index)
        raise ModelError(f"tokenizer.ggml.tokens holds {twice!r} twice")
    default_bos, default_eos, adds_bos = (None, None, PRE_TOKENIZERS[pre].add_bos) if model == "gpt2" else (1, 2, True)
    bos_id = _id(metadata, "bos", len(tokens), default_bos)
    eos_id = _id(metadata, "eos", len(tokens), default_eos)
    others = [_id(metadata, name, len(tokens)) for name in _OTHER_ENDS]
    declared = [end for end in (eos_id, *others) if end is not None]
    types = _with_known_controls(types, vocab, [*declared, *([] if bos_id is None else [bos_id])])
    if model == "gpt2":
        library = _byte_level(metadata, vocab, PRE_TOKENIZERS[pre])
    else:
        library = _sentence_piece(metadata, vocab, types, adds_space, has_merges=model == "gemma4")
    advised = {name: metadata.get(key) for name, key in _SAMPLING.items()}
    control = {t: i for t, i in vocab.items() if types[i] in _CONTROL}
    named = [t for t, i in vocab.items() if types[i] == TokenType.USER_DEFINED and t not in control]
    is_phi3 = model == "llama" and metadata.get("general.architecture") == "phi3"
    add_tokens(
        library,
        [
            AddedToken(
                token,
                special=token in control,
                normalized=in_normalised_text and token not in control,
                rstrip=is_phi3 and token not in _KEEPS_SPACE_AFTER,
            )
            for token in [*control, *named]
        ],
    )
    adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos))
    return library, TextSettings(
        bos_id=bos_id,
        eos_ids=end_ids(declared, control),
        add_bos=adds_bos,
        suffix_ids=(eos_id,) if eos_id is not None and metadata.get("tokenizer.ggml.add_eos_token") else (),
        chat_adds_bos=adds_bos,
        pooling=_POOLING.get(metadata.get(f"{metadata.get('general.architecture')}.pooling_type")),
        chat_template=_text(metadata, "tokenizer.chat_template", "") or None,
        tool_template=_text(metadata, "tokenizer.chat_template.tool_use", "") or None,
        sampling=advised_sampling(advised, is_random=advised["temperature"] is not None),
    )


def read_kind(metadata: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the tokenizer's model and pre-tokeniser ("" for SentencePiece, which has none); None without a tokenizer.

    Raises:
        ModelError, UnsupportedModelError: see `read_metadata`.
    """
    model = _text(metadata, "tokenizer.ggml.model", "none")
    if model in ("none", "no_vocab"):
        return None
    if model in ("llama", "gemma4"):
        return model, ""
    if model != "gpt2":
        key = "tokenizer.ggml.model"
        raise UnsupportedModelError(
            f"the tokenizer model {model!r} is not implemented; supported: gemma4, gpt2, llama", feature=key
        )
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and _BYTE_FALLBACK.issubset(token for token in tokens if isinstance(token, str)):
        raise UnsupportedModelError(
            "tokenizer.ggml.model is 'gpt2', which is byte-level BPE, but the tokens are SentencePiece's ('<0x00>' to "
            "'<0xFF>'), so most texts would be lost; convert the model from a folder that has its tokenizer.model",
            feature="tokenizer.ggml.model",
        )
    pre = _text(metadata, "tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise UnsupportedModelError(
            f"the pre-tokeniser {pre!r} is not implemented; supported: {known}", feature="tokenizer.ggml.pre"
        )
    return model, pre


def _byte_level(metadata: Mapping[str, Any], vocab: dict[str, int], pre: PreTokenizer) -> tokenizers.Tokenizer:
    library = byte_pair_encoding(vocab, _stored_merges(metadata), ignore_merges=pre.ignore_merges)
    if pre.composes:
        library.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in pre.splits]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    library.decoder = decoders.ByteLevel()
    return library


def _stored_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = [merge.partition(" ") for merge in _list(metadata, "merges", str)]
    return [(left, right) for left, _, right in merges]


def _sentence_piece(
    metadata: Mapping[str, Any], vocab: dict[str, int], types: Sequence[int], adds_space: bool, *, has_merges: bool
) -> tokenizers.Tokenizer:
    merges = _stored_merges(metadata) if has_merges else _merges_by_score(metadata, vocab, types)
    unknown_id = _id(metadata, "unknown", len(vocab))
    unknown = next((t for t, i in vocab.items() if i == unknown_id or types[i] == TokenType.UNKNOWN), None)
    library = byte_pair_encoding(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    prefix = [normalizers.Prepend("▁")] if adds_space else []
    library.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
    to_text = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*to_text, *strip])
    return library


def _merges_by_score(
    metadata: Mapping[str, Any], vocab: Mapping[str, int], types: Sequence[int]
) -> list[tuple[str, str]]:
    scores = _list(metadata, "scores", float, len(vocab))
    pieces = {token: scores[i] for token, i in vocab.items() if types[i] == TokenType.NORMAL}
    if len(longest := max(pieces, key=len, default="")) > MOST_CHARACTERS:
        raise ModelError(
            f"a token of tokenizer.ggml.tokens has {len(longest)} characters; a piece of SentencePiece has at most "
            f"{MOST_CHARACTERS}"
        )
    return _merges(pieces)


def _with_known_controls(types: Sequence[int], vocab: Mapping[str, int], declared: Sequence[int]) -> list[int]:
    """Return the types of all tokens. Beginning and end tokens are control tokens even if the file gives other types.

    "</s>" keeps its type, because vocabularies also contain it as an HTML tag. Source: llama.cpp, src/llama-vocab.cpp,
    which does the same and logs "control-looking token".
    """
    ends = [vocab[token] for token in known_ends(vocab) if token != "</s>"]
    forced = {token_id for token_id in (*declared, *ends) if types[token_id] not in _CONTROL}
    return [TokenType.CONTROL if index in forced else kind for index, kind in enumerate(types)]


def _with_visible_spaces(token: str, kind: int) -> str:
    """Return a user-defined token in SentencePiece's form: it searches after spaces have become "▁".

    GGUF spells the token with spaces. The result is correct only if no space is added before the text, because that
    space would interfere.
    """
    return token.replace(" ", "▁") if kind == TokenType.USER_DEFINED else token


def _merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return all merges of two pieces into a third piece, best first.

    SentencePiece joins the adjacent pieces whose union scores highest; BPE with these ranks gives the same result.
    Control tokens are not among the pieces, so no text can become a control token. User-defined tokens are not among
    the pieces either, which are found in the text before any merge. Source: Transformers, generate_merges.
    """
    merges = [
        (score, piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    merges.sort(key=lambda merge: (-merge[0], -len(merge[1]), -len(merge[2])))
    return [(left, right) for _, left, right in merges]


def _text(metadata: Mapping[str, Any], key: str, default: str) -> str:
    text = metadata.get(key, default)
    if not isinstance(text, str):
        raise ModelError(f"{key} is of type {type(text).__name__}, expected text")
    return text


def _list(
    metadata: Mapping[str, Any], name: str, kind: type, length: int | None = None, default: Any = None
) -> list[Any]:
    """Return a checked array of the metadata. If it is absent, return `length` copies of the default."""
    key = f"tokenizer.ggml.{name}"
    if key not in metadata and length is not None and default is not None:
        return [default] * length
    values = metadata.get(key)
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise ModelError(f"{key} is missing or not an array of {kind.__name__}")
    if length is not None and len(values) != length:
        raise ModelError(f"{key} has {len(values)} entries for {length} tokens")
    return values


def _id(metadata: Mapping[str, Any], name: str, num_tokens: int, default: int | None = None) -> int | None:
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id", default)
    # without an end token, answers would never end
    if name != "eos" and type(token_id) is int and token_id in _NO_TOKEN:
        token_id = default
    if token_id is not None and not (type(token_id) is int and 0 <= token_id < num_tokens):
        raise ModelError(f"tokenizer.ggml.{name}_token_id is {token_id!r}, but the vocabulary has {num_tokens} tokens")
    return token_id
