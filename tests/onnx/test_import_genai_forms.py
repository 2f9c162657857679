"""Forms that ONNX Runtime GenAI's builder writes by its options: each computes the same as the plain form."""

import ml_dtypes
import numpy as np
import onnx
import pytest
from genai_models import TOLERANCE, assert_agrees, load, saved
from onnx import helper, numpy_helper

from chunkrt.errors import UnsupportedModelError
from chunkrt.graph.partition import plan_decoder
from chunkrt.onnx.importing import import_decoder, verify


def with_norms_inside(model, *, is_packed=False):
    """Fold the norms of queries and keys into attention, as the builder writes them for WebGPU."""
    graph = model.graph
    writers = {name: node for node in graph.node for name in node.output}
    for attention in [node for node in graph.node if node.op_type == "GroupQueryAttention"]:
        norms = []
        for place in (0, 1):
            after = writers[attention.input[place]]
            norm = writers[after.input[0]]
            before = writers[norm.input[0]]
            assert [n.op_type for n in (before, norm, after)] == ["Reshape", "SimplifiedLayerNormalization", "Reshape"]
            attention.input[place] = before.input[0]
            norms.append(norm.input[1])
            epsilon = next(a.f for a in norm.attribute if a.name == "epsilon")
            for node in (before, norm, after):
                graph.node.remove(node)
        if is_packed:
            split = writers[attention.input[0]]
            assert split.op_type == "Split"
            attention.input[:3] = [split.input[0], "", ""]
            graph.node.remove(split)
        attention.input.extend([""] * (14 - len(attention.input)) + norms)
        attention.attribute.append(helper.make_attribute("qk_norm_epsilon", epsilon))
    return model


def agrees_with(folder, model, truth, tolerance=TOLERANCE):
    """Check that the import of a model computes the logits of another on ONNX Runtime."""
    saved(model, folder, "genai_qwen3_fp32" if "qwen3" in str(truth) else "genai_llama_fp32")
    assert_agrees(folder, truth if isinstance(truth, onnx.ModelProto) else load(truth), tolerance)


@pytest.mark.parametrize("is_packed", [False, True])
def test_norms_inside_attention_equal_those_before_it(tmp_path, is_packed):
    agrees_with(tmp_path, with_norms_inside(load("genai_qwen3_fp32"), is_packed=is_packed), "genai_qwen3_fp32")


@pytest.mark.parametrize(
    ("place", "reason"),
    [(10, "a bias of the scores"), (11, "a sink"), (13, "a scale of stored values"), (14, "a norm of queries without")],
)
def test_extra_input_of_attention_is_refused_by_its_meaning(tmp_path, place, reason):
    model = load("genai_llama_fp32")
    model.graph.initializer.append(numpy_helper.from_array(np.ones(16, np.float32), "extra"))
    node = next(n for n in model.graph.node if n.op_type == "GroupQueryAttention")
    node.input.extend([""] * (place + 1 - len(node.input)))
    node.input[place] = "extra"
    with pytest.raises(UnsupportedModelError, match=rf"GroupQueryAttention'.*it reads 'extra': {reason}"):
        import_decoder(saved(model, tmp_path))


def pruned(form):
    """Multiply only the last hidden row by the LM head, as `prune_lm_head` of the builder does, or with a Slice."""
    model = load("genai_llama_fp32")
    graph = model.graph
    head = next(node for node in graph.node if "logits" in node.output)
    position, hidden = list(graph.node).index(head), head.input[0]
    numbers = {"last": np.array(-1), "one": np.array([1]), "lasts": np.array([-1]), "end": np.array([2**63 - 1])}
    graph.initializer.extend(numpy_helper.from_array(value.astype(np.int64), name) for name, value in numbers.items())
    nodes = {
        "Gather": [
            helper.make_node("Gather", [hidden, "last"], ["row"], name="prune/Gather", axis=1),
            helper.make_node("Unsqueeze", ["row", "one"], ["rows"], name="prune/Unsqueeze"),
        ],
        "Gather of a list": [helper.make_node("Gather", [hidden, "lasts"], ["rows"], name="prune/Gather", axis=1)],
        "Slice": [helper.make_node("Slice", [hidden, "lasts", "end", "one"], ["rows"], name="prune/Slice")],
    }[form]
    head.input[0] = "rows"
    for node in reversed(nodes):
        graph.node.insert(position, node)
    logits = next(value for value in graph.output if value.name == "logits")
    logits.type.tensor_type.shape.dim[1].dim_value = 1
    return model


@pytest.mark.parametrize("form", ["Gather", "Gather of a list", "Slice"])
def test_head_on_the_last_row_is_extended_to_all(tmp_path, form):
    agrees_with(tmp_path, pruned(form), "genai_llama_fp32")


def test_head_on_the_first_row_is_refused(tmp_path):
    model = pruned("Gather")
    last = next(tensor for tensor in model.graph.initializer if tensor.name == "last")
    last.CopyFrom(numpy_helper.from_array(np.array(0, np.int64), "last"))
    with pytest.raises(UnsupportedModelError, match=r"'prune/"):
        import_decoder(saved(model, tmp_path))


def test_output_of_hidden_states_is_ignored_with_one_line(tmp_path, caplog):
    model = load("genai_llama_fp32")
    head = next(node for node in model.graph.node if "logits" in node.output)
    hidden = head.input[0]
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = ["hidden_states" if name == hidden else name for name in names]
    model.graph.output.append(helper.make_tensor_value_info("hidden_states", onnx.TensorProto.FLOAT, ["b", "t", 64]))
    agrees_with(tmp_path, model, "genai_llama_fp32")
    told = [record.getMessage() for record in caplog.records if "hidden_states" in record.getMessage()]
    assert set(told) == {"model.onnx: ignoring the outputs hidden_states; logits and states are read"}


def test_state_without_an_input_is_refused(tmp_path):
    model = load("genai_llama_fp32")
    spare = helper.make_node("Identity", ["present.0.key"], ["present.7.key"], name="spare")
    model.graph.node.append(spare)
    model.graph.output.append(helper.make_tensor_value_info("present.7.key", onnx.TensorProto.FLOAT, None))
    with pytest.raises(UnsupportedModelError, match=r"its output 'present\.7\.key' is a state without a counterpart"):
        import_decoder(saved(model, tmp_path))


def test_bfloat16_is_computed_and_compared_in_float32(tmp_path):
    """The reference is the same graph in float32, with weights that ml_dtypes rounded to bfloat16."""
    half, rounded = load("genai_llama_fp32"), load("genai_llama_fp32")
    for left, right in zip(half.graph.initializer, rounded.graph.initializer, strict=True):
        if left.data_type == onnx.TensorProto.FLOAT:
            values = numpy_helper.to_array(left).astype(ml_dtypes.bfloat16)
            right.CopyFrom(numpy_helper.from_array(values.astype(np.float32), right.name))
            left.CopyFrom(
                onnx.helper.make_tensor(left.name, onnx.TensorProto.BFLOAT16, values.shape, values.tobytes(), raw=True)
            )
    for value in (*half.graph.input, *half.graph.output, *half.graph.value_info):
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            value.type.tensor_type.elem_type = onnx.TensorProto.BFLOAT16
    agrees_with(tmp_path, half, rounded)
    source, decoder = import_decoder(tmp_path)
    assert verify(source, plan_decoder(source, decoder, {}).plan, plan_decoder(source, decoder, {}).load) < TOLERANCE
