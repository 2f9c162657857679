"""Subgraphs that the NPU refuses, and agreement of the table with the results of Qualcomm's compiler."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from chunkrt.backends.qnn import find_soc
from chunkrt.backends.qnn.htp_support import LINEARS, npu_support
from chunkrt.backends.qnn.library import open_session
from chunkrt.graph.plan import Node
from chunkrt.quant.scheme import BLOCK_LENGTH, LEVELS, SCHEMES, Scheme
from chunkrt.testing.random_decoders import CONFIG_IN_BLOCKS, random_decoder

STATIC = [scheme for scheme in SCHEMES.values() if scheme.is_static]
NARROW = Scheme(name="w4a8", weight_bits=4, activations="static")
ONE_SOC_OF_EACH_ARCH = {69: "SM8450", 73: "SM8550", 75: "SM8650", 79: "SM8750", 81: "SM8850"}
ACTIVATIONS = {8: (np.uint8, 128), 16: (np.uint16, 32768)}
HIDDEN = "model.layers.0.output"


@pytest.fixture(scope="module")
def plan():
    return random_decoder([], CONFIG_IN_BLOCKS).plan


@pytest.fixture(scope="module")
def odd_plan():
    """Return a plan with depths that blocks do not divide."""
    return random_decoder([]).plan


def with_node(plan, index, **changes):
    """Return the plan's static.1 with one node changed, and that node."""
    subgraph = plan.static_subgraphs[1]
    nodes = list(subgraph.nodes)
    nodes[index] = replace(nodes[index], **changes)
    return replace(subgraph, nodes=tuple(nodes)), nodes[index]


def index_of(plan, op):
    return [node.op for node in plan.static_subgraphs[1].nodes].index(op)


def assert_refused(subgraph, plan, scheme, node, *words):
    support = npu_support(subgraph, plan, scheme)
    assert not support
    assert support.node == node.name
    for word in words:
        assert word in support.reason


@pytest.mark.parametrize("scheme", STATIC, ids=lambda scheme: scheme.name)
def test_static_subgraphs_under_static_schemes_are_supported(plan, scheme):
    assert len(plan.static_subgraphs) == 3
    for subgraph in plan.static_subgraphs:
        assert npu_support(subgraph, plan, scheme)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "attention.0",
            [
                "not support chunkrt::CachedAttention of float32, int64, int64, float32",
                "place it on the CPU",
                "RMSNorm",
            ],
        ),
        ("embedding", ["not support Gather of float32, int64", "place it on the CPU"]),
    ],
)
def test_unsupported_operator_is_refused(plan, name, words):
    subgraph = next(s for s in plan.subgraphs if s.name.replace("dynamic", "attention") == name)
    assert_refused(subgraph, plan, SCHEMES["w8a16"], subgraph.nodes[0], *words)


def test_operator_of_another_domain_is_another_operator(plan):
    subgraph, node = with_node(plan, index_of(plan, "Add"), domain="elsewhere")
    assert_refused(subgraph, plan, SCHEMES["w8a16"], node, "not support elsewhere::Add of float32, float32")


def test_integer_operands_are_refused(plan):
    index = index_of(plan, "Sigmoid")
    node = plan.static_subgraphs[1].nodes[index]
    (name,) = node.inputs
    users = [n for n in plan.static_subgraphs[1].nodes if name in n.outputs]
    odd = replace(plan, tensors={**plan.tensors, name: replace(plan.tensors[name], dtype="int64")})
    words = ["Split has the int64 operand 'model.layers.0.mlp.gate'", "takes float32", "place it on the CPU"]
    assert_refused(plan.static_subgraphs[1], odd, SCHEMES["w8a16"], users[0], *words)


def test_product_of_two_computed_values_is_refused(plan):
    first = plan.static_subgraphs[1].nodes[0]
    subgraph, node = with_node(plan, 0, inputs=(first.inputs[0], HIDDEN))
    words = [f"MatMul of float32 by {HIDDEN!r}, which is computed", "place it on the CPU"]
    assert_refused(subgraph, plan, SCHEMES["w8a16"], node, *words)


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        (SCHEMES["float"], ["MatMul whose activations are float32", "use a static scheme: w8a16, w8a8, w4a16"]),
        (SCHEMES["w8a8-dynamic"], ["MatMul whose activations are measured row by row", "w8a16, w8a8, w4a16"]),
        (SCHEMES["w4a8-dynamic"], ["MatMul whose activations are measured row by row", "w8a16, w8a8, w4a16"]),
        (NARROW, ["MatMul of u8 by s4: the NPU does not support this product", "w8a16, w8a8, w4a16"]),
    ],
    ids=["float", "dynamic", "w4a8-dynamic", "w4a8"],
)
def test_other_schemes_are_refused(plan, scheme, words):
    for subgraph in plan.static_subgraphs:
        first = next(node for node in subgraph.nodes if node.op == "MatMul")
        assert_refused(subgraph, plan, scheme, first, *words)


@pytest.mark.parametrize("bits", [8, 16])
def test_float_output_is_refused(plan, bits):
    """Only the linear with such an output is refused."""
    scheme = replace(SCHEMES["w8a8" if bits == 8 else "w8a16"], float_outputs=("*.gate_up_proj.weight",))
    subgraph = plan.static_subgraphs[1]
    node = next(node for node in subgraph.nodes if node.op == "MatMul" and "gate_up_proj" in node.inputs[1])
    words = [f"MatMul of u{bits} by s8 into float32", "as many bits as its inputs", "outputs='grid'"]
    assert_refused(subgraph, plan, scheme, node, *words)
    for other in (plan.static_subgraphs[0], plan.static_subgraphs[2]):
        assert npu_support(other, plan, replace(scheme, float_outputs=("*.layers.0.mlp.gate_up_proj.weight",)))


def test_shadow_is_refused_and_its_main_half_is_supported():
    scheme = replace(SCHEMES["w8a8"], name="w8a8-shadowed", shadowed=("*",))
    plan = random_decoder([scheme], CONFIG_IN_BLOCKS).plans[scheme.name]
    shadows = [subgraph for subgraph in plan.subgraphs if subgraph.name.startswith("shadow.")]
    assert len(shadows) == 8
    for subgraph in shadows:
        (node,) = subgraph.nodes
        words = ["not support chunkrt::ShadowLinear of float32, float32", "place it on the CPU"]
        assert_refused(subgraph, plan, scheme, node, *words)
    assert all(npu_support(subgraph, plan, scheme) for subgraph in plan.static_subgraphs)


def test_depth_that_blocks_do_not_divide_is_refused(odd_plan):
    subgraph = odd_plan.static_subgraphs[0]
    node = next(node for node in subgraph.nodes if node.op == "MatMul")
    words = ["MatMul of u16 by s4 of depth 36", "blocks of 32", "use the scheme w8a16, or place it on the CPU"]
    assert_refused(subgraph, odd_plan, SCHEMES["w4a16"], node, *words)
    assert npu_support(subgraph, odd_plan, SCHEMES["w8a16"])


def test_8_bit_values_with_odd_depth_are_refused(plan):
    node = plan.static_subgraphs[1].nodes[0]
    weight = plan.tensors[node.inputs[1]]
    odd = replace(plan, tensors={**plan.tensors, weight.name: replace(weight, shape=(38, *weight.shape[1:]))})
    words = ["MatMul of u8 by s8 of depth 38", "only if 4 divides", "use the scheme w8a16, or place it on the CPU"]
    assert_refused(plan.static_subgraphs[1], odd, SCHEMES["w8a8"], node, *words)
    assert npu_support(plan.static_subgraphs[1], odd, SCHEMES["w8a16"])


@pytest.mark.parametrize("op", ["Split", "RMSNormalization"])
def test_other_axis_is_refused(plan, op):
    index = index_of(plan, op)
    attributes = plan.static_subgraphs[1].nodes[index].attributes
    subgraph, node = with_node(plan, index, attributes={**attributes, "axis": 0})
    words = [f"{op} of float32 over axis 0 of 2", "the last axis only", "place it on the CPU"]
    assert_refused(subgraph, plan, SCHEMES["w8a16"], node, *words)
    last, _ = with_node(plan, index, attributes={**attributes, "axis": 1})
    assert npu_support(last, plan, SCHEMES["w8a16"])


def test_subgraph_of_supported_nodes_is_supported(plan):
    """The refused node is the first unsupported one, not the first one."""
    add = Node(name="sum", op="Add", domain="", inputs=(HIDDEN, HIDDEN), outputs=(HIDDEN,), attributes={})
    assert npu_support(replace(plan.static_subgraphs[1], nodes=(add,)), plan, SCHEMES["float"])


def steps_off(htp, soc, activation_bits, weight_bits, *, output_bits=None, depth=64, reach=None):
    """Return the NPU's error in output steps, at most and in the mean, in one linear of integers up to `reach`.

    Integers go in and come out; the output's grid just holds the results. Also return 256 times one unit of the sum, in
    output steps.
    """
    rng = np.random.default_rng(0)
    rows, columns, output_bits = 32, 48, output_bits or activation_bits
    (in_type, in_zero), (out_type, out_zero) = ACTIVATIONS[activation_bits], ACTIVATIONS[output_bits]
    reach = reach or LEVELS[activation_bits]
    x = rng.integers(-reach, reach + 1, (rows, depth))
    most = 127 if weight_bits == 8 else 7
    w = rng.integers(-most, most + 1, (depth, columns))
    multiplier = rng.integers(1, 17, (-(-depth // BLOCK_LENGTH), columns))
    multiplier[0] = 16
    exact = x @ (w * np.repeat(multiplier, BLOCK_LENGTH, axis=0)[:depth] if weight_bits == 4 else w)
    step = np.float32(np.abs(exact).max() / LEVELS[output_bits])
    scale = multiplier.astype(np.float32) if weight_bits == 4 else np.ones(columns, np.float32)
    weight = numpy_helper.from_array(w.astype(np.int8 if weight_bits == 8 else ml_dtypes.int4), "w")
    constants = {
        "scale": scale,
        "one": np.float32(1),
        "in_zero": in_type(in_zero),
        "step": step,
        "out_zero": out_type(out_zero),
    }
    blocked = {"axis": 0, "block_size": BLOCK_LENGTH} if weight_bits == 4 else {"axis": 1}
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "one", "in_zero"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w", "scale"], ["wd"], **blocked),
        helper.make_node("MatMul", ["xd", "wd"], ["product"]),
        helper.make_node("QuantizeLinear", ["product", "step", "out_zero"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "linear",
        [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(np.dtype(in_type)), x.shape)],
        [helper.make_tensor_value_info("y", helper.np_dtype_to_tensor_dtype(np.dtype(out_type)), [rows, columns])],
        [weight, *(numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items())],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    assert weight.data_type == (TensorProto.INT8 if weight_bits == 8 else TensorProto.INT4)
    session = open_session(htp, find_soc(soc), model.SerializeToString(), options={})
    (found,) = session.run(None, {"x": (x + in_zero).astype(in_type)})
    off = found.astype(np.float64) - out_zero - np.rint(exact / step)
    return np.abs(off).max(), off.mean(), 256 / step


EVERY_ARCH = pytest.mark.parametrize(
    "soc", ONE_SOC_OF_EACH_ARCH.values(), ids=[f"v{arch}" for arch in ONE_SOC_OF_EACH_ARCH]
)


@EVERY_ARCH
@pytest.mark.parametrize(("activation_bits", "weight_bits"), sorted(LINEARS))
def test_products_in_the_table_are_within_one_step(htp, soc, activation_bits, weight_bits):
    """On v69 the matrix unit has 8 bits; its 16-bit results are less exact."""
    is_rough = (soc, activation_bits) == ("SM8450", 16)
    most, _, _ = steps_off(htp, soc, activation_bits, weight_bits)
    assert most <= (LEVELS[16] / 1000 if is_rough else 1)


@pytest.mark.sampled(every=4)
@EVERY_ARCH
@pytest.mark.parametrize("weight_bits", [8, 4])
@pytest.mark.parametrize("reach", [4000, 250, 20])
def test_sums_of_16_bits_lose_their_last_8(htp, soc, weight_bits, reach):
    """Smaller inputs on their grid give a larger error in output steps; it is nearly always downwards."""
    most, mean, dropped = steps_off(htp, soc, 16, weight_bits, reach=reach)
    if soc == "SM8450":
        assert most <= 2 * (1 + dropped) + LEVELS[16] / 1000
    else:
        assert most <= 1 + dropped
        assert -0.6 * (1 + dropped) < mean < -0.4 * dropped


@pytest.mark.parametrize("soc", ["SM8450", "SM8650", "SM8850"])
@pytest.mark.parametrize(
    ("bits", "case"),
    [
        ((8, 8), {"output_bits": 16}),
        ((16, 8), {"output_bits": 8}),
        ((8, 4), {}),
    ],
    ids=["u8-to-u16", "u16-to-u8", "u8-by-s4"],
)
def test_compiler_refuses_products_outside_the_table(htp, soc, bits, case):
    with pytest.raises(Exception, match=r"fallback to CPU EP has been explicitly disabled"):
        steps_off(htp, soc, *bits, **case)


@pytest.mark.parametrize("soc", ["SM8450", "SM8650", "SM8850"])
def test_depth_that_blocks_do_not_divide_is_computed_wrongly(htp, soc):
    most, _, _ = steps_off(htp, soc, 16, 4, depth=48)
    assert most > 10000
