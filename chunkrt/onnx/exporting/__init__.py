"""Decoders as ONNX files for other tools: a fixed window with caches as inputs and outputs, ONNX Runtime GenAI's
dynamic form, or the static subgraphs of a plan."""

from chunkrt.onnx.exporting.checks import check_float16, check_integers
from chunkrt.onnx.exporting.export_settings import DynamicSettings, SubgraphSettings, WindowSettings
from chunkrt.onnx.exporting.forms import check_subgraph_outputs, dynamic_model, save_static_subgraphs, window_model
from chunkrt.onnx.exporting.save import (
    check_beside,
    check_output,
    genai_config,
    model_files,
    save_model,
    save_windows,
    tokenizer_files,
    write_beside,
)

__all__ = [
    "DynamicSettings",
    "SubgraphSettings",
    "WindowSettings",
    "check_beside",
    "check_float16",
    "check_integers",
    "check_output",
    "check_subgraph_outputs",
    "dynamic_model",
    "genai_config",
    "model_files",
    "save_model",
    "save_static_subgraphs",
    "save_windows",
    "tokenizer_files",
    "window_model",
    "write_beside",
]
