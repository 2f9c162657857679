"""Tables of an odd number of values keep every weight aligned for the native kernels."""

import numpy as np
from random_folders import write_folder

import chunkrt

SIZES = {"hidden_size": 65, "vocab_size": 127, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}


def test_native_runs_a_table_with_an_odd_number_of_values(tmp_path):
    folder = write_folder(tmp_path / "m", **SIZES)
    ids = list(range(5, 40))
    found = []
    for npu, scheme in (("native", "w8a8-dynamic"), ("reference", "w8a8-dynamic"), ("reference", "float")):
        with chunkrt.load(folder, npu=npu, scheme=scheme, cache_dtype="float32") as engine:
            found.append(engine.session().prefill(ids, logits="all").logits)
    native, reference, exact = found
    np.testing.assert_allclose(native, reference, rtol=0, atol=1e-3)
    assert np.abs(native - exact).max() < 0.2 * np.abs(exact).max()
