"""Calibration: how large the values of a decoder get on some text, from which static schemes take their grids."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from zipfile import is_zipfile

import numpy as np
from numpy.typing import NDArray

from chunkrt.errors import ModelError

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was seen of one decoder on one text.

    model: what was calibrated, as it was named. text: SHA-256 of the text's tokens. method: how limits were chosen.
    num_tokens: of the text, as far as it was used.
    peaks: for every value between the nodes of a plan, by name, its largest magnitude: 16-bit grids reach so far.
    limits: for every linear's input, where an 8-bit grid should end: at the peak or, depending on the method, below it.
    column_peaks: float32 [N], for every linear's output: the largest magnitude of each column.
    """

    model: str
    text: str
    method: str
    num_tokens: int
    peaks: Mapping[str, float]
    limits: Mapping[str, float]
    column_peaks: Mapping[str, NDArray[np.float32]]

    def save(self, path: Path) -> None:
        """Write a NumPy .npz archive, aside and then renamed. Raises ModelError if that fails."""
        about = {name: getattr(self, name) for name in ("model", "text", "method", "num_tokens")}
        names: dict[str, list[str]] = {}
        arrays = {f"columns/{name}": peaks for name, peaks in self.column_peaks.items()}
        for field in ("peaks", "limits"):
            by_name: Mapping[str, float] = getattr(self, field)
            arrays[field] = np.array(list(by_name.values()), np.float32)
            names[field] = list(by_name)
        aside = path.parent / f".{path.name}.{secrets.token_hex(8)}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with aside.open("wb") as file:
                    np.savez_compressed(
                        file,
                        about=np.array(json.dumps({"format": FORMAT, "names": names, **about})),
                        **arrays,  # type: ignore[arg-type]
                    )
                aside.replace(path)
            finally:
                aside.unlink(missing_ok=True)
        except OSError as error:
            raise ModelError(f"cannot write the calibration {path}: {error.strerror or error}") from error

    @staticmethod
    def load(path: Path) -> Calibration:
        """Read what `save` wrote.

        Raises:
            ModelError: the file is missing, damaged, or of another format.
        """
        try:
            if path.is_file() and not is_zipfile(path):  # NumPy would advise to unpickle it
                raise ValueError("it is no .npz archive")
            with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
                if damaged := archive.zip.testzip():
                    raise ValueError(f"{damaged} is damaged")
                about = json.loads(str(archive["about"]))
                if about.pop("format") != FORMAT:
                    raise ValueError("another format")
                names = about.pop("names")
                return Calibration(
                    **about,
                    peaks=dict(zip(names["peaks"], archive["peaks"].tolist(), strict=True)),
                    limits=dict(zip(names["limits"], archive["limits"].tolist(), strict=True)),
                    column_peaks={
                        name.removeprefix("columns/"): archive[name] for name in archive if name.startswith("columns/")
                    },
                )
        except Exception as error:  # a damaged archive raises whatever its bytes lead to
            raise ModelError(f"{path} is not a calibration ({error}); run `chunkrt calibrate` again") from error
