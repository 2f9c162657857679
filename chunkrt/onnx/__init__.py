"""ONNX decoders of other tools in, and chunkrt's out."""
