"""Subgraphs as ONNX models, and the backend that runs them with ONNX Runtime."""
