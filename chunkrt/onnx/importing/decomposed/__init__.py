"""Decoders whose exporter knew no operator for attention, norms or GELU, and wrote them out."""

from chunkrt.onnx.importing.decomposed.composing import compose, is_written_out

__all__ = ["compose", "is_written_out"]
