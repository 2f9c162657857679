"""Checkpoints as sources of tensors: safetensors, GGUF; and the catalogue."""
