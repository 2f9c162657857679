"""A static subgraph of every family on the emulated NPU: it is compiled completely, and equals the reference. Graphs of
few rows have the same bits.
"""

import numpy as np
import pytest
from calibrated import calibrated
from fixture_checkpoints import checkpoint, input_ids
from run_up_to import run_up_to

import chunkrt
from chunkrt.backends.qnn import QnnBackend, find_soc, open_htp
from chunkrt.backends.qnn.htp_support import FEW_ROWS

pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn, which emulates the NPU, is not installed")
if not open_htp().is_emulated:
    pytest.skip("this machine has an NPU, and a compiler for that NPU alone", allow_module_level=True)

CHUNK, SCHEME, SUBGRAPH = 32, "w8a16", "static.1"
TOLERANCE = 2 * 10**0.5 * 2.0**-11 / 3**0.5
"""Tolerance of an output (root mean square): twice the error of ten roundings to float16, each up to 2^-11 of a
value."""
OPERATORS_OF = {
    "bamba": {"Sigmoid"},
    "ernie4_5_biased": {"Sigmoid"},
    "ernie4_5_moe": {"Sigmoid"},
    "exaone4_hybrid": {"Sigmoid"},
    "falcon_h1": {"Sigmoid"},
    "gemma": {"Gelu"},
    "gemma2": {"Gelu"},
    "gemma3_scaled": {"Gelu"},
    "gemma4": {"Gelu"},
    "gemma4_experts": {"MatMul"},
    "glm": {"Sigmoid"},
    "glm4": {"Sigmoid"},
    "gpt2": {"Gelu", "LayerNormalization"},
    "gpt_oss": {"Add"},
    "granite": {"Sigmoid"},
    "granite_hybrid_mamba": {"Sigmoid"},
    "granite_hybrid": {"Sigmoid"},
    "helium": {"Sigmoid"},
    "lfm2": {"Sigmoid"},
    "lfm3": {"Sigmoid"},
    "mamba2": {"MatMul"},
    "minicpm": {"Sigmoid"},
    "minicpm3": {"Sigmoid"},
    "mistral_window_5": {"Sigmoid"},
    "nemotron_h": {"Relu"},
    "olmo2": {"Sigmoid"},
    "olmo3": {"Sigmoid"},
    "opt": {"LayerNormalization", "Relu"},
    "phi3_window_5": {"Sigmoid"},
    "qwen2": {"Sigmoid"},
    "qwen3": {"Sigmoid"},
    "qwen3_5": {"Sigmoid"},
    "qwen3_next": {"Sigmoid"},
    "smollm3": {"Sigmoid"},
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", OPERATORS_OF)
def test_layer_equals_the_reference(name, tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))
    tokens = np.array(input_ids(name))
    calibrated(name, tmp_path / "calibration.npz", tokens)
    options = {"npu": "reference", "scheme": SCHEME, "calibration": tmp_path / "calibration.npz"}
    with chunkrt.load(checkpoint(name), chunk_length=CHUNK, **options) as engine:
        subgraph = next(subgraph for subgraph in engine.plan.subgraphs if subgraph.name == SUBGRAPH)
        values = run_up_to(engine, subgraph, tokens[:CHUNK])
        assert {node.op for node in subgraph.nodes} >= OPERATORS_OF[name] | {"MatMul"}
        assert {node.op for node in subgraph.nodes} & {"LayerNormalization", "RMSNormalization"}
        backend = QnnBackend(find_soc("SM8650"), contexts=tmp_path / "contexts")
        executable, *small = (
            backend.compile(subgraph, engine.plan, rows, engine.scheme, engine.loaded.weights)
            for rows in (CHUNK, *FEW_ROWS)
        )
    found = {output: np.zeros_like(values[output]) for output in subgraph.outputs}
    executable.run({given: values[given] for given in subgraph.inputs}, found)
    for output in subgraph.outputs:
        off = np.sqrt(np.mean((found[output] - values[output]) ** 2) / np.mean(values[output] ** 2))
        assert off < TOLERANCE, f"{output} is off by {off:.5f} of its root mean square"
    for rows, each in zip(FEW_ROWS, small, strict=True):
        same = {output: np.zeros_like(values[output][:rows]) for output in subgraph.outputs}
        each.run({given: values[given][:rows] for given in subgraph.inputs}, same)
        for output in subgraph.outputs:
            np.testing.assert_array_equal(same[output], found[output][:rows], err_msg=f"{output}, {rows} rows")
