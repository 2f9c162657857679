"""Decoders that torch exports by hand compute the logits of the export with a cache on ONNX Runtime."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

import chunkrt
from chunkrt.errors import UnsupportedModelError
from chunkrt.onnx.importing import import_decoder

FIXTURES = Path(__file__).parents[1] / "data" / "onnx"
ORIGINAL = FIXTURES / "torch_cache_fp32" / "model.onnx"
FORMS = sorted(folder.name.removeprefix("torch_") for folder in FIXTURES.glob("torch_*"))
NUM_SLOTS = 32
"""Number of tokens that the fixed windows and their pasts have together."""
CONTEXTS = {"window_48_fp32": 64}
TOLERANCES = {"fp32": 1e-5, "fp16": 2e-2}
"""Tolerances relative to the largest logit: different orders of summation, and weights in float16."""


def original_logits(tokens):
    session = ort.InferenceSession(ORIGINAL)
    fed = {
        "input_ids": tokens[None],
        "attention_mask": np.ones((1, tokens.size), np.int64),
        "position_ids": np.arange(tokens.size)[None],
    }
    empty = [value for value in session.get_inputs() if value.name not in fed]
    fed |= {value.name: np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32) for value in empty}
    return session.run(["logits"], fed)[0][0]


def changed(tmp_path, form, change):
    """Save a form's model with a change to its graph."""
    model = onnx.load(FIXTURES / f"torch_{form}" / "model.onnx")
    change(model.graph)
    (tmp_path / "config.json").write_bytes((FIXTURES / f"torch_{form}" / "config.json").read_bytes())
    onnx.save(model, tmp_path / "model.onnx")
    return tmp_path


@pytest.mark.parametrize("form", FORMS)
def test_import_computes_the_logits_of_the_export_with_a_cache(form):
    tokens = np.random.default_rng(7).integers(0, 104, NUM_SLOTS)
    expected = original_logits(tokens)
    with chunkrt.load(FIXTURES / f"torch_{form}", npu="reference", scheme="float", chunk_length=5) as engine:
        found = engine.session().prefill(tokens.tolist(), logits="all").logits
        assert engine.plan.context_length == CONTEXTS.get(form, NUM_SLOTS if "window" in form else 128)
    limit = TOLERANCES[form.split("_")[-1]] * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=limit)


def test_fixed_window_that_sees_later_tokens_is_refused(tmp_path):
    def see_all(graph):
        """Replace the comparison that hides the keys of later tokens by the constant True."""
        compare = next(node for node in graph.node if node.op_type == "LessOrEqual")
        seen = np.ones((1, 1, 8, NUM_SLOTS), np.bool_)
        graph.initializer.append(numpy_helper.from_array(seen, compare.output[0]))
        graph.node.remove(compare)

    with pytest.raises(UnsupportedModelError, match=r"model\.onnx: .* is not a causal mask: for 8 tokens after 24"):
        import_decoder(changed(tmp_path, "window_8_fp32", see_all))


def test_fixed_window_that_keeps_its_oldest_tokens_is_refused(tmp_path):
    def keep_the_oldest(graph):
        """Make the new value of a state begin with its first token, and end before the window's tokens."""
        constants = {node.output[0]: node.attribute[0].t for node in graph.node if node.op_type == "Constant"}
        present = next(node for node in graph.node if "present.0.key" in node.output)
        for index, bound in ((1, 0), (2, NUM_SLOTS - 8)):
            tensor = constants[present.input[index]]
            values = np.full_like(numpy_helper.to_array(tensor), bound)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))

    with pytest.raises(UnsupportedModelError, match=r"'present\.0\.key' does not contain the window's last tokens"):
        import_decoder(changed(tmp_path, "window_8_kept_fp32", keep_the_oldest))


def test_fixed_window_with_lengths_that_do_not_match_is_refused(tmp_path):
    def shorten(graph):
        mask = next(value for value in graph.input if value.name == "attention_mask")
        mask.type.tensor_type.shape.dim[1].dim_value = NUM_SLOTS - 1

    message = r"^model\.onnx: input_ids has a fixed length of 8, and that of attention_mask does not match it; export"
    with pytest.raises(UnsupportedModelError, match=message):
        import_decoder(changed(tmp_path, "window_8_fp32", shorten))
