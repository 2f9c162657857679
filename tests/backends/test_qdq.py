"""Static linears in QDQ form compute the same as the reference, on an evaluator that shares no code with ours."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from chunkrt.backends.onnx.plan_models import to_onnx
from chunkrt.backends.onnx.qdq import qdq_values
from chunkrt.backends.onnx.scheme_models import initializer_values, quantize_linears
from chunkrt.graph.plan import linear_nodes
from chunkrt.testing.conformance import TRIED
from chunkrt.testing.exact_linear import exact_linears, exact_shadow
from chunkrt.testing.random_decoders import CONFIG, CONFIG_IN_BLOCKS, random_decoder

STATIC = [scheme for scheme in TRIED if scheme.is_static]
DECODERS = {"odd": random_decoder(STATIC, CONFIG), "in blocks": random_decoder(STATIC, CONFIG_IN_BLOCKS)}
by_decoder = pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS)
by_scheme = pytest.mark.parametrize("scheme", STATIC, ids=lambda scheme: scheme.name)


def onnx_model(plan, subgraph, scheme, weights):
    model = to_onnx(plan, [subgraph], name="part")
    quantize_linears(model, scheme)
    values = initializer_values(plan, scheme, weights, list(model.graph.initializers))
    for name, value in model.graph.initializers.items():
        value.const_value = ir.tensor(values[name], name=name)
    return ir.to_proto(model)


@by_decoder
@by_scheme
def test_every_linear_has_quantised_input_and_output(decoder, scheme):
    plan = decoder.plans[scheme.name]
    for subgraph in plan.subgraphs:
        model = onnx_model(plan, subgraph, scheme, decoder.weights[scheme.name])
        onnx.checker.check_model(model, full_check=True)
        made_by = {output: node for node in model.graph.node for output in node.output}
        used_by = {name: node for node in model.graph.node for name in node.input}
        types = {i.name: i.data_type for i in model.graph.initializer}
        for node in (n for n in model.graph.node if n.op_type == "MatMul"):
            left, right = (made_by[name] for name in node.input)
            weight = right.input[0]
            unsigned = onnx.TensorProto.UINT8 if scheme.activation_bits_of(weight) == 8 else onnx.TensorProto.UINT16
            assert types[weight] == (
                onnx.TensorProto.INT4 if scheme.weight_bits_of(weight) == 4 else onnx.TensorProto.INT8
            )
            arriving, leaving = made_by[left.input[0]], used_by.get(node.output[0])
            assert [left.op_type, right.op_type] == ["DequantizeLinear"] * 2
            before = made_by.get(arriving.input[0])
            is_kept = before is not None and (before.op_type, before.input[-1]) == ("Max", f"{weight}.input_lowest")
            assert is_kept == scheme.is_shadowed(weight)
            if scheme.has_float_output(weight):
                assert leaving is None or leaving.op_type not in ("QuantizeLinear", "Mul")
                assert f"{weight}.output_step" not in types
                assert (arriving.op_type, types[arriving.input[2]]) == ("QuantizeLinear", unsigned)
                continue
            for quantize in (arriving, leaving):
                assert quantize.op_type == "QuantizeLinear"
                assert types[quantize.input[2]] == unsigned
            back = used_by[leaving.output[0]]
            assert back.op_type == "DequantizeLinear"
            if scheme.has_column_grids(weight):
                by_column = used_by[back.output[0]]
                assert (by_column.op_type, by_column.input[1]) == ("Mul", f"{weight}.column_limit")


@by_decoder
@by_scheme
def test_subgraph_keeps_its_inputs_and_outputs(decoder, scheme):
    plan = decoder.plans[scheme.name]
    for subgraph in plan.static_subgraphs:
        model = onnx_model(plan, subgraph, scheme, decoder.weights[scheme.name])
        assert [value.name for value in model.graph.input] == list(subgraph.inputs)
        assert [value.name for value in model.graph.output] == list(subgraph.outputs)


@by_decoder
@by_scheme
def test_weights_equal_those_of_the_store(decoder, scheme):
    """They are dequantised as ONNX defines it, in float64."""
    weights = decoder.weights[scheme.name]
    for name in linear_nodes(decoder.plan):
        values = qdq_values(name, scheme, weights)
        integers, scale = weights.linear(name)
        given = values[f"{name}.scale"].astype(np.float64)
        if scheme.weight_bits_of(name) == 4:
            assert values[name].dtype.name == "int4"
            given = given.repeat(32, axis=0)[: len(integers)]
            integer_range = values[name].astype(int).min(), values[name].astype(int).max()
            assert integer_range[0] == -8
            assert integer_range[1] <= 7
        found = values[name].astype(np.float64) * given * values.get(f"{name}.column_limit", 1.0)
        np.testing.assert_allclose(found, integers * scale.astype(np.float64), rtol=2.0**-22)


@by_decoder
@by_scheme
def test_linear_is_within_a_step_of_exact_arithmetic(decoder, scheme):
    plan, weights = decoder.plans[scheme.name], decoder.weights[scheme.name]
    for node in linear_nodes(plan).values():
        for case in exact_linears(node, plan, scheme, weights, 6):
            model = onnx_model(case.plan, case.subgraph, scheme, case.weights)
            (found,) = ReferenceEvaluator(model).run(None, {case.subgraph.inputs[0]: case.values})
            assert (case.exact.least <= found).all()
            assert (found <= case.exact.most).all()


@by_decoder
def test_shadow_equals_exact_arithmetic(decoder):
    """Its step and scales are those of the store, regardless of the main half's."""
    (scheme,) = (scheme for scheme in STATIC if scheme.shadowed == ("*",))
    plan, weights = decoder.plans[scheme.name], decoder.weights[scheme.name]
    shadows = [node for subgraph in plan.subgraphs for node in subgraph.nodes if node.op == "ShadowLinear"]
    assert len(shadows) == 8
    for shadow in shadows:
        case = exact_shadow(shadow, plan, weights, 6)
        model = onnx_model(case.plan, case.subgraph, scheme, case.weights)
        (found,) = ReferenceEvaluator(model).run(None, {case.subgraph.inputs[0]: case.values})
        assert (case.exact.least <= found).all()
        assert (found <= case.exact.most).all()
        assert (found[-1] == 0).all()
