"""Import of decoders that other tools exported to ONNX.

    reading -> signature -> passes/ (each converts one construct) -> names -> module tree

The result has the form of a decoder that `graph/decoders` builds from a checkpoint's config: a tree of modules over a
`TensorSource`, which can be placed, traced and partitioned. An unknown operator is an error; the import never guesses.
docs/onnx-import.md lists the supported forms.
"""

from chunkrt.onnx.importing.import_check import verify
from chunkrt.onnx.importing.importing import import_decoder
from chunkrt.onnx.importing.onnx_source import OnnxSource

__all__ = ["OnnxSource", "import_decoder", "verify"]
