"""A chunkrt backend: static subgraphs on a GPU, or on the CPU, with PyTorch's products of int8."""

from __future__ import annotations

import torch

from chunkrt_torch.backend import TorchBackend

__all__ = ["TorchBackend", "make"]


def make(*, threads: int) -> TorchBackend:
    """Make the backend `torch`, on the first CUDA device if there is one.

    Args:
        threads: number of threads that PyTorch may use without a GPU; for the complete process, because PyTorch has no
            other setting.
    """
    if torch.cuda.is_available():
        return TorchBackend(torch.device("cuda"))
    torch.set_num_threads(threads)
    return TorchBackend(torch.device("cpu"))
