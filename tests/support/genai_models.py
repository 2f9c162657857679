"""Decoders of ONNX Runtime GenAI's builder in tests/data/onnx: load, save and compare them with ONNX Runtime."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

import chunkrt

FIXTURES = Path(__file__).parents[1] / "data" / "onnx"
LENGTHS = (1, 31, 33, 95)
TOLERANCE, FLOAT16_TOLERANCE = 1e-4, 2e-2
"""Tolerances as shares of the largest logit: sums of at most 64 products, twice per layer; float16 has 11 bits."""


def load(name):
    """Return a fixture with its data, which a test may change."""
    return onnx.load(FIXTURES / name / "model.onnx")


def saved(model, folder, name="genai_llama_fp32"):
    (folder / "genai_config.json").write_bytes((FIXTURES / name / "genai_config.json").read_bytes())
    onnx.save(model, folder / "model.onnx")
    return folder


def original_logits(model, tokens):
    session = ort.InferenceSession(model.SerializeToString())
    fed = {"input_ids": tokens[None], "attention_mask": np.ones((1, len(tokens)), np.int64)}
    for value in session.get_inputs():
        if value.name.startswith("past"):
            dtype = np.float16 if "float16" in value.type else np.float32
            of_heads = [1, value.shape[1], 0, 16]  # heads of all fixtures have 16 columns
            fed[value.name] = np.zeros([1, *value.shape[1:]] if "conv" in value.name else of_heads, dtype)
    return session.run(["logits"], fed)[0][0].astype(np.float32)


def assert_agrees(folder, model, tolerance=TOLERANCE):
    with chunkrt.load(folder, npu="reference", scheme="float", chunk_length=32) as engine:
        for length in LENGTHS:
            tokens = np.random.default_rng(length).integers(0, 104, length)
            found = engine.session().prefill(tokens.tolist(), logits="all").logits
            expected = original_logits(model, tokens)
            np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())
