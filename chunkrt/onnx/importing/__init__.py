"""Decoders that somebody else exported to ONNX, read as chunkrt's own.

    reading -> signature -> passes/ (one meaning raised at a time) -> names -> a module tree

What comes out is what `graph/decoders` builds from a checkpoint's config: a tree of modules that can be placed, traced
and cut, over a `TensorSource`. An operator that is not understood is an error; nothing is guessed. docs/onnx-import.md
has what is understood.
"""

from chunkrt.onnx.importing.importing import import_decoder, is_onnx
from chunkrt.onnx.importing.source import OnnxSource
from chunkrt.onnx.importing.verification import verify

__all__ = ["OnnxSource", "import_decoder", "is_onnx", "verify"]
