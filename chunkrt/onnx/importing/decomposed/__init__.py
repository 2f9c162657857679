"""Decoders whose exporter wrote attention, norms or GELU as many small operators."""

from chunkrt.onnx.importing.decomposed.composing import compose, is_written_out

__all__ = ["compose", "is_written_out"]
