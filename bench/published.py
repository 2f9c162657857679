"""Published figures of `published.csv`, and their predictions by the simulator."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from chunkrt.engine.npu_attention import near_by_reach
from chunkrt.engine.options import EngineOptions
from chunkrt.engine_directory.figures import weight_bytes
from chunkrt.graph.placement import Placement
from chunkrt.graph.plan import Plan
from chunkrt.quant.scheme import find_scheme
from chunkrt.simulate import DeviceProfile, Simulation, find_shape, simulate

Metric = Literal["prefill", "decode"]

FILE = Path(__file__).parent / "published.csv"
SCHEMES = {
    "w4a16": "w4a16",
    "w4f16": "w4a16",
    "w8a16": "w8a16",
    "q4_0": "w4a8-dynamic",
    "q8_0": "w8a8-dynamic",
}
HEXAGON = "llama.cpp Hexagon"
HEXAGON_WINDOWS = "128,256,512,1024,2048"
FLOORS = "ExecuTorch floors"
"""Rates that tests of ExecuTorch require: lower bounds."""

SEPARATE_HEADS = ("ExecuTorch", FLOORS, "mllm v2")
"""Systems whose graphs have a tensor for each head."""

HEAD_ON_NPU: Placement = {"lm_head": "npu"}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One published rate in tokens/s, with its operating point.

    Attributes:
        on: the processor.
        prompt_length: 128 if the source does not state it.
        prompt_range: ends of the prompt lengths that the source allows.
        context_range: ends of the context lengths that the source allows.
        context_length: length of the padded context of a graph on the NPU; of the cache otherwise.
        is_cold: the graph ran for the first time in its process, so that its weights came from storage as far as they
            were not in memory: between the time of a warm run, and that plus reading all weights once.
        excluded: reason why it is neither fitted nor predicted.
    """

    id: str
    system: str
    soc: str
    model: str
    weights: str
    on: Literal["npu", "cpu"]
    metric: Metric
    published: float
    prompt_length: int
    prompt_range: tuple[int, int]
    is_cold: bool
    chunk_length: int
    context_length: int
    context_range: tuple[int, int]
    excluded: str
    source: str

    @property
    def software(self) -> str:
        """Name of the software in `chunkrt/simulate/software`."""
        if self.on == "cpu":
            return "llama.cpp"
        if self.system == HEXAGON:
            return "llama.cpp-hexagon"
        if self.system in SEPARATE_HEADS:
            return "executorch"
        return "genie-float16" if self.weights == "w4f16" else "genie"

    @property
    def operating_point(self) -> tuple[object, ...]:
        """All that determines the prediction."""
        lengths = self.prompt_length, self.chunk_length, self.context_length
        return self.soc, self.software, self.model, self.weights, self.metric, lengths, self.is_cold


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A predicted rate.

    Attributes:
        rate: the prediction; the middle of `ends` on a logarithmic scale for a cold run or an unknown context.
        ends: rates at the ends of the operating points that the source allows.
        simulation: the simulated warm run.
    """

    rate: float
    ends: tuple[float, float]
    simulation: Simulation


def read_figures() -> list[Figure]:
    """Return the figures of all rows: up to two of each, prefill and decode."""
    found: list[Figure] = []
    with FILE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            prompt = int(row["prompt"] or 128)
            ends = int(row["prompt_low"] or prompt), int(row["prompt_high"] or prompt)
            found += [
                Figure(
                    id=row["id"],
                    system=row["system"],
                    soc=row["soc"],
                    model=row["model"],
                    weights=row["format"],
                    on=row["on"],  # type: ignore[arg-type]
                    metric=metric,
                    published=float(row[metric]),
                    prompt_length=prompt,
                    prompt_range=ends,
                    is_cold=row["cold"] == "yes" and metric == "prefill",
                    chunk_length=int(row["chunk"]),
                    context_length=int(row["context"]),
                    context_range=(int(row["context_low"] or row["context"]), int(row["context"])),
                    excluded=row["excluded"],
                    source=row["source"],
                )
                for metric in ("prefill", "decode")
                if row[metric]
            ]
    return found


STORAGE_GB_PER_S = 4.2
"""Sequential reading from UFS 4.0, by JEDEC."""


def predict(figure: Figure, device: DeviceProfile) -> Prediction:
    """Predict a figure."""
    simulation = run(figure, device)
    rate = simulation.tokens_per_s
    ends = rate, rate
    if figure.is_cold:
        stored = sum(weight_bytes(_plan(figure.model, figure.on), find_scheme(SCHEMES[figure.weights])).values())
        cold = figure.prompt_length / (figure.prompt_length / rate + stored / (1e9 * STORAGE_GB_PER_S))
        ends = cold, rate
        rate = math.sqrt(cold * rate)
    elif len(set(figure.context_range)) > 1:
        rates = [run(replace(figure, context_length=length), device).tokens_per_s for length in figure.context_range]
        ends = min(rates), max(rates)
        rate = math.sqrt(ends[0] * ends[1])
    elif figure.metric == "prefill" and len(set(figure.prompt_range)) > 1:
        ends = tuple(sorted(run(figure, device, length).tokens_per_s for length in figure.prompt_range))  # type: ignore[assignment]
    return Prediction(rate=rate, ends=ends, simulation=simulation)


def run(figure: Figure, device: DeviceProfile, prompt_length: int | None = None) -> Simulation:
    """Simulate a figure. A token of an answer is a chunk of one row, which the NPU computes by a graph of its own."""
    is_decode = figure.metric == "decode"
    chunk = 1 if is_decode else figure.chunk_length
    return simulate(
        _plan(figure.model, figure.on),
        device,
        prompt_length=1 if is_decode else prompt_length or figure.prompt_length,
        chunk_length=chunk,
        policy="look_ahead",
        scheme="w4a16" if figure.system == HEXAGON else SCHEMES[figure.weights],
        near=_near(figure.model, _windows(figure, chunk)) if figure.on == "npu" else {},
    )


@cache
def _plan(model: str, on: str) -> Plan:
    plan = find_shape(model).plan(HEAD_ON_NPU)
    return plan.on_cpu() if on == "cpu" else plan


def _windows(figure: Figure, chunk_length: int) -> str:
    """Return the cache slots that a chunk attends to: all of the padded context, or those in use, rounded up."""
    if figure.system == HEXAGON:
        return HEXAGON_WINDOWS
    return str(max(1, figure.context_length - chunk_length))  # 1: one graph for the complete context, without a cache


@cache
def _near(model: str, windows: str) -> dict[int, Plan]:
    """Return plans with attention on the NPU, by the last position at which a chunk may begin."""
    options = EngineOptions(attention="npu", npu_window=windows)
    plan = _plan(model, "npu")
    return near_by_reach(plan, HEAD_ON_NPU, options, plan.context_length)
