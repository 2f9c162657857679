"""The vocabularies of real models, where they have been pulled."""

from pathlib import Path
from types import SimpleNamespace

from small_vocabularies import REFERENCE

from chunkrt.checkpoints import catalogue
from chunkrt.checkpoints.gguf_header import read_header
from chunkrt.checkpoints.source import map_file
from chunkrt.tokenizer import Tokenizer

MODELS = {name: catalogue.pulled(catalogue.find(name)) for name in REFERENCE["models"]}
"""Looked up before the tests get a cache of their own."""


def tokenizer_of(path: Path) -> Tokenizer:
    """A GGUF file's, whether its decoder is implemented or not."""
    metadata = read_header(map_file(path), path).metadata
    tokenizer = Tokenizer.from_source(SimpleNamespace(path=path, metadata=metadata, config={}))
    assert tokenizer is not None
    return tokenizer
