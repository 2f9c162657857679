"""Activations and layer norms on every backend, compared with their definitions in float64."""

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from native_isas import isa_parameters

from chunkrt.backends.native.backend import NativeBackend
from chunkrt.backends.onnx.onnxrt import OnnxRuntimeBackend
from chunkrt.backends.reference import ReferenceBackend
from chunkrt.graph import ops
from chunkrt.graph.ops import current_trace, trace
from chunkrt.graph.partition import partition
from chunkrt.quant.scheme import SCHEMES

ROWS, WIDTH = 9, 37
BACKENDS = [ReferenceBackend, OnnxRuntimeBackend, partial(NativeBackend, threads=2)]
PARAMETERS = np.float32([0.8, 1.3, 0.5, -1e-6])
"""Parameters of xIELU; the last is the limit of its negative part."""
rng = np.random.default_rng(3)
WEIGHTS = {
    "hidden": np.concatenate([rng.standard_normal((ROWS - 1, WIDTH)) * 6, np.zeros((1, WIDTH))]).astype(np.float32),
    "parameters": PARAMETERS,
    "weight": rng.standard_normal(WIDTH).astype(np.float32),
    "bias": rng.standard_normal(WIDTH).astype(np.float32),
}
EPSILON = 1e-5


def xielu(x):
    a_p, a_n, b, e = PARAMETERS.astype(np.float64)
    return np.where(x > 0, a_p * x * x, a_n * (np.expm1(np.minimum(x, e)) - x)) + b * x


def layer_norm(x):
    centred = x - x.mean(axis=1, keepdims=True)
    deviation = np.sqrt(np.mean(centred**2, axis=1, keepdims=True) + EPSILON)
    return centred / deviation * WEIGHTS["weight"] + WEIGHTS["bias"]


def of_weights(apply, *names, **options):
    return lambda x: apply(x, *(current_trace().weight(n, WEIGHTS[n].shape) for n in names), **options)


CASES = {
    "gelu": (ops.gelu, lambda x: x * np.vectorize(math.erfc)(-x / 2**0.5) / 2),
    "quick_gelu": (ops.quick_gelu, lambda x: x / (1 + np.exp(-1.702 * x))),
    "thresholded_relu": (lambda x: ops.thresholded_relu(x, 0.75), lambda x: np.where(x > 0.75, x, 0)),
    "xielu": (of_weights(ops.xielu, "parameters"), xielu),
    "layer_norm": (of_weights(ops.layer_normalization, "weight", "bias", epsilon=EPSILON), layer_norm),
}


def plan_of(apply):
    def decoder(token_ids, logit_rows):
        table = current_trace().weight("hidden", (ROWS, WIDTH))
        return ops.gather_rows(apply(ops.gather_rows(table, token_ids)), logit_rows, name="logits")

    return partition(trace(decoder), family="operator")


def run(backend, apply):
    """Run all subgraphs before the last one, and return the value that it reads."""
    plan, values = plan_of(apply), {"input_ids": np.arange(ROWS)}
    store = SimpleNamespace(array=WEIGHTS.__getitem__)
    for subgraph in plan.subgraphs[:-1]:
        executable = backend.compile(subgraph, plan, ROWS, SCHEMES["float"], store)
        (output,) = subgraph.outputs
        values[output] = np.full((ROWS, plan.tensors[output].shape[1]), np.nan, np.float32)
        executable.run({each: values[each] for each in subgraph.inputs}, {output: values[output]})
    return values[output]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_operator_equals_its_definition(name, backend):
    x = WEIGHTS["hidden"].astype(np.float64)
    apply, definition = CASES[name]
    np.testing.assert_allclose(run(backend(), apply), definition(x), rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("isa", isa_parameters())
@pytest.mark.parametrize("name", CASES)
def test_native_operator_has_the_same_bits_on_every_instruction_set(name, isa, monkeypatch):
    apply, _ = CASES[name]
    expected = run(NativeBackend(threads=1), apply)
    monkeypatch.setenv("CHUNKRT_FORCE_ISA", isa)
    np.testing.assert_array_equal(run(NativeBackend(threads=2), apply), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gate_with_exact_gelu_equals_its_definition(backend):
    def gated(x):
        gate, up = ops.split_columns(ops.concat([x, x]), names=["gate", "up"])
        return ops.mul(ops.gelu(gate), up, name="gated")

    x = WEIGHTS["hidden"].astype(np.float64)
    expected = CASES["gelu"][1](x) * x
    np.testing.assert_allclose(run(backend(), gated), expected, rtol=4e-6, atol=1e-5)
