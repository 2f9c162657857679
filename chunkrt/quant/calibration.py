"""Calibration: how large the values of a decoder get on some text, from which static schemes take their grids."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from chunkrt.errors import ModelError

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was seen of one decoder on one text.

    model: what was calibrated, as it was named. text: SHA-256 of the text. method: how limits were chosen. num_tokens:
    of the text, as far as it was used.
    limits: for every float32 value between the nodes of a plan, by name, a magnitude that it stays within (nearly
        always, depending on the method).
    column_limits: float32 [N], for every linear's output: the largest magnitude of each column.
    """

    model: str
    text: str
    method: str
    num_tokens: int
    limits: Mapping[str, float]
    column_limits: Mapping[str, NDArray[np.float32]]

    def save(self, path: Path) -> None:
        """Write a NumPy .npz archive, aside and then renamed. Raises OSError if that fails."""
        about = {name: getattr(self, name) for name in ("model", "text", "method", "num_tokens")}
        arrays = {f"columns/{name}": limits for name, limits in self.column_limits.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with aside.open("wb") as file:
                np.savez_compressed(
                    file,
                    allow_pickle=False,
                    about=np.array(json.dumps({"format": FORMAT, **about})),
                    names=np.array(list(self.limits)),
                    limits=np.array(list(self.limits.values()), np.float32),
                    **arrays,
                )
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)

    @staticmethod
    def load(path: Path) -> Calibration:
        """Read what `save` wrote.

        Raises:
            ModelError: the file is missing, damaged, or of another format.
        """
        try:
            with np.load(path, allow_pickle=False) as archive:
                about = json.loads(str(archive["about"]))
                if about.pop("format") != FORMAT:
                    raise ValueError("another format")
                return Calibration(
                    **about,
                    limits=dict(zip(archive["names"].tolist(), archive["limits"].tolist(), strict=True)),
                    column_limits={
                        name.removeprefix("columns/"): archive[name] for name in archive if name.startswith("columns/")
                    },
                )
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            raise ModelError(f"{path} is not a calibration ({error}); run `chunkrt calibrate` again") from error
