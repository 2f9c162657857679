"""Each pass of the import alone, on graphs of a few nodes; and tensors in the forms of files."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from chunkrt.errors import ModelError, UnsupportedModelError
from chunkrt.onnx.importing.draft import Draft
from chunkrt.onnx.importing.evaluation import Evaluator
from chunkrt.onnx.importing.onnx_source import FloatTensor, OnnxSource, dequantised_tensor, n_bits_tensor
from chunkrt.onnx.importing.passes.columns import raise_columns
from chunkrt.onnx.importing.passes.elementwise import drop_identities, raise_activations, raise_constants
from chunkrt.onnx.importing.passes.embedding_and_head import pick_rows, raise_embedding
from chunkrt.onnx.importing.passes.linears import raise_integer_linears, raise_linears
from chunkrt.onnx.importing.passes.norms import raise_head_norms, raise_norms
from chunkrt.onnx.importing.projections import merge_gates
from chunkrt.onnx.importing.signature import Signature

RNG = np.random.default_rng(0)
TABLE = RNG.standard_normal((10, 32), np.float32)
WIDE = RNG.standard_normal((32, 64), np.float32)
ROW = RNG.standard_normal(32, np.float32)


def draft_of(body, **constants):
    """Make a draft from `body` in ONNX's text, from rows x [1, T, 32] of the embedding `table` to logits."""
    text = f"""<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
    decoder (int64[B, T] input_ids) => (float[B, T, V] logits) {{ x = Gather (table, input_ids) {body} }}"""
    proto = onnx.parser.parse_model(text)
    for name, values in {"table": TABLE, **constants}.items():
        proto.graph.initializer.append(numpy_helper.from_array(values, name))
    signature = Signature(exporter="test", tokens="input_ids", mask="", positions="", logits="logits")
    return Draft(
        where="small.onnx",
        model=ir.from_proto(proto),
        evaluator=Evaluator(proto, signature, 128),
        source=OnnxSource(Path("small.onnx"), "onnx", {}, proto),
        logits_index=0,
    )


def run(draft, *passes):
    for one_pass in passes:
        one_pass(draft)
    draft.prune()
    return [node.op_type for node in draft.graph]


def weight(draft, node, index=1):
    """Return a node's constant as it is loaded."""
    return draft.weights[node.inputs[index]].parameter(draft.source).load(draft.source)


def node_of(draft, op):
    (node,) = (node for node in draft.graph if node.op_type == op)
    return node


def test_identities_and_float_casts_are_removed_and_others_stay():
    draft = draft_of("a = Identity (x) b = Cast <to = 10> (a) c = Cast <to = 1> (b) logits = Relu (c)")
    assert run(draft, drop_identities) == ["Gather", "Relu"]
    draft = draft_of("a = Cast <to = 6> (x) logits = Cast <to = 1> (a)")
    assert "Cast" in run(draft, drop_identities)


def test_embedding_includes_the_factor_after_it():
    draft = draft_of("scale = Constant <value = float {3.0}> () logits = Mul (x, scale)")
    assert run(draft, raise_constants, raise_embedding) == ["Gather"]
    np.testing.assert_array_equal(weight(draft, node_of(draft, "Gather"), 0), TABLE * 3)


@pytest.mark.parametrize("form", ["MatMul", "Gemm", "Transpose"])
def test_linear_is_matmul_and_add(form):
    bodies = {
        "MatMul": "y = MatMul (x, w) logits = Add (b, y)",
        "Gemm": "logits = Gemm <transB = 1> (x, wt, b)",
        "Transpose": "w2 = Transpose <perm = [1, 0]> (wt) y = MatMul (x, w2) logits = Add (y, b)",
    }
    bias = RNG.standard_normal(64, np.float32)
    draft = draft_of(bodies[form], w=WIDE, wt=np.ascontiguousarray(WIDE.T), b=bias)
    assert run(draft, raise_linears, raise_constants, raise_embedding) == ["Gather", "MatMul", "Add"]
    np.testing.assert_array_equal(weight(draft, node_of(draft, "MatMul")), WIDE)
    np.testing.assert_array_equal(weight(draft, node_of(draft, "Add")), bias)


def test_integer_linear_becomes_a_linear_of_its_values():
    integers, scale, zero = RNG.integers(-128, 128, (32, 64), np.int8), np.float32(0.5), np.int8(3)
    body = """q, s, z = DynamicQuantizeLinear (x) p = MatMulInteger (q, w, z, wz) f = Cast <to = 1> (p)
    both = Mul (s, ws) logits = Mul (f, both)"""
    draft = draft_of(body, w=integers, ws=np.asarray(scale), wz=np.asarray(zero))
    assert run(draft, raise_integer_linears, raise_embedding) == ["Gather", "MatMul"]
    np.testing.assert_array_equal(weight(draft, node_of(draft, "MatMul")), (integers.astype(np.float32) - 3) * 0.5)


def test_skip_norm_is_a_sum_and_a_norm():
    body = """s, a, b, t = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 0.5> (x, x, w)
    logits = Add (s, t)"""
    draft = draft_of(body, w=ROW)
    assert run(draft, raise_norms) == ["Gather", "Add", "RMSNormalization", "Add"]
    norm = node_of(draft, "RMSNormalization")
    assert norm.attributes["epsilon"].value == 0.5
    np.testing.assert_array_equal(weight(draft, norm), ROW)
    assert list(draft.graph)[-1].inputs[1] is list(draft.graph)[1].outputs[0]


def test_norm_between_reshapes_is_a_head_norm():
    body = """y = MatMul (x, w) h = Reshape (y, by_head) n = RMSNorm (h, g) logits = Reshape (n, by_row)"""
    body = body.replace("RMSNorm", "com.microsoft.SimplifiedLayerNormalization <epsilon = 0.25>")
    draft = draft_of(body, w=WIDE, g=ROW[:16], by_head=np.array([0, -1, 16]), by_row=np.array([0, -1, 64]))
    assert run(draft, raise_linears, raise_norms, raise_head_norms, raise_embedding) == ["Gather", "MatMul", "HeadNorm"]
    np.testing.assert_array_equal(weight(draft, node_of(draft, "HeadNorm")), np.tile(ROW[:16], (4, 1)))


def test_silu_has_many_names_and_another_alpha_is_another_function():
    for body in ("logits = com.microsoft.QuickGelu <alpha = 1.0> (x)",):
        assert run(draft_of(body), raise_activations) == ["Gather", "Sigmoid", "Mul"]
    with pytest.raises(UnsupportedModelError, match=r"QuickGelu of the domain com\.microsoft.* its alpha is 1\.702"):
        run(draft_of("logits = com.microsoft.QuickGelu (x)"), raise_activations)


@pytest.mark.parametrize("is_packed", [False, True])
def test_gate_and_up_become_halves_of_one_linear(is_packed):
    parts = "both = MatMul (x, w) g, u = Split <axis = -1, num_outputs = 2> (both)"
    if not is_packed:
        parts = "u = MatMul (x, wu) g = MatMul (x, wg)"
    body = f"{parts} s = Sigmoid (g) a = Mul (g, s) logits = Mul (u, a)"
    draft = draft_of(body, w=WIDE, wg=np.ascontiguousarray(WIDE[:, :32]), wu=np.ascontiguousarray(WIDE[:, 32:]))
    found = run(draft, raise_linears, raise_embedding, raise_columns, merge_gates)
    assert found == ["Gather", "MatMul", "Split", "Sigmoid", "Mul", "Mul"]
    np.testing.assert_array_equal(weight(draft, node_of(draft, "MatMul")), WIDE)


def test_rows_are_picked_before_the_head():
    draft = draft_of("y = MatMul (x, w) c = Mul (y, k) t = Tanh (c) logits = Mul (t, k)", w=WIDE, k=np.float32([2]))
    for one_pass in (raise_linears, raise_constants, raise_embedding):
        one_pass(draft)
    rows = pick_rows(draft)
    assert [node.op_type for node in draft.graph][-5:] == ["Gather", "MatMul", "Mul", "Tanh", "Mul"]
    (picked,) = (node for node in draft.graph if rows in node.inputs)
    assert node_of(draft, "MatMul").inputs[0] is picked.outputs[0]
    with pytest.raises(UnsupportedModelError, match="not the result of a linear"):
        pick_rows(draft_of("logits = Relu (x)"))


def n_bits(bits, block, columns, depth, scale_type=np.float16, zeros=None):
    groups = -(-depth // block)
    packed = RNG.integers(0, 256, (columns, groups, block * bits // 8), np.uint8)
    scales = (2.0 ** RNG.integers(-6, 0, (columns, groups))).astype(scale_type)
    tensors = [ir.tensor(a) if a is not None else None for a in (packed, scales, zeros)]
    tensor = n_bits_tensor(*tensors, shape=(columns, depth), bits=bits, block_size=block, where="node")
    return tensor, packed, scales.astype(np.float32)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("block", [16, 32, 128])
@pytest.mark.parametrize("depth", [31, 32, 33, 160])
def test_few_bit_weights_equal_the_operators_values(bits, block, depth):
    tensor, packed, scales = n_bits(bits, block, 5, depth)
    expected = np.empty((5, depth), np.float32)
    for n in range(5):
        for k in range(depth):
            group, place = divmod(k, block)
            byte, part = divmod(place * bits, 8)
            integer = packed[n, group, byte] >> part & (1 << bits) - 1
            expected[n, k] = (float(integer) - 2 ** (bits - 1)) * scales[n, group]
    np.testing.assert_array_equal(tensor.read(), expected)


def test_packed_zero_points_are_read_low_half_first():
    zeros = np.array([[0x21, 0x03]] * 4, np.uint8)
    tensor, packed, scales = n_bits(4, 32, 4, 96, zeros=zeros)
    integers = np.stack([packed & 15, packed >> 4], axis=-1).reshape(4, 96)
    expected = (integers - np.repeat([1.0, 2.0, 3.0], 32)) * np.repeat(scales, 32, axis=1)
    np.testing.assert_array_equal(tensor.read(), expected)


@pytest.mark.parametrize("block", [32, 64])
def test_4_bit_blocks_are_kept_if_float16_holds_them(block):
    tensor, _, _ = n_bits(4, block, 6, 128)
    assert tensor.stored_as == "Q4_1"
    np.testing.assert_array_equal(tensor.read_blocks().dequantise(), tensor.read())


def test_blocks_with_scales_that_float16_cannot_hold_are_dropped():
    packed, scales = np.zeros((2, 1, 16), np.uint8), np.full((2, 1), 1 / 3, np.float32)
    tensor = n_bits_tensor(
        ir.tensor(packed), ir.tensor(scales), None, shape=(2, 32), bits=4, block_size=32, where="node"
    )
    assert tensor.stored_as == "INT4_GROUPS_OF_32"
    assert tensor.read_blocks() is None


def test_mismatched_operands_are_refused():
    packed, scales = ir.tensor(np.zeros((2, 1, 16), np.uint8)), ir.tensor(np.ones((3, 1), np.float32))
    with pytest.raises(ModelError, match="its scales have 3 elements, expected 2"):
        n_bits_tensor(packed, scales, None, shape=(2, 32), bits=4, block_size=32, where="node")


@pytest.mark.parametrize(("axis", "block", "shape"), [(0, 0, ()), (1, 0, (8,)), (0, 0, (64,)), (0, 32, (2, 8))])
def test_dequantize_linear_per_tensor_axis_and_block(axis, block, shape):
    integers = RNG.integers(-128, 128, (64, 8), np.int8)
    scales = RNG.uniform(0.5, 2, shape).astype(np.float32)
    zeros = RNG.integers(-3, 3, shape).astype(np.int8)
    options = {"axis": axis} | ({"block_size": block} if block else {})
    node = helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], **options)
    graph = helper.make_graph([node], "g", [], [helper.make_tensor_value_info("y", 1, [64, 8])])
    for name, values in {"q": integers, "s": scales, "z": zeros}.items():
        graph.initializer.append(numpy_helper.from_array(np.asarray(values), name))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    expected = ort.InferenceSession(model.SerializeToString()).run(None, {})[0]
    found = dequantised_tensor(
        *(ir.tensor(np.asarray(a)) for a in (integers, scales, zeros)), axis=axis, block_size=block, where="node"
    )
    np.testing.assert_allclose(found.read(), expected, rtol=1e-7)


def test_bfloat16_is_read_as_float32():
    tensor = onnx.TensorProto(name="w", dims=[2], data_type=onnx.TensorProto.BFLOAT16, raw_data=b"\x80\x3f\x00\xc0")
    found = FloatTensor(ir.from_proto(tensor))
    assert found.stored_as == "BF16"
    np.testing.assert_array_equal(found.read(), np.float32([1, -2]))
