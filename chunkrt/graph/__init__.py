"""Decoders as graphs: module trees, placement, tracing and partition into the subgraphs of a plan."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Import `load_module`, which needs the layers above this package, at its first use."""
    if name != "load_module":
        raise AttributeError(f"module 'chunkrt.graph' has no attribute {name!r}")
    return import_module("chunkrt.simulate.module_tree").load_module
