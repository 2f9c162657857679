"""Import of ONNX decoders that other tools exported, and export of chunkrt's decoders."""
