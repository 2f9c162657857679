"""llama.cpp's tokens of diverse texts: the reference of the tokenizer's tests.

Reads tests/data/tokenizer_texts.json and writes tokenizer_reference.json next to it: four small vocabularies made from
the texts, and for each way to use them llama.cpp's tokens of every text. A vocabulary is GGUF metadata. The byte-level
one has merges across words and lines, so that every cut of a pre-tokeniser is visible. The one like Gemma's has runs of
spaces and line ends, and tags, as user-defined tokens; the control tokens of the one like Phi-3's remove whitespace. If
GGUF files of models in the catalogue are given, their tokens are written too.

    python make_tokenizer_reference.py [NAME MODEL.gguf]...

Needs llama-cpp-python (last: 0.3.36), gguf and tokenizers.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

DATA = Path(__file__).parents[1] / "data"
TEXTS: list[str] = json.loads((DATA / "tokenizer_texts.json").read_text("utf-8"))
PRE_TOKENIZERS = (
    "default",
    "gpt-2",
    "smollm",
    "llama-bpe",
    "lfm2",
    "smaug-bpe",
    "dbrx",
    "qwen2",
    "qwen35",
    "tekken",
    "gpt-4o",
)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = (
    int(gguf.TokenType[name]) for name in ("NORMAL", "UNKNOWN", "CONTROL", "USER_DEFINED", "BYTE")
)


def main(arguments: list[str]) -> None:
    """Write the reference; see the module's docstring."""
    vocabularies = {
        "byte_level": byte_level_vocabulary(),
        "sentence_piece": sentence_piece_vocabulary(),
        "gemma": gemma_vocabulary(),
        "phi3": phi3_vocabulary(),
    }
    uses = [("byte_level", {"pre": pre}) for pre in PRE_TOKENIZERS]
    uses += [("sentence_piece", {"add_space_prefix": adds}) for adds in (True, False)]
    uses += [("gemma", {}), ("phi3", {})]
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        for name, options in uses:
            path = Path(folder) / "vocabulary.gguf"
            metadata = vocabularies[name] | {f"tokenizer.ggml.{key}": value for key, value in options.items()}
            write_gguf(path, metadata)
            cases.append({"vocabulary": name, "options": options} | tokenise(path))
    models_ = {name: tokenise(Path(path)) for name, path in zip(arguments[::2], arguments[1::2], strict=True)}
    contents = {"vocabularies": vocabularies, "cases": cases, "models": models_}
    text = json.dumps(contents, separators=(",", ":"))
    (DATA / "tokenizer_reference.json").write_text(text + "\n", "utf-8")


def tokenise(path: Path) -> dict[str, Any]:
    """Return llama.cpp's tokens of every text.

    "plain": control tokens are read as text. "special": they are read as control tokens, by the text's index, if that
    differs.
    """
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    plain, special = (
        [model.tokenize(text.encode(), add_bos=False, special=parse) for text in TEXTS] for parse in (False, True)
    )
    differing = {index: ids for index, ids in enumerate(special) if ids != plain[index]}
    return {"plain": plain, "special": differing}


def byte_level_vocabulary() -> dict[str, Any]:
    """Return a byte-level BPE: control tokens first, two user-defined ones, one word that no merge leads to."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=control,
        initial_alphabet=alphabet,
        max_token_length=9,
        show_progress=False,
    )
    library.train_from_iterator([*TEXTS, *TEXTS], trainer)
    learned = json.loads(library.to_str())["model"]
    tokens = [
        *sorted(learned["vocab"], key=learned["vocab"].__getitem__),
        "<tool>",
        "<tool> x",
        "\u0120Hello",
    ]
    types = [CONTROL] * len(control) + [NORMAL] * (len(tokens) - len(control))
    types[-3:-1] = [USER_DEFINED] * 2
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in learned["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def sentence_piece_vocabulary() -> dict[str, Any]:
    """Return a SentencePiece BPE: control tokens, all bytes, learned pieces best first, then common characters."""
    library = Tokenizer(models.BPE())
    library.normalizer = normalizers.Replace(" ", "\u2581")
    counts = Counter("".join(TEXTS).replace(" ", "\u2581"))
    common = sorted(counts, key=lambda character: (-counts[character], character))[:150]
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=common, limit_alphabet=150, max_token_length=9, show_progress=False
    )
    library.train_from_iterator([*TEXTS, *TEXTS], trainer)
    learned = json.loads(library.to_str())["model"]["vocab"]
    fixed = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = sorted(set(learned) - {*fixed, "<tool>"}, key=lambda piece: (len(piece) == 1, learned[piece]))
    tokens = [*fixed, *pieces, "<tool>"]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces) + [USER_DEFINED]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [0.0],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def gemma_vocabulary() -> dict[str, Any]:
    """Return a SentencePiece BPE like Gemma's: all except the learned pieces and the bytes have the score -1000,
    "<unk>" is control."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
    runs = [*("\n" * n for n in range(1, 7)), *(" " * n for n in range(2, 9)), "\t", "\t\t"]
    named = [*runs, "<table>", "</table>", "<b>", "</b>", "<s>", "</s>"]
    other = sentence_piece_vocabulary()["tokenizer.ggml.tokens"]
    learned = [piece for piece in other[259:-1] if not {"\n", "\t"} & set(piece) and "\u2581\u2581" not in piece]
    pieces = [piece for piece in learned if piece not in {*special, *named}]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*special, *named, *other[3:259], *pieces],
        "tokenizer.ggml.token_type": [CONTROL] * len(special)
        + [USER_DEFINED] * len(named)
        + [BYTE] * 256
        + [NORMAL] * len(pieces),
        "tokenizer.ggml.scores": [-1000.0] * (len(special) + len(named))
        + [0.0] * 256
        + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }


def phi3_vocabulary() -> dict[str, Any]:
    """Return a SentencePiece BPE with Phi-3's control tokens, whose names determine how llama.cpp treats whitespace."""
    vocabulary = sentence_piece_vocabulary()
    added = ["<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>"]
    return vocabulary | {
        "general.architecture": "phi3",
        "general.name": "phi3",
        "tokenizer.ggml.tokens": vocabulary["tokenizer.ggml.tokens"] + added,
        "tokenizer.ggml.token_type": vocabulary["tokenizer.ggml.token_type"] + [CONTROL] * len(added),
        "tokenizer.ggml.scores": vocabulary["tokenizer.ggml.scores"] + [-1000.0] * len(added),
    }


def write_gguf(path: Path, metadata: dict[str, Any]) -> None:
    """Write a GGUF file of a vocabulary alone, as a Llama: for other families llama.cpp requires more keys."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(sys.argv[1:])
