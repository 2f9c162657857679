"""The static subgraphs between layers of linear attention, on the NPU's emulator."""

import numpy as np
import pytest
from fixture_checkpoints import checkpoint

from chunkrt.backends.qnn import QnnBackend, find_soc, open_htp
from chunkrt.backends.reference import ReferenceBackend
from chunkrt.calibrate import calibrate
from chunkrt.compiler import plan_checkpoint
from chunkrt.quant.scheme import SCHEMES
from chunkrt.quant.weights import write_weights
from chunkrt.weights.store import WeightStore

pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn, which emulates the NPU, is not installed")
if not open_htp().is_emulated:
    pytest.skip("this machine has an NPU, and a compiler for that NPU alone", allow_module_level=True)

CHUNK = 8
W8A16 = SCHEMES["w8a16"]
TOLERANCE = 2.0**-6
"""Of the root mean square: float16 on both sides of some twenty operators."""


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "qwen3_5"])
def test_a_static_subgraph_on_htp_is_what_the_reference_computes(name, index, tmp_path):
    """Before the first layer's state and after it: gates, norms and projections of both kinds of layers."""
    planned = plan_checkpoint(checkpoint(name), {})
    plan = planned.plan
    rng = np.random.default_rng(0)
    found = calibrate(plan, planned.load, rng.integers(0, plan.vocab_size, plan.context_length), model=name)
    write_weights(plan, W8A16, planned.load, tmp_path / "weights", calibration=found)
    weights = WeightStore.open(tmp_path / "weights")
    subgraph = plan.static_subgraphs[index]

    def run(backend):
        executable = backend.compile(subgraph, plan, CHUNK, W8A16, weights)
        outputs = {n: np.empty((CHUNK, plan.tensors[n].shape[1]), np.float32) for n in subgraph.outputs}
        executable.run(inputs, outputs)
        return outputs

    inputs = {
        n: rng.standard_normal((CHUNK, plan.tensors[n].shape[1])).astype(np.float32) for n in subgraph.inputs
    }
    on_npu, expected = run(QnnBackend(find_soc("SM8650"), contexts=tmp_path / "contexts")), run(ReferenceBackend())
    for output, values in expected.items():
        error = np.sqrt(np.mean((on_npu[output] - values) ** 2) / np.mean(values**2))
        assert error < TOLERANCE, output
