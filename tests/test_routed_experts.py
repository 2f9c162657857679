"""A mixture of experts: each row gets what its few best experts make of it, on every backend that has them."""

from types import SimpleNamespace

import numpy as np
import pytest

from chunkrt.backends.native import NativeBackend
from chunkrt.backends.onnxrt import OnnxRuntimeBackend
from chunkrt.backends.reference import ReferenceBackend
from chunkrt.graph import ops
from chunkrt.graph.partition import partition
from chunkrt.graph.tracing import current_trace, trace
from chunkrt.quant.scheme import SCHEMES

ROWS, WIDTH, INNER, EXPERTS, TOP = 9, 6, 4, 5, 2


def plan_of(*, norm_topk_prob):
    def decoder(token_ids, logit_rows):
        record = current_trace()
        tables = {"hidden": (ROWS, WIDTH), "router": (ROWS, EXPERTS)}
        hidden, router = (
            ops.gather_rows(record.weight(n, shape), token_ids, name=f"{n}_rows") for n, shape in tables.items()
        )
        gate_up = record.weight("gate_up", (EXPERTS, WIDTH, 2 * INNER))
        down = record.weight("down", (EXPERTS, INNER, WIDTH))
        mixed = ops.routed_experts(hidden, router, gate_up, down, top_k=TOP, norm_topk_prob=norm_topk_prob)
        return ops.gather_rows(mixed, logit_rows, name="logits")

    return partition(trace(decoder), family="operator")


def draw():
    rng = np.random.default_rng(0)
    shapes = {"hidden": (ROWS, WIDTH), "router": (ROWS, EXPERTS), "gate_up": (EXPERTS, WIDTH, 2 * INNER)}
    shapes["down"] = (EXPERTS, INNER, WIDTH)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def row_by_row(weights, norm_topk_prob):
    """In float64, as the definition reads."""
    hidden, router, gate_up, down = (weights[n].astype(np.float64) for n in ("hidden", "router", "gate_up", "down"))
    output = np.zeros_like(hidden)
    for row in range(ROWS):
        probabilities = np.exp(router[row]) / np.exp(router[row]).sum()
        picked = sorted(range(EXPERTS), key=lambda expert: -probabilities[expert])[:TOP]
        total = probabilities[picked].sum() if norm_topk_prob else 1
        for expert in picked:
            gate, up = np.split(hidden[row] @ gate_up[expert], 2)
            output[row] += probabilities[expert] / total * ((gate / (1 + np.exp(-gate)) * up) @ down[expert])
    return output


@pytest.mark.parametrize("backend", [ReferenceBackend, OnnxRuntimeBackend])
@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_a_row_gets_the_weighted_sum_of_its_best_experts(norm_topk_prob, backend):
    plan, weights = plan_of(norm_topk_prob=norm_topk_prob), draw()
    (subgraph,) = (s for s in plan.subgraphs if any(node.op == "RoutedExperts" for node in s.nodes))
    assert subgraph.device == "cpu"
    store = SimpleNamespace(array=weights.__getitem__)
    executable = backend().compile(subgraph, plan, ROWS, SCHEMES["float"], store)
    (name,) = subgraph.outputs
    outputs = {name: np.empty((ROWS, WIDTH), np.float32)}
    executable.run({"input_ids": np.arange(ROWS)}, outputs)
    expected = row_by_row(weights, norm_topk_prob)
    np.testing.assert_allclose(outputs[name], expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def test_native_names_what_it_does_not_have():
    plan = plan_of(norm_topk_prob=True)
    (subgraph,) = (s for s in plan.subgraphs if any(node.op == "RoutedExperts" for node in s.nodes))
    support = NativeBackend(threads=1).supports(subgraph, plan, SCHEMES["w8a8-dynamic"])
    assert not support
    assert "chunkrt::RoutedExperts" in support.reason
