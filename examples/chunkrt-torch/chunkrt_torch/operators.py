"""ONNX's operators in PyTorch, as far as static subgraphs use them.

Each takes a node's inputs in order and its attributes by name, and returns its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn import functional

from chunkrt_torch.linears import Linear

Tensors = Sequence[torch.Tensor]


def _matmul(left: torch.Tensor, right: Linear) -> Tensors:
    return [right.multiply(left)]


def _gelu(x: torch.Tensor, *, approximate: str) -> Tensors:
    return [functional.gelu(x, approximate=approximate)]


def _split(x: torch.Tensor, *, axis: int, num_outputs: int) -> Tensors:
    return torch.tensor_split(x, num_outputs, dim=axis)


def _rms_normalization(x: torch.Tensor, weight: torch.Tensor, *, axis: int, epsilon: float) -> Tensors:
    mean_square = x.double().square().mean(dim=axis, keepdim=True)
    return [(x / (mean_square + epsilon).sqrt() * weight).float()]


OPERATORS: Mapping[str, Callable[..., Tensors]] = {
    "Add": lambda left, right: [left + right],
    "Gelu": _gelu,
    "MatMul": _matmul,
    "Mul": lambda left, right: [left * right],
    "RMSNormalization": _rms_normalization,
    "Sigmoid": lambda x: [x.sigmoid()],
    "Softplus": lambda x: [functional.softplus(x)],
    "Split": _split,
    "Tanh": lambda x: [x.tanh()],
}
