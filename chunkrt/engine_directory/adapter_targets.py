"""adapters.json of an engine directory: how the linears combine the checkpoint's tensors.

With this file an engine finds the weights that an adapter changes, without the checkpoint. It is written for engines
that take adapters. Static schemes transform weights; adapters.npz describes these transformations.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import msgspec
import numpy as np

from chunkrt.errors import ModelError, cause_of
from chunkrt.files import read_json
from chunkrt.quant.folding import Folding

FILE = "adapters.json"
FOLDING_FILE = "adapters.npz"


@dataclass(frozen=True, kw_only=True)
class CombinedTensor:
    """A checkpoint tensor that a linear combines: its possible names in adapters, and its number of rows."""

    names: Sequence[str]
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class Target:
    """A linear that adapters may change.

    Attributes:
        tensors: the checkpoint's tensors, whose rows are concatenated.
        num_inputs: number of columns of each tensor.
        columns: for each column of the linear the index of its row; None if the order is the same. The index after the
            last row stands for a column of zeros.
        inputs: indices of the columns that a rank multiplies, in the same form; None for all columns in order.
        factor: factor of the linear's result, or of each of its columns.
    """

    tensors: Sequence[CombinedTensor]
    num_inputs: int
    columns: Sequence[int] | None
    factor: float | Sequence[float]
    inputs: Sequence[int] | None = None


@dataclass(frozen=True, kw_only=True)
class AdapterTargets:
    """The linears that adapters may change, by the names of their weights in the plan.

    Attributes:
        config: config keys of the checkpoint, on which the order of rows in GGUF adapters depends.
        architecture: the architecture of a GGUF checkpoint; empty for another one.
    """

    linears: Mapping[str, Target]
    config: Mapping[str, Any]
    architecture: str

    def save(self, folder: Path) -> None:
        """Write the file to an engine directory."""
        (folder / FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")


def save_folding(folder: Path, folding: Folding) -> None:
    """Write the transformations of weights to an engine directory, if there are any."""
    if arrays := folding.arrays():
        np.savez(folder / FOLDING_FILE, **arrays)  # type: ignore[arg-type]


def read_folding(folder: Path) -> Folding:
    """Read the transformations of weights of an engine directory. Raise ModelError if the file is damaged."""
    if not (folder / FOLDING_FILE).exists():
        return Folding()
    try:
        with np.load(folder / FOLDING_FILE, allow_pickle=False) as arrays:
            return Folding.from_arrays(dict(arrays))
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise ModelError(
            f"{folder / FOLDING_FILE} cannot be read ({cause_of(error)}); compile the model again"
        ) from error


def read_targets(folder: Path) -> AdapterTargets:
    """Read the file of an engine directory. Raise ModelError if it is damaged."""
    try:
        return msgspec.convert(read_json(folder / FILE), AdapterTargets)
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{folder / FILE} cannot be read ({cause_of(error)}); compile the model again") from error
