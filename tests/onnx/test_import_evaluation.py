"""Values derived without the weights equal ONNX Runtime's values with them."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from chunkrt.onnx.importing.evaluation import Evaluator, skeleton
from chunkrt.onnx.importing.reading import read_proto
from chunkrt.onnx.importing.signature import Probe, feeds, find_signature, inputs_of

FIXTURES = Path(__file__).parents[1] / "data" / "onnx"
WRITTEN_OUT = ("llama_fp32", "llama_int8", "llama_uint8", "qwen3_fp32", "phi3_fp32", "gemma3_fp32")
PROBE = Probe(11, 4)
"""A probe other than those that sizes are derived from."""


def evaluator_of(folder):
    proto = read_proto(folder / "model.onnx")
    signature = find_signature(proto, folder.name)
    return proto, Evaluator(proto, signature, 128), feeds(signature, inputs_of(proto), PROBE)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_positions_masks_and_sizes_equal_those_of_the_complete_model(name):
    proto, evaluator, fed = evaluator_of(FIXTURES / f"optimum_{name}")
    names = [name for node in proto.graph.node for name in node.output if name]
    del proto.graph.output[:]
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    whole = ort.InferenceSession(proto.SerializeToString(), options)
    expected = dict(zip(names, whole.run(names, fed), strict=True))
    found = evaluator.run(names, PROBE)
    for name in names:
        assert (found[name].shape, found[name].dtype) == (expected[name].shape, expected[name].dtype), name
        if evaluator.is_positional(name):
            np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
        if name in evaluator.constants:
            np.testing.assert_array_equal(evaluator.constant(name), expected[name], err_msg=name)


def test_skeleton_has_no_matrix_for_shape_only_values():
    proto, evaluator, _ = evaluator_of(FIXTURES / "optimum_llama_fp32")
    data = {name for node in proto.graph.node for name in node.output if not evaluator.is_positional(name)}
    light = skeleton(proto, data | {v.name for v in proto.graph.input if v.name != "attention_mask"})
    read = {name for node in light.nodes for name in node.input}
    matrices = [t.name for n, t in light.initializers.items() if n in read and len(t.dims) == 2 and t.dims[0] > 1]
    assert not matrices
    assert [node.op_type for node in proto.graph.node].count("MatMul") > 10
