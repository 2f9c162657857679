"""Decoders of ONNX Runtime GenAI's builder compute the same as their original on ONNX Runtime."""

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
from genai_models import FIXTURES, FLOAT16_TOLERANCE, TOLERANCE, assert_agrees, load, saved
from onnx import helper, numpy_helper

from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.errors import ModelError, UnsupportedModelError
from chunkrt.graph.decoders import make_decoder
from chunkrt.graph.ops import trace
from chunkrt.graph.partition import partition
from chunkrt.onnx.importing import import_decoder, verify
from chunkrt.testing.random_decoders import CONFIG, RandomCheckpoint


def dequantised(model):
    """Return the same graph with every matrix of few bits expanded to floats, by NumPy."""
    tensors = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    for node in list(model.graph.node):
        options = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type not in ("MatMulNBits", "GatherBlockQuantized"):
            continue
        is_linear = node.op_type == "MatMulNBits"
        source = node.input[1] if is_linear else "lm_head.MatMul.weight_Q4"  # read through a Reshape
        packed, scales = tensors[source], tensors[node.input[2]]
        rows = packed.reshape(len(scales), -1)
        low_first = np.stack([rows & 15, rows >> 4], axis=-1).reshape(len(scales), -1).astype(np.float32)
        blocks = low_first.reshape(len(scales), -1, options["block_size"]) - 8
        matrix = (blocks * scales.reshape(len(scales), -1, 1)).reshape(len(scales), -1)
        name = f"{node.output[0]}.float"
        model.graph.initializer.append(numpy_helper.from_array(matrix.T.copy() if is_linear else matrix, name))
        inputs = [node.input[0], name] if is_linear else [name, node.input[1]]
        node.CopyFrom(helper.make_node("MatMul" if is_linear else "Gather", inputs, node.output))
    return model


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3", "lfm2"])
def test_import_computes_the_logits_of_the_original(family):
    name = f"genai_{family}_fp32"
    assert_agrees(FIXTURES / name, load(name))


def test_float16_is_computed_in_float32():
    assert_agrees(FIXTURES / "genai_llama_fp16", load("genai_llama_fp16"), FLOAT16_TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_4_bit_weights_equal_their_dequantised_values(family):
    name = f"genai_{family}_int4"
    model = load(name)
    assert any(node.op_type == "MatMulNBits" for node in model.graph.node)
    assert_agrees(FIXTURES / name, dequantised(model))


def test_dequantize_linear_has_the_same_weights_as_blocks():
    ours, theirs = (import_decoder(FIXTURES / name)[1] for name in ("genai_llama_int4", "genai_llama_int4_qdq"))
    sources = [import_decoder(FIXTURES / name)[0] for name in ("genai_llama_int4", "genai_llama_int4_qdq")]
    for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert left.name == right.name
        np.testing.assert_array_equal(left.load(sources[0]), right.load(sources[1]))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_plan_equals_that_of_the_family(family):
    """Names, shapes, devices and attributes equal those of chunkrt's own decoder of this config, except that its rotary
    tables are in the file, and its parameters are counted as in the file."""
    genai = json.loads((FIXTURES / f"genai_{family}_fp32" / "genai_config.json").read_text())["model"]
    found = plan_checkpoint(FIXTURES / f"genai_{family}_fp32", {}).plan
    gate_up = found.tensors["model.layers.0.mlp.gate_up_proj.weight"].shape[1]
    norm = next(node for s in found.subgraphs for node in s.nodes if node.op == "RMSNormalization")
    config = CONFIG | {
        "num_hidden_layers": genai["decoder"]["num_hidden_layers"],
        "hidden_size": genai["decoder"]["hidden_size"],
        "intermediate_size": gate_up // 2,
        "num_attention_heads": genai["decoder"]["num_attention_heads"],
        "num_key_value_heads": genai["decoder"]["num_key_value_heads"],
        "head_dim": genai["decoder"]["head_size"],
        "max_position_embeddings": genai["context_length"],
        "vocab_size": genai["vocab_size"],
        "rms_norm_eps": norm.attributes["epsilon"],
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
    source = RandomCheckpoint(config)
    source.architecture = family
    expected = partition(trace(make_decoder(source)[0]), family=family)
    tensors = {name: replace(tensor, rotary="") for name, tensor in expected.tensors.items()}
    expected = replace(expected, tensors=tensors)
    assert json.loads(found.to_json()) == json.loads(expected.to_json())


def test_modules_are_placed_by_their_names():
    plan = plan_checkpoint(
        FIXTURES / "genai_llama_fp32", {"model.layers.*.mlp.down_proj": "cpu", "lm_head": "npu"}
    ).plan
    devices = {node.name: subgraph.device for subgraph in plan.subgraphs for node in subgraph.nodes}
    assert devices["model.layers.1.mlp.down_proj.output"] == "cpu"
    assert devices["model.layers.1.mlp.gate_up_proj.output"] == "npu"
    assert devices["lm_head.output"] == "npu"


def test_verification_finds_a_wrong_import():
    right, planned = (plan_checkpoint(FIXTURES / "genai_llama_fp32", {}) for _ in range(2))
    assert verify(right.source, right.plan, right.load) < TOLERANCE
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(ModelError, match=r"differs from the original .* by 0\.\d+ of the largest logit"):
        verify(planned.source, planned.plan, lambda n: planned.load(n) * np.float32(1.5 if n == name else 1))


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("softcap", 30.0, "its softcap is 30"),
        ("rotary_interleaved", 1, "rotates adjacent columns"),
        ("smooth_softmax", 1, "its smooth_softmax is 1"),
        ("do_rotary", 0, "its queries and keys are not rotated"),
        ("kv_num_heads", 3, "4 query heads and 3 key heads"),
    ],
)
def test_other_attention_is_refused(tmp_path, attribute, value, reason):
    model = load("genai_llama_fp32")
    node = next(n for n in model.graph.node if n.op_type == "GroupQueryAttention")
    kept = [a for a in node.attribute if a.name != attribute]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(attribute, value)])
    with pytest.raises(
        UnsupportedModelError, match=f"'/model/layers.0/attn/GroupQueryAttention'.*com.microsoft.*{reason}"
    ):
        import_decoder(saved(model, tmp_path))


def test_lengths_that_differ_from_the_mask_are_refused(tmp_path):
    """No assumption about a mask is made without a check."""
    model = load("genai_llama_fp32")
    node = next(n for n in model.graph.node if n.op_type == "Sub")
    node.CopyFrom(helper.make_node("Add", node.input, node.output, node.name))
    with pytest.raises(UnsupportedModelError, match=r"its length .* are \[2\] for 1 tokens after 0, expected \[0\]"):
        import_decoder(saved(model, tmp_path))


@pytest.mark.parametrize("versions", [[], [helper.make_opsetid("org.example", 1)]])
def test_unknown_operator_is_named(tmp_path, versions):
    model = load("genai_llama_fp32")
    node = next(n for n in model.graph.node if n.op_type == "Sigmoid")
    node.CopyFrom(helper.make_node("Wiggle", node.input, node.output, "odd one", domain="org.example"))
    model.opset_import.extend(versions)
    with pytest.raises(UnsupportedModelError, match=r"node 'odd one', an operator Wiggle of the domain org\.example"):
        import_decoder(saved(model, tmp_path))


def test_state_without_an_output_is_refused(tmp_path):
    model = load("genai_llama_fp32")
    kept = [value for value in model.graph.output if value.name != "present.1.key"]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    with pytest.raises(UnsupportedModelError, match=r"input 'past_key_values\.1\.key'"):
        import_decoder(saved(model, tmp_path))


@pytest.mark.parametrize("op", ["MatMul", "SimplifiedLayerNormalization", "Gather"])
def test_node_without_its_inputs_is_one_error(tmp_path, op):
    model = load("genai_llama_fp32")
    node = [n for n in model.graph.node if n.op_type == op][-1]
    del node.input[1:]
    with pytest.raises(ModelError):
        import_decoder(saved(model, tmp_path))


@pytest.mark.parametrize(("length", "is_believed"), [(4_194_304, True), (2**24, True), (2**24 + 1, False)])
def test_contexts_of_up_to_2_to_the_24_are_accepted(tmp_path, length, is_believed):
    """Folders and GGUF files have the same limit; this decoder's tables are in its file, and end earlier."""
    model = onnx.load(FIXTURES / "genai_llama_fp32" / "model.onnx")
    path, config = saved(model, tmp_path) / "model.onnx", tmp_path / "genai_config.json"
    found = json.loads(config.read_text())
    found["model"]["context_length"] = length
    config.write_text(json.dumps(found))
    if is_believed:
        assert plan_checkpoint(path, {}).plan.context_length == 128
    else:
        with pytest.raises(ModelError, match="max_position_embeddings is 16777217, expected 1 to 16777216"):
            plan_checkpoint(path, {})
