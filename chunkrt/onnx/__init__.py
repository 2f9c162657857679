"""Import of ONNX decoders from other tools, and export of chunkrt's."""
