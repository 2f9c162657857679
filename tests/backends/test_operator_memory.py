"""Memory of linears in a plug-in's class, measured as the growth of a process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import chunkrt

CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
NUM_WEIGHTS = 4 * (1024 * (1024 + 2 * 256) + 1024 * 1024 + 3 * 1024 * 4096) + 1024 * 1024
"""Weights of all linears, the tied head included."""

MEASURED = """
import gc, json, sys
import chunkrt, numpy as np, psutil
from chunkrt.backends.dispatch import registered_operators
from chunkrt.quant.arithmetic import quantize_rows, take_outliers

model, form = sys.argv[1:]
num_prepared = 0


class Int8Linear:
    def __init__(self, node):
        self.depth, self.width = node.input_shapes[1]

    def prepare(self, weight):
        global num_prepared
        num_prepared += 1
        self.integers, self.scale = weight.integers, weight.scale
        assert self.integers.dtype == np.int8 and self.integers.shape == (self.depth, self.width)

    def __call__(self, left):
        outliers, rest = take_outliers(left)
        rows, step = quantize_rows(rest)
        result = np.empty((len(left), self.width), np.float32)
        for begin in range(0, self.width, 64):
            block = self.integers[:, begin : begin + 64].astype(np.int32)
            result[:, begin : begin + 64] = rows @ block * step + outliers @ block
        return result * self.scale


class FloatLinear(Int8Linear):
    def prepare(self, weight):
        self.weight = weight.dequantise()

    def __call__(self, left):
        return left @ self.weight


registry = registered_operators()
with registry.from_distribution("acme-ops"):
    for operator in ("linear", "logits"):
        registry.register(operator, "int8")(Int8Linear)
        registry.register(operator, "float")(FloatLinear)
process = psutil.Process()
gc.collect()
before = process.memory_info().rss
options = {"ops": f"linear={form},logits={form}", "attention_math": "float32", "chunk_length": 16, "threads": 1}
with chunkrt.load(model, npu="native", scheme="w8a8-dynamic", **options) as engine:
    session = engine.session()
    logits = [session.prefill(tokens).logits.tolist() for tokens in ([5, 9, 200, 31], [7], [8])]
    gc.collect()
    print(json.dumps([process.memory_info().rss - before, num_prepared, logits]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Write a checkpoint whose linears take 63 MB in int8."""
    folder, rng = tmp_path_factory.mktemp("wide"), np.random.default_rng(0)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tensors = {"model.embed_tokens.weight": (1024, 1024), "model.norm.weight": (1024,)}
    for layer in (f"model.layers.{index}" for index in range(4)):
        tensors |= {f"{layer}.self_attn.{name}_proj.weight": (1024, 1024) for name in "qo"}
        tensors |= {f"{layer}.self_attn.{name}_proj.weight": (256, 1024) for name in "kv"}
        tensors |= {f"{layer}.mlp.{name}_proj.weight": (4096, 1024) for name in ("gate", "up")}
        tensors |= {f"{layer}.mlp.down_proj.weight": (1024, 4096)}
        tensors |= {f"{layer}.{name}_layernorm.weight": (1024,) for name in ("input", "post_attention")}
    random = {name: rng.standard_normal(shape, np.float32) / shape[-1] ** 0.5 for name, shape in tensors.items()}
    save_file({name: array.astype(np.float16) for name, array in random.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="other systems count the pages of mapped files differently")
def test_linears_of_a_plugin_take_the_memory_of_native_linears(model):
    environment = {**os.environ, "PYTHONPATH": str(Path(chunkrt.__file__).parents[1])}
    environment |= {"OPENBLAS_NUM_THREADS": "1"}  # each thread has buffers

    def measure(form):
        command = [sys.executable, "-P", "-c", MEASURED, str(model), form]
        finished = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert finished.returncode == 0, finished.stderr
        return json.loads(finished.stdout)

    measure("native")  # compiles the model
    (native, _, expected), (int8, num_prepared, found), (in_float, *_) = map(measure, ("native", "int8", "float"))
    assert num_prepared == 4 * 4 + 1
    assert NUM_WEIGHTS < native < 1.3 * NUM_WEIGHTS
    assert abs(int8 - native) < 0.1 * NUM_WEIGHTS
    assert in_float > native + 2.5 * NUM_WEIGHTS
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3 * np.abs(expected).max())
