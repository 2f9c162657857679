"""Identity nodes are removed before attention is searched for; inputs of a fixed length are refused."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import chunkrt
from chunkrt.errors import UnsupportedModelError
from chunkrt.onnx.importing import import_decoder

SOURCE = Path(__file__).parents[1] / "data" / "onnx" / "optimum_llama_fp32"
STATES = tuple(f"past_key_values.{layer}.{kind}" for layer in (0, 1) for kind in ("key", "value"))
TOLERANCE = 1e-4
"""Tolerance for float32; see `test_import_optimum.py`."""


def original_logits(model, tokens):
    """Return the logits of the first chunk on ONNX Runtime."""
    session = ort.InferenceSession(model.SerializeToString())
    fed = {"input_ids": tokens[None], "attention_mask": np.ones((1, len(tokens)), np.int64)}
    fed["position_ids"] = np.arange(len(tokens))[None]
    for value in session.get_inputs():
        if value.name in STATES:
            fed[value.name] = np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
    return session.run(["logits"], {v.name: fed[v.name] for v in session.get_inputs()})[0][0]


def constants(graph, **values):
    """Add initializers; returns their names."""
    graph.initializer.extend(numpy_helper.from_array(np.array(value, np.int64), name) for name, value in values.items())
    return list(values)


def behind_states(op, *values, **attributes):
    """Return a change that puts a node between each state and its readers; `values` are its other inputs."""

    def change(graph):
        others = constants(graph, **{f"other_{i}": value for i, value in enumerate(values) if value is not None})
        for state in STATES:
            for node in graph.node:
                node.input[:] = [f"{state}.same" if name == state else name for name in node.input]
            made = helper.make_node(op, [state, *others], [f"{state}.same"], name=f"{op}.{state}", **attributes)
            graph.node.insert(0, made)

    return change


def before_outputs(graph):
    """Put an Identity between each new state and its output."""
    for state in STATES:
        present = state.replace("past_key_values", "present")
        for node in graph.node:
            for values in (node.input, node.output):
                values[:] = [f"{present}.inner" if name == present else name for name in values]
        graph.node.append(helper.make_node("Identity", [f"{present}.inner"], [present], name=f"identity.{present}"))


def saved(tmp_path, change):
    model = onnx.load(SOURCE / "model.onnx")
    change(model.graph)
    onnx.save(model, tmp_path / "model.onnx")
    (tmp_path / "config.json").write_text((SOURCE / "config.json").read_text())
    return tmp_path, model


LARGEST = np.iinfo(np.int64).max


@pytest.mark.sampled(every=11)
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(behind_states("Concat", axis=2), id="Concat"),  # torch.onnx.export of a DynamicCache
        *(pytest.param(behind_states(op), id=op) for op in ("Identity", "Sum", "Max", "Min", "Mean", "Dropout")),
        pytest.param(behind_states("Cast", to=TensorProto.FLOAT), id="Cast"),
        pytest.param(behind_states("Transpose", perm=[0, 1, 2, 3]), id="Transpose"),
        pytest.param(behind_states("Reshape", [0, 2, -1, 16]), id="Reshape"),
        pytest.param(behind_states("Expand", [1, 1, 1, 1]), id="Expand"),
        pytest.param(behind_states("Tile", [1, 1, 1, 1]), id="Tile"),
        pytest.param(behind_states("Slice", [0], [LARGEST], [2], [1]), id="Slice of rows"),
        pytest.param(behind_states("Slice", [0, 0], [16, LARGEST], [3, 2]), id="Slice of columns"),
        pytest.param(before_outputs, id="Identity before outputs"),
    ],
)
def test_identity_node_is_no_obstacle(tmp_path, change):
    folder, model = saved(tmp_path, change)
    tokens = np.random.default_rng(5).integers(0, 104, 21)
    with chunkrt.load(folder, npu="reference", scheme="float", chunk_length=8) as engine:
        found = engine.session().prefill(tokens.tolist(), logits="all").logits
    np.testing.assert_allclose(found, original_logits(model, tokens), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(behind_states("Slice", [0], [64], [2], [1]), id="Slice of 64 rows"),
        pytest.param(behind_states("Slice", [-1], [-LARGEST], [2], [-1]), id="Slice backwards"),
        pytest.param(behind_states("Transpose", perm=[1, 0, 2, 3]), id="Transpose"),
        pytest.param(behind_states("Cast", to=TensorProto.FLOAT16), id="Cast"),
    ],
)
def test_node_that_may_change_its_input_is_not_removed(tmp_path, change):
    folder, _ = saved(tmp_path, change)
    with pytest.raises(chunkrt.errors.ModelError):
        import_decoder(folder)


def fixed(name, axis, size):
    def change(graph):
        value = next(value for value in graph.input if value.name == name)
        value.type.tensor_type.shape.dim[axis].dim_value = size

    return change


@pytest.mark.parametrize(
    ("name", "axis"), [("input_ids", 1), ("attention_mask", 1), (STATES[0], 2), (STATES[3], 2), ("position_ids", 1)]
)
@pytest.mark.parametrize("size", [1, 8])
def test_fixed_length_input_is_refused_in_one_line(tmp_path, name, axis, size):
    folder, _ = saved(tmp_path, fixed(name, axis, size))
    message = (
        rf"^model\.onnx: {name} has a fixed length of {size}, and that of \S+ does not match it; "
        r"export it with dynamic axes$"
    )
    with pytest.raises(UnsupportedModelError, match=message):
        import_decoder(folder)


@pytest.mark.parametrize("name", ["input_ids", "attention_mask", STATES[1]])
def test_input_of_several_sequences_is_refused(tmp_path, name):
    folder, _ = saved(tmp_path, fixed(name, 0, 4))
    with pytest.raises(UnsupportedModelError, match=rf"{name} has a fixed batch of 4; export it with a batch of 1"):
        import_decoder(folder)


def test_fixed_batch_of_one_is_accepted(tmp_path):
    folder, _ = saved(tmp_path, fixed("input_ids", 0, 1))
    import_decoder(folder)
