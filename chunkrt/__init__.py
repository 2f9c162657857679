"""chunkrt: a heterogeneous CPU/NPU chunked-prefill runtime for decoder language models."""
