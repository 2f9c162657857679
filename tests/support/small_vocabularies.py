"""Small byte-level and SentencePiece vocabularies (also like Gemma's and Phi-3's), and llama.cpp's tokens of texts."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from chunkrt.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data"
TEXTS: list[str] = json.loads((DATA / "tokenizer_texts.json").read_text("utf-8"))
REFERENCE: dict[str, Any] = json.loads((DATA / "tokenizer_reference.json").read_text("utf-8"))


def make_tokenizer(vocabulary: str, **options: object) -> Tokenizer:
    """Return one of the small vocabularies, read as GGUF metadata."""
    keys = {
        name: "tokenizer.chat_template" if name == "chat_template" else f"tokenizer.ggml.{name}" for name in options
    }
    metadata = REFERENCE["vocabularies"][vocabulary] | {keys[name]: value for name, value in options.items()}
    tokenizer = Tokenizer.from_source(SimpleNamespace(path=Path("small.gguf"), metadata=metadata, config={}))
    assert tokenizer is not None
    return tokenizer
