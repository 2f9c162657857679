"""Subgraphs as ONNX models, and the backend that runs them by ONNX Runtime."""
