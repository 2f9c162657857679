"""Decoders as ONNX files for other tools: a fixed window with caches in and out, or ONNX Runtime GenAI's dynamic form."""

from chunkrt.onnx_export.settings import DynamicSettings, WindowSettings
from chunkrt.onnx_export.window import window_model

__all__ = ["DynamicSettings", "WindowSettings", "window_model"]
