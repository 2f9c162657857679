"""Checkpoints in the formats safetensors and GGUF as sources of tensors, and the catalogue."""
