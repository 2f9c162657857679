"""Vocabularies of real models, if they have been pulled."""

from pathlib import Path
from types import SimpleNamespace

from small_vocabularies import REFERENCE

from chunkrt.checkpoints import catalogue
from chunkrt.checkpoints.checkpoint import map_file
from chunkrt.checkpoints.gguf_header import read_header
from chunkrt.tokenizer import Tokenizer

MODELS = {name: catalogue.pulled(catalogue.find(name)) for name in REFERENCE["models"]}
"""Models of the user's cache, found before the tests switch to another cache."""


def tokenizer_of(path: Path) -> Tokenizer:
    """Return the vocabulary of a GGUF file, even if its decoder is not supported."""
    metadata = read_header(map_file(path), path).metadata
    tokenizer = Tokenizer.from_source(SimpleNamespace(path=path, metadata=metadata, config={}))
    assert tokenizer is not None
    return tokenizer
