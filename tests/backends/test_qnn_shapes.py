"""Single layers of large models' shapes on the emulated NPU, with random weights."""

import sys
from pathlib import Path

import pytest

from chunkrt.backends.qnn import open_htp

pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn, which emulates the NPU, is not installed")
if not open_htp().is_emulated:
    pytest.skip("this machine has an NPU, and a compiler for that NPU alone", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("own_home")

TOLERANCE = 2.0**-6
"""Tolerance of logits against those of the CPU under the same scheme (root mean square): float16 between the linear
layers, and values that move to another step; later layers amplify the difference."""


@pytest.fixture(scope="module")
def npu_shapes():
    """The benchmark script, as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
        import npu_shapes

        yield npu_shapes
        del sys.modules["npu_shapes"]


def check(npu_shapes, folder, config, layers, scheme):
    npu_shapes.write_model(folder, config)
    npu_shapes.write_calibration(folder, folder / "calibration.npz")
    error, num_graphs = npu_shapes.layer_errors(
        folder, folder / "calibration.npz", layers, num_tokens=8, scheme=scheme, chunk_length=8, threads=2
    )
    assert num_graphs >= len(layers)
    assert 0 < error < TOLERANCE


SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 16}


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-1.7b"])
def test_script_checks_layers_of_a_small_shape(npu_shapes, tmp_path, name):
    config = {**npu_shapes.SHAPES[name], **SMALL, "num_key_value_heads": 2, "vocab_size": 8192}
    check(npu_shapes, tmp_path / "small", config, [0, 2], "w8a16")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.2-3b", "qwen3-1.7b"])
def test_layers_of_large_shapes_equal_the_cpu(npu_shapes, tmp_path, name):
    """All layers exist, and two of them are on the NPU; the vocabulary is short."""
    check(npu_shapes, tmp_path / name, npu_shapes.SHAPES[name], [0, 15], "w8a16")
