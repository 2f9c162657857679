"""Static linears in QDQ form mean what the reference computes, on an evaluator that shares no code with ours."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from chunkrt.graph.export import to_onnx
from chunkrt.quant.linears import initializer_values, quantize_linears
from chunkrt.quant.qdq import qdq_values
from chunkrt.quant.scheme import SCHEMES
from chunkrt.quant.weights import linear_nodes
from chunkrt.testing.decoder import CONFIG, CONFIG_IN_BLOCKS, random_decoder
from chunkrt.testing.exact_linear import exact_linears

STATIC = [scheme for scheme in SCHEMES.values() if scheme.is_static]
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
def test_every_linear_multiplies_what_came_through_a_grid_and_leaves_through_one(decoder, scheme):
    for subgraph in decoder.plan.subgraphs:
        model = onnx_model(decoder.plan, subgraph, scheme, decoder.weights[scheme.name])
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
            leaving = used_by[node.output[0]]
            for quantize in (made_by[left.input[0]], leaving):
                assert quantize.op_type == "QuantizeLinear"
                assert types[quantize.input[2]] == unsigned
            back = used_by[leaving.output[0]]
            assert [left.op_type, right.op_type, back.op_type] == ["DequantizeLinear"] * 3
            if scheme.has_column_grids(weight):
                by_column = used_by[back.output[0]]
                assert (by_column.op_type, by_column.input[1]) == ("Mul", f"{weight}.column_limit")


@by_decoder
@by_scheme
def test_a_subgraph_keeps_its_inputs_and_outputs(decoder, scheme):
    for subgraph in decoder.plan.static_subgraphs:
        model = onnx_model(decoder.plan, subgraph, scheme, decoder.weights[scheme.name])
        assert [value.name for value in model.graph.input] == list(subgraph.inputs)
        assert [value.name for value in model.graph.output] == list(subgraph.outputs)


@by_decoder
@by_scheme
def test_weights_are_what_the_store_holds(decoder, scheme):
    """Dequantised as ONNX says, by float64."""
    weights = decoder.weights[scheme.name]
    for name in linear_nodes(decoder.plan):
        values = qdq_values(name, scheme, weights)
        integers, scale = weights.linear(name)
        given = values[f"{name}.scale"].astype(np.float64)
        if scheme.weight_bits_of(name) == 4:
            assert values[name].dtype.name == "int4"
            given = given.repeat(32, axis=0)[: len(integers)]
            assert np.abs(values[name].astype(int)).max() == 7
        found = values[name].astype(np.float64) * given * values.get(f"{name}.column_limit", 1.0)
        np.testing.assert_allclose(found, integers * scale.astype(np.float64), rtol=2.0**-22)


@by_decoder
@by_scheme
def test_a_linear_alone_is_within_a_step_of_exact_arithmetic(decoder, scheme):
    weights = decoder.weights[scheme.name]
    for node in linear_nodes(decoder.plan).values():
        for case in exact_linears(node, decoder.plan, scheme, weights, 6):
            model = onnx_model(case.plan, case.subgraph, scheme, case.weights)
            (found,) = ReferenceEvaluator(model).run(None, {case.subgraph.inputs[0]: case.values})
            assert (case.exact.least <= found).all()
            assert (found <= case.exact.most).all()
