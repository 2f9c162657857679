"""Decoders of Optimum compute the same as their original on ONNX Runtime, and unsupported parts are named."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import chunkrt
from chunkrt.errors import UnsupportedModelError
from chunkrt.onnx.importing import import_decoder

FIXTURES = Path(__file__).parents[1] / "data" / "onnx"
FAMILIES = ("llama", "qwen2", "qwen3", "phi3", "gemma3")
LENGTHS = (1, 31, 33, 95)
TOLERANCE = 1e-4
"""Tolerance for float32: two layers of sums over at most 64 products, on logits of up to about 8."""


def tokens_of(length):
    return np.random.default_rng(length).integers(0, 104, length)


def original_logits(model, tokens):
    session = ort.InferenceSession(model)
    fed = {
        "input_ids": tokens[None],
        "attention_mask": np.ones((1, tokens.size), np.int64),
        "position_ids": np.arange(tokens.size)[None],
    }
    for value in session.get_inputs():
        if value.name.startswith("past_key_values"):
            fed[value.name] = np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
    read = {value.name for value in session.get_inputs()}
    return session.run(["logits"], {name: value for name, value in fed.items() if name in read})[0][0]


def assert_agrees(folder, model):
    with chunkrt.load(folder, npu="reference", scheme="float", chunk_length=32) as engine:
        for length in LENGTHS:
            tokens = tokens_of(length)
            found = engine.session().prefill(tokens.tolist(), logits="all").logits
            np.testing.assert_allclose(found, original_logits(model, tokens), rtol=0, atol=TOLERANCE)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("family", FAMILIES)
def test_import_computes_the_logits_of_the_original(family):
    folder = FIXTURES / f"optimum_{family}_fp32"
    assert_agrees(folder, (folder / "model.onnx").read_bytes())


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_quantised_weights_are_used_with_float_activations(dtype):
    """The reference is the original in floats, with weights that NumPy dequantised."""
    quantised = onnx.load(FIXTURES / f"optimum_llama_{dtype}" / "model.onnx")
    tensors = {t.name: numpy_helper.to_array(t) for t in quantised.graph.initializer}
    truth = onnx.load(FIXTURES / "optimum_llama_fp32" / "model.onnx")
    changed = 0
    for tensor in truth.graph.initializer:
        if f"{tensor.name}_quantized" in tensors:
            values, scale, zero = (tensors[f"{tensor.name}_{part}"] for part in ("quantized", "scale", "zero_point"))
            weight = (values.astype(np.float32) - zero.astype(np.float32)) * scale
            tensor.CopyFrom(numpy_helper.from_array(weight, tensor.name))
            changed += 1
    assert changed == 15
    assert_agrees(FIXTURES / f"optimum_llama_{dtype}", truth.SerializeToString())


def test_windows_are_detected():
    with chunkrt.load(FIXTURES / "optimum_gemma3_fp32", npu="reference", scheme="float") as engine:
        nodes = [node for subgraph in engine.plan.subgraphs for node in subgraph.nodes if node.op == "CachedAttention"]
    assert [node.attributes["window"] for node in nodes] == [20, 0]


def changed_copy(tmp_path, change):
    """Return a copy of the tiny llama with a change in its first layer, and the files next to it."""
    source = FIXTURES / "optimum_llama_fp32"
    model = onnx.load(source / "model.onnx")
    change(model.graph)
    onnx.save(model, tmp_path / "model.onnx")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    return tmp_path


def node_of(graph, name):
    return next(node for node in graph.node if node.name.endswith(name))


def without_the_softmax_axis(graph):
    node_of(graph, "layers.0/self_attn/Softmax").attribute[0].i = 2


def with_scores_that_are_squared(graph):
    softmax = node_of(graph, "layers.0/self_attn/Softmax")
    product = node_of(graph, "layers.0/self_attn/MatMul")
    position = list(graph.node).index(softmax)
    square = helper.make_node("Mul", [product.output[0]] * 2, ["squared"], name="square")
    reader = next(node for node in graph.node if product.output[0] in node.input)
    reader.input[list(reader.input).index(product.output[0])] = "squared"
    graph.node.insert(position - 1, square)


def with_keys_that_are_not_rotated(graph):
    node_of(graph, "layers.0/self_attn/Concat_4").input[0] = node_of(graph, "layers.0/self_attn/Slice_3").output[0]


def with_a_mask_that_shows_what_comes(graph):
    node_of(graph, "model/LessOrEqual").op_type = "GreaterOrEqual"


def late(graph, late, early, *, above=100):
    """Return the name of a number that is `late` for runs that end above so many positions, and otherwise `early`."""
    constants = {"bound": np.int64(above), "late": np.float32(late), "early": np.float32(early)}
    graph.initializer.extend(numpy_helper.from_array(np.array(value), name) for name, value in constants.items())
    nodes = [
        helper.make_node("ReduceMax", ["position_ids"], ["last_position"], keepdims=0),
        helper.make_node("Greater", ["last_position", "bound"], ["is_late"]),
        helper.make_node("Where", ["is_late", "late", "early"], ["factor"]),
    ]
    for index, node in enumerate(nodes):
        graph.node.insert(index, node)
    return "factor"


def put_behind(graph, name, op, operand):
    """Make the readers of a node's result read it combined with another value."""
    node = node_of(graph, name)
    readers = [other for other in graph.node if node.output[0] in other.input]
    for reader in readers:
        reader.input[list(reader.input).index(node.output[0])] = "combined"
    graph.node.insert(list(graph.node).index(node) + 1, helper.make_node(op, [node.output[0], operand], ["combined"]))


def with_scores_that_grow_far_from_the_start(graph):
    put_behind(graph, "layers.0/self_attn/MatMul", "Mul", late(graph, 2, 1))


def with_a_rotation_that_is_slower_for_long_texts(graph):
    put_behind(graph, "rotary_emb/Transpose", "Mul", late(graph, 0.5, 1))


def with_a_mask_that_shows_all_of_long_texts(graph):
    late(graph, 0, 0)
    put_behind(graph, "layers.0/self_attn/Slice_4", "Or", "is_late")


def with_scores_of_at_most_20(graph):
    graph.initializer.append(numpy_helper.from_array(np.float32(20), "cap"))
    put_behind(graph, "layers.0/self_attn/MatMul", "Min", "cap")


def with_a_little_added_to_scores(graph):
    graph.initializer.append(numpy_helper.from_array(np.float32([1e-6, 0] * 2).reshape(1, 4, 1, 1), "bias"))
    put_behind(graph, "layers.0/self_attn/MatMul", "Add", "bias")


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    "change",
    [
        with_scores_that_grow_far_from_the_start,
        with_a_rotation_that_is_slower_for_long_texts,
        with_a_mask_that_shows_all_of_long_texts,
        with_a_little_added_to_scores,
        with_scores_of_at_most_20,
        without_the_softmax_axis,
        with_scores_that_are_squared,
        with_keys_that_are_not_rotated,
        with_a_mask_that_shows_what_comes,
    ],
)
def test_nodes_that_resemble_attention_are_refused_by_name(tmp_path, monkeypatch, change):
    monkeypatch.setattr("chunkrt.onnx.importing.decomposed.rotary_regions.BLOCK", 32)  # 128 positions
    folder = changed_copy(tmp_path, change)
    with pytest.raises(UnsupportedModelError, match=r"model\.onnx: node '/model/layers.0/self_attn/Softmax'.*Softmax"):
        import_decoder(folder)


def test_unsupported_operator_is_named(tmp_path):
    def with_a_cosine(graph):
        node_of(graph, "layers.1/mlp/act_fn/Sigmoid").op_type = "Softsign"

    with pytest.raises(UnsupportedModelError, match=r"'/model/layers.1/mlp/act_fn/Sigmoid'.*Softsign.*ai\.onnx"):
        import_decoder(changed_copy(tmp_path, with_a_cosine))


def test_norm_with_another_mean_is_no_norm(tmp_path):
    def with_a_sum(graph):
        node_of(graph, "layers.1/input_layernorm/ReduceMean").op_type = "ReduceSum"

    with pytest.raises(UnsupportedModelError, match="input_layernorm"):
        import_decoder(changed_copy(tmp_path, with_a_sum))


def test_activations_on_a_grid_of_the_file_are_refused_by_name(tmp_path):
    """ONNX Runtime's static quantisation writes them: QuantizeLinear and DequantizeLinear before a product."""

    def with_rounded_activations(graph):
        product = node_of(graph, "/model/layers.1/mlp/down_proj/MatMul")
        graph.initializer.append(numpy_helper.from_array(np.float32(0.01), "grid"))
        graph.initializer.append(numpy_helper.from_array(np.uint8(128), "middle"))
        rounded = helper.make_node("QuantizeLinear", [product.input[0], "grid", "middle"], ["rounded"], "rounds")
        restored = helper.make_node("DequantizeLinear", ["rounded", "grid", "middle"], ["restored"], "restores")
        product.input[0] = "restored"
        graph.node.extend([rounded, restored])

    with pytest.raises(UnsupportedModelError, match=r"'rounds', an operator QuantizeLinear .* rounds the activations"):
        import_decoder(changed_copy(tmp_path, with_rounded_activations))
