"""Checks for authors of decoder families: a checkpoint gives the values that Transformers computed for it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from chunkrt.compile.compiler import prepare_checkpoint
from chunkrt.quant.scheme import Recipe, find_scheme
from chunkrt.testing.comparison import Comparison, Expected, compare_decoder

CHUNK_LENGTHS = (None, 1, 5)
"""Chunk lengths of `check_family`: the whole text at once, decoding from the first token, and chunks that end within
the text."""


class ComparisonError(AssertionError):
    """A value of a decoder differs from that of Transformers. The message is the report of the comparison."""


def make_expected(
    folder: str | os.PathLike[str], path: str | os.PathLike[str], *, token_ids: Sequence[int] | None = None
) -> None:
    """Write the values of a checkpoint in Transformers to an .npz file for `check_family`.

    Only this function needs torch and transformers (`pip install "chunkrt[compare]"`).

    Args:
        folder: checkpoint folder of Hugging Face.
        path: the file.
        token_ids: the tokens; by default 24 random tokens of the vocabulary.

    Raises:
        ConfigError, ModelError: see `expected_values`.
    """
    from chunkrt.testing.transformers_values import expected_values, random_tokens

    ids = random_tokens(Path(folder), 24) if token_ids is None else np.array(token_ids, np.int64)
    expected_values(Path(folder), ids).save(Path(path))


def check_family(folder: str | os.PathLike[str], expected: str | os.PathLike[str]) -> Comparison:
    """Check that a checkpoint of a family gives the expected values, whole and in chunks, and return the comparison.

    Args:
        folder: checkpoint folder of Hugging Face, usually a small one with random weights.
        expected: file that `make_expected` wrote for the same folder.

    Raises:
        ComparisonError: a value differs; the message names the first one, its layer and its operator.
        ModelError: the checkpoint cannot be read.
        ConfigError: the file cannot be read, or belongs to another checkpoint.
    """
    folder, values = Path(folder), Expected.load(Path(expected))
    prepared = prepare_checkpoint(folder, Recipe(scheme=find_scheme("float")), {}, model=folder.name)
    comparisons = [compare_decoder(prepared, values, chunk_length=length) for length in CHUNK_LENGTHS]
    for found in comparisons:
        if not found.is_equal:
            raise ComparisonError("\n".join(found.lines()))
    return comparisons[0]
