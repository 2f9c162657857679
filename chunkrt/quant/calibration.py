"""Calibrations: magnitudes of a decoder's values on a text, which determine the grids of static schemes.

The limit of a grid is determined from a stream of values, in bounded memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal, get_args
from zipfile import ZipFile, is_zipfile

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from chunkrt.errors import ModelError, OutOfMemoryError, cause_of
from chunkrt.files import check_archive, check_regular, written_aside
from chunkrt.quant.folding import Folding

Method = Literal["absmax", "percentile", "mse"]
METHODS: tuple[Method, ...] = get_args(Method)

PERCENTILE = 99.99
MSE_LEVELS = 127
"""Levels of the 8-bit grid whose error is minimised. A 16-bit grid has hardly any error below its limit."""

OCTAVES, CANDIDATES_AN_OCTAVE = 6, 24
"""Candidate limits of the method "mse" relative to the largest magnitude, in steps of 3 %."""

NEGLIGIBLE = 2.0**-24
"""Smallest counted magnitude, relative to the largest; smaller values are rounded to zero, and their squares are
negligible."""

BIN_SHIFT = 16
"""Shift that maps the bits of a magnitude's float32 to its bin: the exponent and 7 bits of the mantissa."""

NUM_BINS = 1 << 31 - BIN_SHIFT
_STARTS = np.arange(0x7F800000 >> BIN_SHIFT, dtype=np.uint32) << BIN_SHIFT
EDGES = np.append(_STARTS.view(np.float32).astype(np.float64), 2.0**128)
"""Bin i counts magnitudes from EDGES[i] up to but excluding EDGES[i + 1]; the bins above hold values that are not
finite."""

VALUES_AT_ONCE = 1 << 17
"""Number of values that are binned at once, so that temporary copies are bounded and fit the processor's cache."""

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Histogram = NDArray[np.int64]
"""Indices of bins, ascending, and the number of magnitudes in each, int64 [2, n]."""


class Range:
    """The magnitudes of one value of the plan, accumulated from a stream.

    The method "absmax" keeps the largest magnitude. The methods "percentile" and "mse" count magnitudes in bins, 128
    per octave, for any float32, so the result does not depend on how the stream is divided. The limit by "percentile"
    is the magnitude that exceeds 99.99 % of the values. The limit by "mse" is the one whose 8-bit grid has the least
    squared error, which includes rounding below the limit and saturation above it.

    Attributes:
        counts: number of magnitudes in each bin; None for "absmax".
        largest: the largest magnitude so far; infinite or not a number if a value was.
    """

    def __init__(self, method: Method, *, counts: bool = True) -> None:
        self.largest = np.float32(0)
        self._counts = np.zeros(NUM_BINS, np.int64) if counts else None
        self._method = method

    @staticmethod
    def of(method: Method, largest: float, histogram: Histogram) -> Range:
        """Return the range with a largest magnitude and a result of `histogram`."""
        found = Range(method)
        assert found._counts is not None
        found.largest = np.float32(largest)
        found._counts[histogram[0]] = histogram[1]
        return found

    @property
    def histogram(self) -> Histogram:
        """Bins that are not empty, ascending, and their numbers of magnitudes."""
        assert self._counts is not None
        bins = self._counts.nonzero()[0]
        return np.stack([bins, self._counts[bins]]).astype(np.int64)

    def update(self, values: Float32) -> None:
        """Add values, float32 [T, N]."""
        largest = np.maximum(values.max(initial=0), -values.min(initial=0))
        self.largest = np.maximum(self.largest, largest)
        if self._counts is not None:
            num_rows = max(VALUES_AT_ONCE // values.shape[1], 1)
            for begin in range(0, len(values), num_rows):
                magnitudes = np.abs(values[begin : begin + num_rows], order="C")
                bins = magnitudes.view(np.uint32) >> BIN_SHIFT
                self._counts += np.bincount(bins.ravel(), minlength=NUM_BINS)

    @property
    def limit(self) -> float:
        """Limit of a grid for these values, a float32; 0 if all were zero."""
        if self._counts is None or self._method == "absmax" or self.largest == 0:
            return float(self.largest)
        if self._method == "percentile":
            return self.quantile(PERCENTILE / 100)
        return float(min(np.float32(_least_square_error(self._counts, float(self.largest))), self.largest))

    def quantile(self, share: float) -> float:
        """Return a magnitude, a float32, below which at least the given share of the counted values lies."""
        assert self._counts is not None
        num_below = np.cumsum(self._counts)
        found = int(np.searchsorted(num_below, num_below[-1] * share))
        return float(min(EDGES[found + 1], np.float64(self.largest)))


def _least_square_error(counts: NDArray[np.int64], largest: float) -> float:
    """Return the candidate with the least squared error, assuming that values are evenly distributed within their
    bins.
    """
    first = np.searchsorted(EDGES, largest * NEGLIGIBLE)
    last = int(counts.nonzero()[0][-1]) + 1
    edges = EDGES[first : last + 1]
    density = counts[first:last] / np.diff(edges)
    limits = largest * 2.0 ** (-np.arange(OCTAVES * CANDIDATES_AN_OCTAVE) / CANDIDATES_AN_OCTAVE)
    errors = [density @ np.diff(_integral(edges, limit / MSE_LEVELS)) for limit in limits]
    return float(limits[np.argmin(errors)])


def _integral(x: Float64, step: float) -> Float64:
    """Integrate the squared error of rounding magnitudes from 0 to x to a grid."""
    levels = np.minimum(np.rint(x / step), MSE_LEVELS)
    error = x - levels * step
    integral: Float64 = levels * (step**3 / 12) + error * error * error / 3
    return integral


FORMAT = 6
NUMBERS = ("peaks", "limits", "shadow_limits")
BY_NAME = ("column_peaks", "channel_peaks", "shadowed_column_peaks", "hot_channels")
"""Names of a calibration's fields that hold a number for each name, and of those that hold an array for each name."""


SHADOW_SHARE = 0.005
"""Fraction of a shadowed linear's input values that exceed its grid. The grid's steps are therefore finer."""


def num_hot_channels(depth: int) -> int:
    """Return the number of rows, out of `depth`, of a shadowed linear's weight that are stored dequantised."""
    return max(1, depth // 32)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measurements of one decoder on one text.

    model: name of the calibrated model, as the user gave it.
    weights: the model's `weights_digest`.
    token_ids: int64 [n], the tokens of the text.
    method: the method that chose the limits.
    equalisation, is_rotated: settings of the scheme that the calibration is for.
    folding: the transformations of the weights that these settings caused.
    peaks: the largest magnitude of every value between the nodes of a plan, by name; 16-bit grids extend to it.
    limits: for every linear's input, the limit of an 8-bit grid: the peak or, depending on the method, a smaller value.
    column_peaks: float32 [N], for every linear's output: the largest magnitude of each column.
    channel_peaks: float32 [K], for every linear's input: the largest magnitude of each channel.
    histograms: for every linear's input, the magnitudes that determine its limits; empty if the values were scaled.

    These attributes are for linears that get a shadow, which multiplies the part of the input that exceeds the grid;
    the last two are empty in a merged calibration:
    shadow_limits: the limit of the input's 8-bit grid, by the input's name. shadowed_column_peaks: like column_peaks,
    for the product of the part of the input within the grid. hot_channels: int32 [num_hot_channels(K)], ascending: the
    input's channels that exceed the grid most often.
    """

    model: str
    weights: str
    token_ids: NDArray[np.int64]
    method: Method
    equalisation: float | None
    is_rotated: bool
    folding: Folding
    peaks: Mapping[str, float]
    limits: Mapping[str, float]
    column_peaks: Mapping[str, NDArray[np.float32]]
    channel_peaks: Mapping[str, NDArray[np.float32]]
    shadow_limits: Mapping[str, float]
    shadowed_column_peaks: Mapping[str, NDArray[np.float32]]
    hot_channels: Mapping[str, NDArray[np.int32]]
    histograms: Mapping[str, Histogram]

    @property
    def has_shadows(self) -> bool:
        """True if the calibration holds the measurements for linears with shadows."""
        return bool(self.hot_channels)

    def save(self, path: Path) -> None:
        """Write a NumPy .npz archive to a temporary name, then rename it. Raises ModelError if writing fails."""
        about = {name: getattr(self, name) for name in ("model", "weights", "method", "equalisation", "is_rotated")}
        names: dict[str, list[str]] = {}
        arrays = {f"{field}/{name}": array for field in BY_NAME for name, array in getattr(self, field).items()}
        arrays |= {f"folding/{name}": array for name, array in self.folding.arrays().items()}
        arrays |= {f"histograms/{name}": histogram for name, histogram in self.histograms.items()}
        arrays["token_ids"] = self.token_ids
        for field in NUMBERS:
            by_name: Mapping[str, float] = getattr(self, field)
            arrays[field] = np.array(list(by_name.values()), np.float32)
            names[field] = list(by_name)
        try:
            with written_aside(path) as aside, aside.open("wb") as file:
                np.savez_compressed(
                    file,
                    about=np.array(json.dumps({"format": FORMAT, "names": names, **about})),
                    **arrays,
                )
        except OSError as error:
            raise ModelError(f"cannot write the calibration {path}: {cause_of(error)}") from error

    @staticmethod
    def load(path: Path) -> Calibration:
        """Read the output of `save`.

        Raises:
            ModelError: the file is missing, damaged, or of another format.
        """
        try:
            check_regular(path)
            if path.is_file() and not is_zipfile(path):  # NumPy would suggest unpickling it
                raise ValueError("it is no .npz archive")
            with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
                check_archive(archive.zip, ratio=16)
                if damaged := archive.zip.testzip():
                    raise ValueError(f"{damaged} is damaged")
                _check_headers(archive.zip)
                about = json.loads(str(archive["about"]))
                if (found := about.pop("format")) != FORMAT:
                    raise ValueError(f"its format is {found}, expected {FORMAT}")
                names = about.pop("names")

                def numbers(field: str) -> dict[str, float]:
                    return dict(zip(names[field], archive[field].tolist(), strict=True))

                def arrays(field: str) -> dict[str, NDArray[Any]]:
                    return {
                        key.removeprefix(f"{field}/"): archive[key] for key in archive if key.startswith(f"{field}/")
                    }

                fields: dict[str, Any] = {field: numbers(field) for field in NUMBERS}
                fields |= {field: arrays(field) for field in (*BY_NAME, "histograms")}
                folding = Folding.from_arrays(arrays("folding"))
                calibration = Calibration(**about, **fields, token_ids=archive["token_ids"], folding=folding)
                calibration._check()
                return calibration
        except MemoryError as error:
            raise OutOfMemoryError(f"there is too little memory to read the calibration {path} ({error})") from error
        except Exception as error:  # a damaged archive raises many types of exceptions
            raise ModelError(f"{path} is not a calibration ({error}); run `chunkrt calibrate` again") from error

    def _check(self) -> None:
        """Raise ValueError for impossible measurements."""
        if not (
            isinstance(self.model, str)
            and isinstance(self.weights, str)
            and isinstance(self.is_rotated, bool)
            and self.method in METHODS
        ):
            raise ValueError("its description of model, method or scheme is invalid")
        for field in NUMBERS:
            values = np.array(list(getattr(self, field).values()))
            if not (np.isfinite(values).all() and (values >= 0).all() and values.any()):
                raise ValueError(f"{field} are not all finite, 0 or more, and some above 0")
        for field in BY_NAME:
            for name, array in getattr(self, field).items():
                kind = "i" if field == "hot_channels" else "f"
                if array.ndim != 1 or array.dtype.kind != kind or not (np.isfinite(array) & (array >= 0)).all():
                    raise ValueError(f"{field} of {name!r} are not a list of finite numbers, 0 or more")
        for name, histogram in self.histograms.items():
            if histogram.ndim != 2 or len(histogram) != 2 or histogram.dtype != np.int64 or not histogram.size:
                raise ValueError(f"the histogram of {name!r} is {histogram.dtype} {list(histogram.shape)}")
            bins, counts = histogram
            if bins[0] < 0 or bins[-1] >= len(_STARTS) or (np.diff(bins) <= 0).any() or (counts <= 0).any():
                raise ValueError(f"the histogram of {name!r} has impossible bins or counts")
        if self.token_ids.ndim != 1 or self.token_ids.dtype != np.int64:
            raise ValueError(f"its tokens are {self.token_ids.dtype} {list(self.token_ids.shape)}")


def _check_headers(archive: ZipFile) -> None:
    """Raise ValueError for an array whose header claims a wrong size, because NumPy would allocate that size."""
    for member in archive.infolist():
        with archive.open(member) as file:
            is_first_version = npy.read_magic(file) == (1, 0)
            shape, _, dtype = (npy.read_array_header_1_0 if is_first_version else npy.read_array_header_2_0)(file)
            if file.tell() + prod(shape) * dtype.itemsize != member.file_size:
                raise ValueError(f"{member.filename} claims to hold {dtype} {shape}, which is not its size")
