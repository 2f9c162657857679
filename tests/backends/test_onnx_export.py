"""The decoder, complete and in parts, is valid ONNX for any ONNX tool."""

from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from chunkrt.backends.onnx.functions import expansion, has_expansion
from chunkrt.backends.onnx.plan_models import PAST, to_onnx
from chunkrt.backends.onnx.scheme_models import initializer_values, quantize_linears
from chunkrt.backends.reference import ReferenceBackend
from chunkrt.graph.ops import OPSET
from chunkrt.graph.plan import DOMAIN, Tensor
from chunkrt.quant.scheme import SCHEMES
from chunkrt.testing.conformance import TRIED
from chunkrt.testing.random_decoders import random_decoder

DECODER = random_decoder(TRIED)
PLAN = DECODER.plan
PARTS = {s.name: (s,) for s in PLAN.subgraphs}


def with_weights(subgraphs, scheme):
    """Return an ONNX model that holds its weights."""
    plan, scheme = DECODER.plans[scheme.name], DECODER.schemes[scheme.name]
    model = to_onnx(plan, subgraphs, name="part")
    quantize_linears(model, scheme)
    values = initializer_values(plan, scheme, DECODER.weights[scheme.name], list(model.graph.initializers))
    for name, value in model.graph.initializers.items():
        value.const_value = ir.tensor(values[name], name=name)
    return ir.to_proto(model)


@pytest.mark.parametrize("part", ["alone", "together"])
@pytest.mark.parametrize("scheme", TRIED, ids=lambda scheme: scheme.name)
def test_models_are_valid(part, scheme):
    subgraphs = DECODER.plans[scheme.name].subgraphs
    for model in [with_weights(s, scheme) for s in ([[s] for s in subgraphs] if part == "alone" else [subgraphs])]:
        check(model)


def check(model):
    onnx.checker.check_model(model, full_check=True)
    assert {o.domain: o.version for o in model.opset_import} == {"": OPSET, DOMAIN: 1}
    assert {n.op_type for n in model.graph.node if n.domain} <= {f.name for f in model.functions}


@pytest.mark.parametrize("scheme", TRIED, ids=lambda scheme: scheme.name)
def test_exported_decoder_runs(scheme):
    """Run directly on ONNX Runtime, first the prompt and then one more token on the resulting caches.

    Under a static scheme a value may move to the neighbouring step, with the corresponding difference.
    """
    model = with_weights(DECODER.plans[scheme.name].subgraphs, scheme)
    session = ort.InferenceSession(model.SerializeToString())
    outputs = [output.name for output in session.get_outputs()]
    assert outputs == [PLAN.output, *(f"{tensor.name}.present" for tensor in PLAN.state_tensors)]
    tokens = np.random.default_rng(0).integers(0, PLAN.vocab_size, 12)

    def feed(position, count, caches):
        rows = np.arange(count)
        return {"input_ids": tokens[position:][:count], "position": np.array([position]), "logit_rows": rows, **caches}

    empty = {t.name: np.zeros((t.shape[0], 0, t.shape[2]), np.float32) for t in PLAN.state_tensors}
    at_once, *_ = session.run(outputs, feed(0, 12, empty))
    first, *caches = session.run(outputs, feed(0, 11, empty))
    assert {cache.shape for cache in caches} == {(2, 11, 10)}
    names = [tensor.name for tensor in PLAN.state_tensors]
    last, *_ = session.run(outputs, feed(11, 1, dict(zip(names, caches, strict=True))))
    allowed = 2.0**-6 if scheme.is_static else 1e-5
    np.testing.assert_allclose(np.vstack([first, last]), at_once, rtol=0, atol=allowed * np.abs(at_once).max())


def test_subgraph_has_the_values_that_cross_its_boundary():
    (dynamic,) = PARTS["dynamic.0"]
    graph = to_onnx(PLAN, [dynamic], name="dynamic.0").graph
    assert [value.name for value in graph.inputs] == [*dynamic.inputs, *dynamic.state]
    assert [value.name for value in graph.outputs] == [*dynamic.outputs, *(f"{n}.present" for n in dynamic.state)]
    cache = graph.inputs[-1]
    assert [str(d) for d in cache.shape] == ["2", PAST, "10"]


def test_quantised_linears_hold_int8_weights_and_their_scales():
    scheme = SCHEMES["w8a8-dynamic"]
    model = with_weights(PLAN.subgraphs, scheme)
    assert not [n for n in model.graph.node if n.op_type == "MatMul"]
    linears = [n for n in model.graph.node if n.op_type == "DynamicLinear"]
    assert len(linears) == 2 * 4 + 1
    types = {i.name: i.data_type for i in model.graph.initializer}
    for node in linears:
        assert types[node.input[1]] == onnx.TensorProto.INT8
        assert node.input[2] == f"{node.input[1]}.scale"


@pytest.mark.parametrize("scheme", [s for s in TRIED if s.is_static], ids=lambda scheme: scheme.name)
def test_static_linears_are_standard_onnx(scheme):
    """Their form is tested in test_quant_qdq.py. A shadow is our operator, and its definition is included."""
    model = with_weights(DECODER.plans[scheme.name].subgraphs, scheme)
    ours = {n.op_type for n in model.graph.node if n.domain}
    shadow = {"ShadowLinear"} if scheme.shadowed else set()
    parts = {"SplitHeads", "FindPlaces", "Rope", "FindVisible", "JoinHeads"}
    assert ours == {"CachedAttention"} | shadow
    assert {f.name for f in model.functions} == ours | parts


def test_float_scheme_leaves_linears_unchanged():
    model = to_onnx(PLAN, PLAN.subgraphs, name="decoder")
    before = [(n.domain, n.op_type) for n in model.graph]
    quantize_linears(model, SCHEMES["float"])
    assert [(n.domain, n.op_type) for n in model.graph] == before


@pytest.mark.parametrize(
    ("rotary_dim", "soft_cap", "has_sinks", "op"),
    [
        (4, 0.0, False, "CachedAttention"),
        (10, 0.0, False, "CachedAttention"),
        (4, 0.75, False, "CachedAttention"),
        (10, 0.0, True, "RawKeyAttention"),
        (10, 0.75, True, "CachedAttention"),
    ],
)
def test_expansion_of_attention_equals_the_reference(rotary_dim, soft_cap, has_sinks, op):
    """Cases include a partially rotated head."""
    (dynamic,) = PARTS["dynamic.0"]
    (node,) = dynamic.nodes
    attributes = {**node.attributes, "rotary_dim": rotary_dim, **({"soft_cap": soft_cap} if soft_cap else {})}
    added = ("sinks",) * has_sinks
    node = replace(node, op=op, attributes=attributes, inputs=(*node.inputs, *added))
    subgraph = replace(dynamic, nodes=(node,), weights=(*dynamic.weights, *added))
    sinks = Tensor(name="sinks", dtype="float32", shape=(4,), kind="weight")
    plan = replace(PLAN, subgraphs=(subgraph,), output=subgraph.outputs[0], tensors={**PLAN.tensors, sinks.name: sinks})
    rng = np.random.default_rng(0)
    angles = rng.random((64, rotary_dim // 2)) * 6
    tables = {"model.rope.cos": np.cos(angles).astype(np.float32), "model.rope.sin": np.sin(angles).astype(np.float32)}
    tables["sinks"] = rng.standard_normal(4).astype(np.float32)
    caches = {name: rng.standard_normal((2, 20, 10)).astype(np.float32) for name in subgraph.state}
    inputs = {subgraph.inputs[0]: rng.standard_normal((7, 80)).astype(np.float32), "position": np.array([9])}

    model = to_onnx(plan, [subgraph], name="attention")
    for name, value in model.graph.initializers.items():
        value.shape = ir.Shape(tables[name].shape)
        value.const_value = ir.tensor(tables[name], name=name)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString())
    by_onnx, *_ = session.run(None, inputs | {name: cache[:, :9] for name, cache in caches.items()})

    class Weights:
        array = staticmethod(tables.__getitem__)

    executable = ReferenceBackend().compile(subgraph, plan, 8, SCHEMES["float"], Weights())
    by_reference = np.empty((7, 40), np.float32)
    executable.run(inputs | caches, {subgraph.outputs[0]: by_reference})
    np.testing.assert_allclose(by_onnx, by_reference, rtol=0, atol=20 * 2.0**-23 * np.abs(by_reference).max())


def test_expansions_are_fresh_copies():
    assert expansion("CachedAttention") is not expansion("CachedAttention")
    assert has_expansion(DOMAIN, "CachedAttention")
    assert not has_expansion("", "CachedAttention")
    assert not has_expansion(DOMAIN, "Attention")
    with pytest.raises(KeyError):
        expansion("Attention")
