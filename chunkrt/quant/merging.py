"""Merging of calibrations of one model that were made on different texts or machines.

A merged calibration has the ranges of one calibration on all texts: largest magnitudes are maxima, and the limits that
a method chooses follow from the sums of the histograms. Measurements for shadows are not merged, because they depend on
the limits of all texts together; a compilation with shadows makes them again, on the tokens of all texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.errors import QuantizationError
from chunkrt.quant.calibration import NUM_BINS, SHADOW_SHARE, Calibration, Histogram, Range

SETTINGS = {"method": "the method", "equalisation": "equalisation", "is_rotated": "rotation"}


def merge(calibrations: Mapping[str, Calibration]) -> Calibration:
    """Return the calibration on the texts of several calibrations, one text after the other.

    The ranges equal those of a calibration on the concatenated tokens if every text but the last consists of complete
    windows; otherwise a window of the concatenated tokens would contain the end of one text and the beginning of the
    next.

    Args:
        calibrations: at least one calibration, by the name of its file.

    Raises:
        QuantizationError: the calibrations differ in model, method, equalisation or rotation; the message names the
            files.
    """
    (first_name, first), *others = calibrations.items()
    for name, other in others:
        _check_same(first_name, first, name, other)
    every = list(calibrations.values())
    peaks = {value: max(each.peaks[value] for each in every) for value in first.peaks}
    histograms = {value: _sum([each.histograms[value] for each in every]) for value in first.histograms}
    ranges = {value: Range.of(first.method, peaks[value], histogram) for value, histogram in histograms.items()}
    return replace(
        first,
        token_ids=np.concatenate([each.token_ids for each in every]),
        peaks=peaks,
        limits={value: found.limit for value, found in ranges.items()},
        column_peaks=_maxima([each.column_peaks for each in every]),
        channel_peaks=_maxima([each.channel_peaks for each in every]),
        histograms=histograms,
        shadow_limits={value: found.quantile(1 - SHADOW_SHARE) for value, found in ranges.items()},
        shadowed_column_peaks={},
        hot_channels={},
    )


def _check_same(first_name: str, first: Calibration, name: str, other: Calibration) -> None:
    if not first.weights or other.weights != first.weights:
        raise QuantizationError(
            f"{name} was made for {other.model} with other weights than {first_name}, which was made for "
            f"{first.model}; merge calibrations of one checkpoint"
        )
    for field, what in SETTINGS.items():
        one, two = getattr(first, field), getattr(other, field)
        if one != two:
            raise QuantizationError(
                f"{first_name} and {name} differ in {what}: {one} and {two}; calibrate with the same options"
            )
    if first.folding.digest() != other.folding.digest():
        raise QuantizationError(
            f"{first_name} and {name} were equalised on different texts, so their weights differ; merge calibrations "
            "made with `equalisation='off'`; a compilation that equalises then measures again on the tokens of all"
        )
    if _layout(first) != _layout(other):
        raise QuantizationError(f"{first_name} and {name} hold different values; calibrate with the same version")


def _layout(calibration: Calibration) -> Any:
    """Return the names and sizes of all values of a calibration."""
    columns = {name: array.size for name, array in calibration.column_peaks.items()}
    channels = {name: array.size for name, array in calibration.channel_peaks.items()}
    return calibration.peaks.keys(), calibration.histograms.keys(), columns, channels


def _maxima(found: Sequence[Mapping[str, NDArray[np.float32]]]) -> dict[str, NDArray[np.float32]]:
    return {name: np.max([each[name] for each in found], axis=0) for name in found[0]}


def _sum(histograms: Sequence[Histogram]) -> Histogram:
    counts = np.zeros(NUM_BINS, np.int64)
    for bins, numbers in histograms:
        counts[bins] += numbers
    bins = counts.nonzero()[0]
    return np.stack([bins, counts[bins]]).astype(np.int64)
