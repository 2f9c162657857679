"""Decoders whose exporter knew no operator for attention, norms or quantised products, and wrote them out."""

from chunkrt.onnx_import.decomposed.composing import compose, is_written_out
from chunkrt.onnx_import.decomposed.quantised import is_quantised, without_quantised_activations

__all__ = ["compose", "is_quantised", "is_written_out", "without_quantised_activations"]
