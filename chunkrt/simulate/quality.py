"""Measured quality of schemes: the divergences that `chunkrt eval --json` printed, for the search."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec

from chunkrt.engine.options import EngineOptions
from chunkrt.engine.resolve import choose_recipe
from chunkrt.errors import ConfigError, cause_of
from chunkrt.quant.scheme import MIXED, Scheme


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Mean KL divergence of a model under one scheme from its base.

    Attributes:
        source: file of the evaluation.
        scheme: complete scheme of the evaluated model, with its shadows.
        mean_kl: mean divergence in nats.
        checkpoint: digest of the checkpoint's files; empty if it is unknown.
        conditions: text and base; divergences under different conditions are not comparable.
    """

    source: str
    scheme: Scheme
    mean_kl: float
    checkpoint: str
    conditions: tuple[object, ...]

    @property
    def quantisation(self) -> Mapping[str, Any]:
        """Fields of `EngineOptions` that quantise a checkpoint for an NPU under the same scheme.

        Raises:
            ConfigError: an NPU cannot have the scheme, or a search over weights chose it.
        """
        scheme = self.scheme
        if scheme.name == MIXED:
            raise ConfigError(
                f"{self.source} evaluates {MIXED!r}, and a settings file cannot contain the bits of each layer that a "
                "search chose; compile the model with --scheme mixed, and tune the engine directory with this file"
            )
        if not scheme.is_static:
            raise ConfigError(
                f"{self.source} evaluates linear layers under {scheme.name!r}, which the NPU does not run; omit it"
            )
        if scheme.float_outputs:
            raise ConfigError(
                f"{self.source} evaluates {scheme.name} with float outputs, which an NPU quantises; evaluate it again "
                "with --as-npu"
            )
        usual = choose_recipe(EngineOptions(npu="qnn", scheme=scheme.name), scheme.name).scheme
        found: dict[str, Any] = {"scheme": scheme.name}
        if scheme.shadowed:
            found["shadow"] = "all" if scheme.shadowed == ("*",) else ",".join(scheme.shadowed)
        if scheme.equalisation != usual.equalisation:
            found["equalisation"] = "off" if scheme.equalisation is None else scheme.equalisation
        if scheme.is_rotated != usual.is_rotated:
            found["rotation"] = scheme.is_rotated
        if scheme.weight_bits == 4 and scheme.rounding != usual.rounding:
            found["rounding"] = scheme.rounding
        made = choose_recipe(EngineOptions(npu="qnn", **found), scheme.name).scheme
        if made != replace(scheme, weights_of_8_bits=made.weights_of_8_bits):
            raise ConfigError(
                f"{self.source} evaluates {scheme.name} with linear layers that no options choose; omit it"
            )
        return found


class _EvalRun(msgspec.Struct, kw_only=True):
    quantisation: Scheme | None = None
    checkpoint: str = ""


class _EvalBase(msgspec.Struct, kw_only=True):
    model: str
    scheme: str


class _EvalComparison(msgspec.Struct, kw_only=True):
    mean_kl: float


class _Figures(msgspec.Struct, kw_only=True):
    num_tokens: int
    comparison: _EvalComparison | None


class _EvalText(msgspec.Struct, kw_only=True):
    file: str
    part: str
    windows: int
    window_length: int
    base: _EvalBase | None
    figures: _Figures


class _EvalFile(msgspec.Struct, kw_only=True):
    run: _EvalRun
    text: _EvalText | None


def read_quality(path: str | os.PathLike[str]) -> Quality:
    """Read the output of `chunkrt eval --json`.

    Raises:
        ConfigError: the file cannot be read, is not such an output, or contains no divergence.
    """
    try:
        found = msgspec.convert(json.loads(Path(path).read_text("utf-8-sig")), _EvalFile)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {cause_of(error)}") from error
    except ValueError as error:  # also of msgspec, JSON and UTF-8
        raise ConfigError(f"{path} is not an output of `chunkrt eval --json` ({error})") from error
    text = found.text
    if text is None or text.base is None or text.figures.comparison is None:
        raise ConfigError(f"{path} has no KL divergence; run `chunkrt eval` with --text FILE and a base")
    if not isfinite(text.figures.comparison.mean_kl):
        raise ConfigError(f"{path} has a mean KL divergence of {text.figures.comparison.mean_kl}; evaluate it again")
    if found.run.quantisation is None:
        raise ConfigError(f"{path} does not record the quantisation of its model; run `chunkrt eval --json` again")
    return Quality(
        source=os.fspath(path),
        scheme=found.run.quantisation,
        mean_kl=text.figures.comparison.mean_kl,
        checkpoint=found.run.checkpoint,
        conditions=(
            *(Path(text.file).name, text.part, text.windows, text.window_length, text.figures.num_tokens),
            *(Path(text.base.model).name, text.base.scheme),
        ),
    )


def check_comparable(qualities: Sequence[Quality]) -> None:
    """Raise ConfigError if divergences were measured under different conditions, or a scheme occurs twice."""
    seen: dict[Scheme, Quality] = {}
    for quality in qualities:
        first = qualities[0]
        if quality.conditions != first.conditions:
            raise ConfigError(
                f"{quality.source} and {first.source} have other texts, windows or bases, so their divergences are not "
                "comparable; evaluate all schemes alike"
            )
        if quality.checkpoint and first.checkpoint and quality.checkpoint != first.checkpoint:
            raise ConfigError(f"{quality.source} and {first.source} evaluate different checkpoints; omit one of them")
        if quality.scheme in seen:
            raise ConfigError(
                f"{quality.source} and {seen[quality.scheme].source} evaluate the same scheme; omit one of them"
            )
        seen[quality.scheme] = quality
