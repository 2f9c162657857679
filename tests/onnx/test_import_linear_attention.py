"""Recurrences of com.microsoft's LinearAttention, as ONNX Runtime GenAI's builder writes them for Qwen3.5, and in other
equivalent forms; the reference is ONNX Runtime's own run of them."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper
from small_onnx import scale_far_from_the_start

import chunkrt
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.errors import UnsupportedModelError
from chunkrt.graph.decoders import make_decoder
from chunkrt.graph.ops import trace
from chunkrt.graph.partition import partition
from chunkrt.onnx.importing import import_decoder, verify
from chunkrt.testing.random_decoders import RandomCheckpoint

FIXTURE = Path(__file__).parents[1] / "data" / "onnx" / "genai_qwen3_5_fp32"
LENGTHS = (1, 31, 33, 95)
TOLERANCE = 1e-4
"""Tolerance relative to the largest logit: three layers in float32."""

CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 104,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-3,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
}


def load():
    """Load the fixture with its data, for a test to change."""
    return onnx.load(FIXTURE / "model.onnx")


def saved(model, folder):
    (folder / "genai_config.json").write_bytes((FIXTURE / "genai_config.json").read_bytes())
    onnx.save(model, folder / "model.onnx")
    return folder


def feeds(session, tokens):
    """Return the inputs of a first run: the three positions of a token are equal for text."""
    past = {"past_sequence_length": 0, "kv_cache_dim": 16, "batch_size": 1}
    fed = {"input_ids": tokens[None], "attention_mask": np.ones((1, len(tokens)), np.int64)}
    fed["position_ids"] = np.broadcast_to(np.arange(len(tokens)), (3, 1, len(tokens)))
    for value in session.get_inputs():
        if value.name.startswith("past"):
            fed[value.name] = np.zeros([past.get(size, size) for size in value.shape], np.float32)
    return fed


def assert_agrees(folder):
    session = ort.InferenceSession(folder / "model.onnx")
    with chunkrt.load(folder, npu="reference", scheme="float", chunk_length=32) as engine:
        for length in LENGTHS:
            tokens = np.random.default_rng(length).integers(0, 104, length)
            found = engine.session().prefill(tokens.tolist(), logits="all").logits
            expected = session.run(["logits"], feeds(session, tokens))[0][0]
            np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def attributes(folder):
    """Return the attributes of the first recurrence, after comparing the import with the original."""
    planned = plan_checkpoint(folder, {})
    assert verify(planned.source, planned.plan, planned.load) < TOLERANCE
    return next(n for s in planned.plan.subgraphs for n in s.nodes if n.op == "LinearAttention").attributes


def nodes_of(model, op):
    return [node for node in model.graph.node if node.op_type == op]


def set_attribute(node, name, value):
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def replace(model, op, write):
    """Replace every node of an operator by the nodes that `write(node, constant)` makes."""
    made = []

    def constant(name, values):
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    for node in model.graph.node:
        made += write(node, constant) if node.op_type == op else [node]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in made]
    del model.graph.node[:]
    model.graph.node.extend(copies)


def test_import_computes_the_logits_of_the_original():
    assert_agrees(FIXTURE)


def test_plan_equals_that_of_the_family():
    """Names, shapes, devices and attributes, and so states, equal those of chunkrt's own decoder of this config."""
    found = plan_checkpoint(FIXTURE, {}).plan
    source = RandomCheckpoint(CONFIG)
    source.architecture = "qwen3_5_text"
    expected = partition(trace(make_decoder(source)[0]), family="qwen3_5_text")
    tensors = {
        name: dataclasses.replace(tensor, rotary="") for name, tensor in expected.tensors.items()
    }  # the file holds tables
    expected = dataclasses.replace(expected, tensors=tensors)
    assert json.loads(found.to_json()) == json.loads(expected.to_json())


def test_activation_decay_and_lengths_may_be_decomposed(tmp_path):
    """An exporter that knows only the two operators writes this; it has the epsilon of Qwen3.5."""
    model = load()

    def silu(node, constant):
        set_attribute(node, "activation", "none")
        result, plain = node.output[0], f"{node.name}/plain"
        node.output[0] = plain
        return [
            node,
            helper.make_node("Sigmoid", [plain], [f"{plain}/s"]),
            helper.make_node("Mul", [plain, f"{plain}/s"], [result]),
        ]

    def gates(node, constant):
        a, bias, rate, b = node.input
        name = node.name
        return [
            helper.make_node("Add", [a, bias], [f"{name}/biased"]),
            helper.make_node("Softplus", [f"{name}/biased"], [f"{name}/softplus"]),
            helper.make_node("Mul", [rate, f"{name}/softplus"], [node.output[0]]),
            helper.make_node("Sigmoid", [b], [node.output[1]]),
        ]

    def unit(node, constant):
        name = node.name
        axes, tiny = constant(f"{name}/axes", [-1]), constant(f"{name}/tiny", np.float32(1e-6))
        return [
            helper.make_node("ReduceSumSquare", [node.input[0], axes], [f"{name}/squares"], keepdims=1),
            helper.make_node("Add", [f"{name}/squares", tiny], [f"{name}/safe"]),
            helper.make_node("Sqrt", [f"{name}/safe"], [f"{name}/length"]),
            helper.make_node("Div", [node.input[0], f"{name}/length"], node.output),
        ]

    for op, write in (("CausalConvWithState", silu), ("LinearAttentionGate", gates), ("LpNormalization", unit)):
        replace(model, op, write)
    assert_agrees(saved(model, tmp_path))
    assert plan_checkpoint(tmp_path, {}).plan.to_json() == plan_checkpoint(FIXTURE, {}).plan.to_json()


def test_gated_norm_may_be_decomposed(tmp_path):
    model = load()

    def norm(node, constant):
        x, weight, z = node.input
        name = node.name
        heads, rows = constant(f"{name}/heads", [0, -1, 12]), constant(f"{name}/rows", [0, -1, 48])
        return [
            helper.make_node("Reshape", [x, heads], [f"{name}/by_head"]),
            helper.make_node(
                "SimplifiedLayerNormalization", [f"{name}/by_head", weight], [f"{name}/normed"], epsilon=1e-3, axis=-1
            ),
            helper.make_node("Reshape", [f"{name}/normed", rows], [f"{name}/by_row"]),
            helper.make_node("Sigmoid", [z], [f"{name}/s"]),
            helper.make_node("Mul", [z, f"{name}/s"], [f"{name}/silu"]),
            helper.make_node("Mul", [f"{name}/by_row", f"{name}/silu"], node.output),
        ]

    replace(model, "GatedRMSNorm", norm)
    assert_agrees(saved(model, tmp_path))


def test_scale_may_be_the_recurrences_own(tmp_path):
    model = load()
    for node in nodes_of(model, "LinearAttention"):
        query = next(n for n in model.graph.node if n.output[0] == node.input[0])
        node.input[0] = query.input[0]
        set_attribute(node, "scale", 0.0)  # stands for head_k_dim^-1/2
    assert attributes(saved(model, tmp_path))["use_qk_l2norm"] == 1


def test_queries_and_keys_may_have_any_length(tmp_path):
    model = load()
    replace(model, "LpNormalization", lambda node, _: [helper.make_node("Identity", node.input, node.output)])
    assert attributes(saved(model, tmp_path))["use_qk_l2norm"] == 0


@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
def test_norms_gate_may_have_another_activation(tmp_path, activation):
    model = load()
    for node in nodes_of(model, "GatedRMSNorm"):
        set_attribute(node, "activation", activation)
    attributes(saved(model, tmp_path))


def swap_queries_and_keys(model):
    split = nodes_of(model, "Split")[0]
    split.output[0], split.output[1] = split.output[1], split.output[0]


def add_a_second_scale(model):
    set_attribute(nodes_of(model, "LinearAttention")[0], "scale", 0.5)


def leave_the_activation_out(model):
    set_attribute(nodes_of(model, "CausalConvWithState")[0], "activation", "none")


def norm_by_sums(model):
    set_attribute(nodes_of(model, "LpNormalization")[0], "p", 1)


@pytest.mark.parametrize("change", [swap_queries_and_keys, add_a_second_scale, leave_the_activation_out, norm_by_sums])
def test_other_recurrences_are_refused(tmp_path, change):
    """All of these have the shapes and the operators of the gated delta rule."""
    model = load()
    change(model)
    named = r"node '/model/layers\.0/linear_attn/LinearAttention', an operator LinearAttention of .* com\.microsoft"
    with pytest.raises(UnsupportedModelError, match=f"{named}.* computes other numbers than the gated delta rule"):
        import_decoder(saved(model, tmp_path))


def test_queries_that_change_with_the_length_are_refused(tmp_path):
    """They are twice as long from 100 tokens on, more than are run on random rows."""
    model = load()
    scale_far_from_the_start(model, nodes_of(model, "LinearAttention")[0], 100)
    with pytest.raises(UnsupportedModelError, match="depends on 'factor', which changes with the length"):
        import_decoder(saved(model, tmp_path))


@pytest.mark.parametrize(
    ("op", "attribute", "value", "reason"),
    [
        ("LinearAttention", "update_rule", "delta", "its update_rule is 'delta'"),
        ("LinearAttention", "state_window", 2, "a window of states"),
        ("LinearAttention", "q_num_heads", 3, "3 query and key heads and 4 value heads"),
        ("CausalConvWithState", "state_window", 2, "a window of states"),
        ("CausalConvWithState", "dilation", 2, "its dilation is 2"),
        ("CausalConvWithState", "channels_last", 1, "its input is not rows that were transposed"),
        ("GatedRMSNorm", "activation", "tanh", "its activation is 'tanh'"),
        ("MRotaryEmbedding", "scale", 2.0, "scales positions"),
        ("MRotaryEmbedding", "interleaved", 1, "rotates adjacent columns"),
    ],
)
def test_other_kind_is_refused_by_its_name(tmp_path, op, attribute, value, reason):
    model = load()
    set_attribute(nodes_of(model, op)[0], attribute, value)
    with pytest.raises(UnsupportedModelError, match=f"an operator {op} of the domain com.microsoft.*{reason}"):
        import_decoder(saved(model, tmp_path))


def test_positions_of_images_are_refused(tmp_path):
    """Each of the three positions of a token must be consecutive as in text."""
    model = load()
    spread = numpy_helper.from_array(np.array([1, 2, 1]).reshape(3, 1, 1), "spread")
    model.graph.initializer.append(spread)
    model.graph.node.insert(0, helper.make_node("Mul", ["position_ids", "spread"], ["spread_positions"]))
    for node in nodes_of(model, "MRotaryEmbedding"):
        node.input[1] = "spread_positions"
    with pytest.raises(UnsupportedModelError, match=r"MRotaryEmbedding .* its positions 'spread_positions' are"):
        import_decoder(saved(model, tmp_path))


@pytest.mark.parametrize("op", ["LinearAttention", "CausalConvWithState"])
def test_state_that_is_no_input_is_refused(tmp_path, op):
    model = load()
    node = nodes_of(model, op)[0]
    state = next(v for v in model.graph.input if v.name == node.input[3])
    zeros = np.zeros([d.dim_value or 1 for d in state.type.tensor_type.shape.dim], np.float32)
    model.graph.initializer.append(numpy_helper.from_array(zeros, "no state"))
    node.input[3] = "no state"
    with pytest.raises(UnsupportedModelError, match=f"an operator {op} .* its past is not an input"):
        import_decoder(saved(model, tmp_path))
