"""The conformance suite notices what static linears get wrong."""

import numpy as np
import pytest

from chunkrt.backends.reference import ReferenceBackend
from chunkrt.testing import ConformanceError, check_backend


class StaticLinear:
    """A static linear in int64, of which others get one thing wrong."""

    fixed_length = None

    def __init__(self, subgraph, scheme, weights):
        self.name = subgraph.nodes[0].inputs[1]
        self.bits = scheme.activation_bits_of(self.name)
        self.integers, self.scale = weights.linear(self.name)
        self.input_step, self.output_step = (weights.array(self.name + s) for s in (".input_step", ".output_step"))

    def run(self, inputs, outputs):
        ((x,), (out,)) = inputs.values(), outputs.values()
        steps = self.saturate(self.round(x / self.input_step)).astype(np.int64)
        result = self.multiply(steps, self.integers.astype(np.int64)) * (self.input_step * self.scale)
        out[...] = self.saturate(np.rint(result / self.output_step)) * self.output_step

    round = staticmethod(np.rint)
    multiply = staticmethod(np.matmul)

    def saturate(self, steps):
        levels = {8: 127, 16: 127 * 257}[self.bits]
        return steps.clip(-levels, levels)


class OwnStaticLinears(ReferenceBackend):
    """The reference, but for static linears that stand alone."""

    name = "own"
    linear = StaticLinear

    def compile(self, subgraph, plan, chunk_length, scheme, weights):
        if scheme.is_static and [node.op for node in subgraph.nodes] == ["MatMul"]:
            return self.linear(subgraph, scheme, weights)
        return super().compile(subgraph, plan, chunk_length, scheme, weights)


WRONG = []


def wrong(linear):
    """Register a linear that breaks the clause."""
    WRONG.append(linear)
    return linear


@wrong
class RoundsGridTiesAway(StaticLinear):
    def round(self, steps):
        return np.trunc(steps + np.copysign(0.5, steps))


@wrong
class WrapsAround(StaticLinear):
    """What lies beyond the integers' type comes back at its other end."""

    def saturate(self, steps):
        return steps.astype(f"int{self.bits}").astype(np.float64)


@wrong
class DoesNotSaturate(StaticLinear):
    def saturate(self, steps):
        return steps


@wrong
class SaturatesSumsOfPairs(StaticLinear):
    """As `vpmaddubsw` does: unsigned activations by signed weights, two products to a signed 16-bit sum."""

    def multiply(self, steps, integers):
        if self.bits == 16:
            return steps @ integers
        products = (steps + 128)[:, :, None] * integers
        pairs = (products[:, 0::2] + products[:, 1::2]).clip(-(2**15), 2**15 - 1)
        return pairs.sum(axis=1) - 128 * integers.sum(axis=0)


@wrong
class DropsTheLowDigit(StaticLinear):
    def multiply(self, steps, integers):
        return (steps if self.bits == 8 else steps // 256 * 256) @ integers


@wrong
class SumsInFloat16(StaticLinear):
    def multiply(self, steps, integers):
        return (steps @ integers / 4096).astype(np.float16).astype(np.float64) * 4096


def test_linears_in_int64_conform():
    check_backend(OwnStaticLinears())


@pytest.mark.parametrize("linear", WRONG, ids=lambda linear: linear.__name__)
def test_what_a_linear_gets_wrong_is_noticed(linear):
    backend = OwnStaticLinears()
    backend.linear = linear
    with pytest.raises(ConformanceError) as raised:
        check_backend(backend)
    assert raised.value.clause == "linears"
