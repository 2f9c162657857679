"""The conformance suite detects errors of static and dynamic linears, and of their shadows."""

import numpy as np
import pytest

from chunkrt.backends.reference import ReferenceBackend
from chunkrt.quant.arithmetic import quantize_rows
from chunkrt.testing import ConformanceError
from chunkrt.testing.conformance import check_linears


class StaticLinear:
    """A static linear in int64; subclasses each have one error."""

    fixed_length = None

    def __init__(self, subgraph, scheme, weights):
        self.name = subgraph.nodes[0].inputs[1]
        self.bits = scheme.activation_bits_of(self.name)
        self.integers, self.scale = weights.linear(self.name)
        self.input_step = weights.array(self.name + ".input_step")
        has_grid = not scheme.has_float_output(self.name)
        self.output_step = weights.array(self.name + ".output_step") if has_grid else None

    def run(self, inputs, outputs):
        ((x,), (out,)) = inputs.values(), outputs.values()
        steps = self.saturate(self.round(x / self.input_step)).astype(np.int64)
        result = self.multiply(steps, self.integers.astype(np.int64)) * (self.input_step * self.scale)
        out[...] = result if self.output_step is None else self.to_grid(result)

    def to_grid(self, result):
        return self.saturate(np.rint(result / self.output_step)) * self.output_step

    round = staticmethod(np.rint)
    multiply = staticmethod(np.matmul)

    def saturate(self, steps):
        levels = {8: 127, 16: 127 * 257}[self.bits]
        return steps.clip(-levels, levels)


def is_alone(subgraph, op):
    """Return True for a subgraph that the suite made of a single node."""
    return subgraph.name.startswith("linear ") and subgraph.nodes[0].op == op


class OwnStaticLinears(ReferenceBackend):
    """The reference, except for static linears that the suite tests alone."""

    name = "own"
    linear = StaticLinear

    def compile(self, subgraph, plan, chunk_length, scheme, weights):
        if scheme.is_static and is_alone(subgraph, "MatMul"):
            return self.linear(subgraph, scheme, weights)
        return super().compile(subgraph, plan, chunk_length, scheme, weights)


class RoundsGridTiesAway(StaticLinear):
    def round(self, steps):
        return np.trunc(steps + np.copysign(0.5, steps))


class WrapsAround(StaticLinear):
    """Overflow of the integers' type wraps around."""

    def saturate(self, steps):
        return steps.astype(f"int{self.bits}").astype(np.float64)


class DoesNotSaturate(StaticLinear):
    def saturate(self, steps):
        return steps


class SaturatesSumsOfPairs(StaticLinear):
    """Like `vpmaddubsw`: unsigned activations by signed weights, two products to a signed 16-bit sum."""

    def multiply(self, steps, integers):
        if self.bits == 16:
            return steps @ integers
        products = (steps + 128)[:, :, None] * integers
        pairs = (products[:, 0::2] + products[:, 1::2]).clip(-(2**15), 2**15 - 1)
        return pairs.sum(axis=1) - 128 * integers.sum(axis=0)


class DropsTheLowDigit(StaticLinear):
    def multiply(self, steps, integers):
        return (steps if self.bits == 8 else steps // 256 * 256) @ integers


class SumsInFloat16(StaticLinear):
    def multiply(self, steps, integers):
        return (steps @ integers / 4096).astype(np.float16).astype(np.float64) * 4096


class HasACoarserGrid(StaticLinear):
    def to_grid(self, result):
        return np.rint(result / (4 * self.output_step)) * 4 * self.output_step


class GivesAGridWhereFloatIsWanted(StaticLinear):
    def run(self, inputs, outputs):
        super().run(inputs, outputs)
        if self.output_step is None:
            ((out),) = outputs.values()
            step = np.abs(out).max() / 32639
            out[...] = np.rint(out / step) * step


class GoesOneStepBeyondTheLastLevel(StaticLinear):
    """With an unsigned range; a shadow counts from the last level."""

    def saturate(self, steps):
        return steps.clip(-(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1)


class DynamicLinear:
    """A dynamic linear in float64; subclasses each have one error."""

    fixed_length = None

    def __init__(self, name, scheme, weights):
        if scheme.has_blocks(name):
            blocks = weights.blocks(name)
            parts = (np.repeat(part.T.astype(np.float64), 32, axis=0) for part in (blocks.scales, blocks.minima))
            self.matrix = self.values(blocks.integers.T.astype(np.float64), *parts)
        else:
            integers, scale = weights.linear(name)
            self.matrix = integers * scale.astype(np.float64)

    def run(self, inputs, outputs):
        ((x,), (out,)) = inputs.values(), outputs.values()
        is_outlier = self.is_outlier(x)
        integers, scale = self.quantize(np.where(is_outlier, np.float32(0), x))
        out[...] = (integers.astype(np.float64) * scale + self.taken(np.where(is_outlier, x, 0))) @ self.matrix

    def is_outlier(self, x):
        return np.abs(x) > 8 * np.abs(x).mean(axis=1, keepdims=True)

    def quantize(self, rest):
        return quantize_rows(rest)

    def taken(self, outliers):
        return outliers.astype(np.float64)

    def values(self, integers, scales, minima):
        return integers * scales + minima


class OwnDynamicLinears(ReferenceBackend):
    """The reference, except for dynamic linears that the suite tests alone: those in blocks, or the others."""

    name = "own"
    linear = DynamicLinear

    def __init__(self, *, in_blocks):
        super().__init__()
        self.in_blocks = in_blocks

    def compile(self, subgraph, plan, chunk_length, scheme, weights):
        weight = subgraph.nodes[0].inputs[1:2]
        is_own = is_alone(subgraph, "MatMul") and scheme.activations == "dynamic"
        if is_own and scheme.has_blocks(*weight) == self.in_blocks:
            return self.linear(*weight, scheme, weights)
        return super().compile(subgraph, plan, chunk_length, scheme, weights)


class KnowsNoOutliers(DynamicLinear):
    """The usual dynamic linear: the largest value of a row sets the step of all."""

    def is_outlier(self, x):
        return np.zeros(x.shape, bool)


class DropsOutliers(DynamicLinear):
    def taken(self, outliers):
        return np.zeros(outliers.shape)


class TakesOneOutlier(DynamicLinear):
    def taken(self, outliers):
        return np.where(np.arange(outliers.shape[1]) == np.abs(outliers).argmax(axis=1)[:, None], outliers, 0.0)


class TakesTheSameChannelsInEveryRow(DynamicLinear):
    """Outliers of the first row, as if they were fixed beforehand."""

    def is_outlier(self, x):
        return super().is_outlier(x[:1]).repeat(len(x), axis=0)


class RoundsRowTiesAway(DynamicLinear):
    def quantize(self, rest):
        largest = np.abs(rest).max(axis=1, keepdims=True)
        steps = rest * (127 / np.where(largest > 0, largest, 1))
        return np.trunc(steps + np.copysign(0.5, steps)), largest / 127


class LeavesTheMinimaAway(DynamicLinear):
    def values(self, integers, scales, minima):
        return integers * scales


class TakesTheScalesOfTheNextBlock(DynamicLinear):
    def values(self, integers, scales, minima):
        return integers * np.roll(scales, 32, axis=0) + minima


class SwapsTheHalvesOfBytes(DynamicLinear):
    def values(self, integers, scales, minima):
        halves = integers.reshape(-1, 2, 4, integers.shape[1])
        return halves[:, ::-1].reshape(integers.shape) * scales + minima


class RoundsToEightBits(DynamicLinear):
    """The dequantised detour that blocks avoid."""

    def values(self, integers, scales, minima):
        exact = integers * scales + minima
        step = np.abs(exact).max(axis=0) / 127
        return np.rint(exact / step) * step


WRONG_IN_BLOCKS = (LeavesTheMinimaAway, TakesTheScalesOfTheNextBlock, SwapsTheHalvesOfBytes, RoundsToEightBits)


class Shadow:
    """The shadow of a linear in float64; subclasses each have one error."""

    fixed_length = None

    def __init__(self, subgraph, weights):
        name = subgraph.nodes[0].inputs[1]
        self.integers, self.scale = weights.linear(name)
        self.step = weights.array(f"{name}.input_step").astype(np.float64)

    def run(self, inputs, outputs):
        ((x,), (out,)) = inputs.values(), outputs.values()
        out[...] = self.excess(x / self.step) * self.step @ (self.integers * self.scale.astype(np.float64))

    def excess(self, steps):
        return np.where(np.abs(np.rint(steps)) > 127, steps - steps.clip(-127, 127), 0)


class OwnShadows(ReferenceBackend):
    """The reference, except for shadows that the suite tests alone."""

    name = "own"
    linear = Shadow

    def compile(self, subgraph, plan, chunk_length, scheme, weights):
        if is_alone(subgraph, "ShadowLinear"):
            return self.linear(subgraph, weights)
        return super().compile(subgraph, plan, chunk_length, scheme, weights)


class GivesNothing(Shadow):
    def excess(self, steps):
        return np.zeros_like(steps)


class CountsFromTheThreshold(Shadow):
    def excess(self, steps):
        return steps - steps.clip(-127.5, 127.5)


class AddsWhatRoundsToTheLastLevel(Shadow):
    """127 and slightly more: the main half rounds it, and errs by that."""

    def excess(self, steps):
        return steps - steps.clip(-127, 127) + np.where(np.abs(steps) == 127, 2.0**-6, 0)


class LeavesTheTieToTheGrid(Shadow):
    def excess(self, steps):
        return np.where(np.abs(steps) > 127.5, super().excess(steps), 0)


class TakesTheWholeValue(Shadow):
    """Ignores the main half's result where it saturates."""

    def excess(self, steps):
        return np.where(np.abs(np.rint(steps)) > 127, steps, 0)


class KnowsOneSide(Shadow):
    def excess(self, steps):
        return super().excess(steps).clip(0)


class CountsFromTheLeastOfTheType(Shadow):
    def excess(self, steps):
        return super().excess(steps) + (np.rint(steps) < -127)


class LooksAtEightChannels(Shadow):
    """Only as many as a list of outlier channels has room for."""

    def excess(self, steps):
        found = super().excess(steps)
        found[:, np.argsort(-np.abs(found).max(axis=0))[8:]] = 0
        return found


class RoundsTheExcess(Shadow):
    def excess(self, steps):
        return np.rint(super().excess(steps))


BACKENDS = {
    "static": OwnStaticLinears(),
    "dynamic": OwnDynamicLinears(in_blocks=False),
    "in blocks": OwnDynamicLinears(in_blocks=True),
    "shadows": OwnShadows(),
}
WRONG = [
    (kind, error)
    for kind, backend in BACKENDS.items()
    for error in backend.linear.__subclasses__()
    if kind != "dynamic" or error not in WRONG_IN_BLOCKS
]


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_linears_in_wide_types_conform(backend):
    check_linears(backend)


@pytest.mark.parametrize(("kind", "error"), WRONG, ids=lambda value: getattr(value, "__name__", value))
def test_suite_detects_errors_of_linears(monkeypatch, kind, error):
    monkeypatch.setattr(BACKENDS[kind], "linear", error)
    with pytest.raises(ConformanceError) as raised:
        check_linears(BACKENDS[kind])
    assert raised.value.clause == ("shadows" if kind == "shadows" else "linears")
