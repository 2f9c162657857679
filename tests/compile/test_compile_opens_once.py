"""A checkpoint is opened and analysed once, under every quantisation."""

import sys
from collections import Counter
from pathlib import Path

import onnx_ir as ir
import pytest
from fixture_checkpoints import checkpoint

from chunkrt.compile.compiler import compile_checkpoint
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.resolve import choose_recipe

ONNX = Path(__file__).parents[1] / "data" / "onnx"
SCHEMES = [
    {"scheme": "w8a8-dynamic"},
    {"scheme": "w8a16"},
    {"scheme": "w8a8", "shadow": "auto", "budget": 1.0},
]

_opened: Counter[str] | None = None


def _count(event, arguments):
    if _opened is not None and event == "open" and isinstance(arguments[0], str):
        _opened[arguments[0]] += 1


sys.addaudithook(_count)


def opened_by_compiling(path, tmp_path, options):
    """Count how often each file is opened while a checkpoint is compiled."""
    global _opened
    recipe = choose_recipe(EngineOptions(npu="native", **options), "w8a8-dynamic")
    _opened = Counter()
    try:
        compile_checkpoint(path, recipe, {}, tmp_path / "engine", model="toy")
        return _opened
    finally:
        _opened = None


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("options", SCHEMES, ids=lambda options: options["scheme"])
def test_gguf_file_is_opened_once(tmp_path, monkeypatch, options):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path))
    path = checkpoint("qwen3_gguf")
    opened = opened_by_compiling(path, tmp_path, options)
    keys = options["scheme"] != "w8a8-dynamic"
    assert opened[str(path)] == 3 + keys, "its first bytes, its map, its digest, and the key of its calibration"


@pytest.mark.sampled(every=9)
@pytest.mark.parametrize("options", SCHEMES, ids=lambda options: options["scheme"])
@pytest.mark.parametrize("name", ["genai_llama_fp32", "optimum_llama_fp32"])
def test_onnx_decoder_is_read_and_imported_once(tmp_path, monkeypatch, name, options):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path))
    graphs, from_proto = [], ir.from_proto
    monkeypatch.setattr(ir, "from_proto", lambda proto: graphs.append(proto) or from_proto(proto))
    opened = opened_by_compiling(ONNX / name, tmp_path, options)
    keys = options["scheme"] != "w8a8-dynamic"
    assert opened[str(ONNX / name / "model.onnx")] == 2 + keys, "its graph, its digest, the key of its calibration"
    assert len([proto for proto in graphs if type(proto).__name__ == "ModelProto"]) == 1
