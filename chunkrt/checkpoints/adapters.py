"""LoRA adapters: products of two small matrices that are added to the weights of linears.

    W' = W + scale * B @ A,   A [r, K], B [N, r], scale = alpha / r, or alpha / sqrt(r) with rank-stabilised scaling

An adapter is a folder of PEFT (`peft_folder.py`) or a GGUF file (`gguf_adapter.py`). Sources: Hu et al., LoRA (2021),
section 4.1; Kalajdzievski, rsLoRA (2023), theorem 3.2; the library PEFT, `LoraLayer.get_delta_weight`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from chunkrt.checkpoints.checkpoint import MAGIC, first_bytes
from chunkrt.checkpoints.source import BlockTensor, TensorInfo, TensorSource
from chunkrt.errors import ModelError

CONFIG = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
"""Names of the file with all tensors of a PEFT folder, in order of preference."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LowRank:
    """A product scale * b @ a that is added to a weight [N, K].

    Attributes:
        a: float32 [r, K].
        b: float32 [N, r].
        scale: factor of the product.
        base: the weight to which the product is added, if the adapter has a copy of it.
    """

    a: NDArray[np.float32]
    b: NDArray[np.float32]
    scale: float
    base: NDArray[np.float32] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the weight, [N, K]."""
        return len(self.b), self.a.shape[1]

    def delta(self) -> NDArray[np.float32]:
        """Return the product, float32 [N, K]."""
        return np.float32(self.scale) * (self.b @ self.a)


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter: its path, and its products by the names of the tensors in Hugging Face's vocabulary."""

    path: Path
    products: Mapping[str, LowRank]


class Base(Protocol):
    """The checkpoint of an adapter; if it is a GGUF file, it also has `metadata`."""

    @property
    def path(self) -> Path:
        """Path for messages."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """Hugging Face's config keys."""
        ...


def read_adapter(path: Path, base: Base) -> Adapter:
    """Read an adapter for a checkpoint; the format is determined by the content.

    Args:
        base: the checkpoint, whose config determines the order of rows of a GGUF adapter.

    Raises:
        ModelError: `path` is no adapter, or is damaged.
        UnsupportedModelError: the adapter is intact, but uses a feature that is not implemented.
    """
    if path.is_dir():
        from chunkrt.checkpoints.peft_folder import read_products

        products = read_products(path)
    else:
        start = first_bytes(path, f"the adapter {path}")
        if start != MAGIC:
            raise ModelError(f"the adapter {path} is not a GGUF file (it starts with {start!r}); name a folder of PEFT")
        from chunkrt.checkpoints.gguf_adapter import read_products as read_gguf

        products = read_gguf(path, base)
    if not products:
        raise ModelError(f"the adapter {path} has no tensors")
    for name, product in products.items():
        if not (np.isfinite(product.a).all() and np.isfinite(product.b).all() and np.isfinite(product.scale)):
            raise ModelError(f"the adapter {path} holds values for {name} that are not finite; it is damaged")
    return Adapter(path=path, products=products)


def adapter_files(path: Path) -> list[Path]:
    """Return the files of an adapter that exist: a GGUF file, or the config and the tensors of a PEFT folder."""
    if not path.is_dir():
        return [path]
    weights = next((path / name for name in WEIGHT_FILES if (path / name).exists()), path / WEIGHT_FILES[0])
    return [file for file in (path / CONFIG, weights) if file.exists()]


class AdaptedSource:
    """A checkpoint whose weights contain the products of an adapter.

    Weights with a product appear as float32; all other tensors are those of the checkpoint.

    Args:
        source: the checkpoint.
        adapter: the adapter, whose products have the names and shapes of tensors of the checkpoint.
    """

    path: Path
    architecture: str
    config: Mapping[str, Any]

    def __init__(self, source: TensorSource, adapter: Adapter) -> None:
        self.path, self.architecture, self.config = source.path, source.architecture, source.config
        if (metadata := getattr(source, "metadata", None)) is not None:
            self.metadata: Mapping[str, Any] = metadata
        self.adapter = adapter
        self._source, self._products = source, adapter.products

    def names(self) -> Sequence[str]:
        """See `TensorSource`."""
        return self._source.names()

    def info(self, name: str) -> TensorInfo:
        """See `TensorSource`."""
        info = self._source.info(name)
        return TensorInfo(shape=info.shape, stored_as="F32") if name in self._products else info

    def read(self, name: str) -> NDArray[np.float32]:
        """See `TensorSource`."""
        product = self._products.get(name)
        if product is None:
            return self._source.read(name)
        return (self._source.read(name) if product.base is None else product.base) + product.delta()

    def read_blocks(self, name: str) -> BlockTensor | None:
        """See `TensorSource`. A weight with a product has no blocks."""
        return None if name in self._products else self._source.read_blocks(name)

    def stored(self, name: str) -> NDArray[np.uint8]:
        """See `TensorSource`. The bytes of a weight with a product are those of its float32 values."""
        return self.read(name).view(np.uint8) if name in self._products else self._source.stored(name)


def adapter_of(source: TensorSource) -> Path | None:
    """Return the path of the adapter that a source applies; None if it applies none."""
    return source.adapter.path if isinstance(source, AdaptedSource) else None
