"""A GGUF file as a `TensorSource`: memory-mapped, read tensor by tensor, under Hugging Face's names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

from chunkrt.errors import ModelError, QuantizationError, UnsupportedModelError
from chunkrt.weights.gguf_header import GgufTensor, read_header
from chunkrt.weights.gguf_keys import Keys
from chunkrt.weights.gguf_names import find_architecture, translate_config, translate_name
from chunkrt.weights.mapping import map_file
from chunkrt.weights.source import BLOCK_DEPTH, BLOCK_TYPES, BlockTensor, TensorInfo

Scalar = TypeVar("Scalar", bound=np.generic)

Q4_0_ZERO = 8
"""Q4_0 has no minima: w = (integer - 8) * scale."""


class GgufSource:
    """A GGUF checkpoint. `rope_freqs.weight`, which divides the inverse frequencies, keeps its GGUF name.

    Args:
        path: a GGUF file, version 2 or 3, little-endian, in one piece.

    Raises:
        ModelError: the file is not GGUF, is truncated, or its header contradicts itself or the file's size.
        UnsupportedModelError: an architecture or a feature of it that is not implemented.
    """

    path: Path
    architecture: str
    config: Mapping[str, Any]
    metadata: Mapping[str, Any]
    """GGUF's own keys, "tokenizer.ggml.tokens" among them; a value is decoded each time it is read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._data = map_file(self.path)
        header = read_header(self._data, self.path)
        self.metadata = header.metadata
        if (parts := self.metadata.get("split.count", 0)) not in (0, 1):
            raise UnsupportedModelError(
                f"{self.path} is one of {parts} parts; join them first (llama-gguf-split --merge)"
            )
        shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
        try:
            architecture = find_architecture(self.metadata.get("general.architecture"))
            keys = Keys(self.metadata, shapes, lambda name: self._values(header.tensors[name]))
            self.config = translate_config(architecture, keys)
            names = [translate_name(architecture, name) for name in shapes]
        except ModelError as error:
            raise type(error)(f"{self.path}: {error}") from error
        self.architecture = architecture.model_type
        self._tensors: dict[str, tuple[GgufTensor, int | None]] = {}
        for tensor, (name, heads_key) in zip(header.tensors.values(), names, strict=True):
            if not name:
                continue
            num_heads = self.config[heads_key] if heads_key else None
            if num_heads and tensor.shape[0] % (2 * num_heads):
                raise ModelError(
                    f"{self.path}: {tensor.name} has {tensor.shape[0]} rows, which {num_heads} heads "
                    "of an even length cannot share"
                )
            self._tensors[name] = (tensor, num_heads)

    def names(self) -> Sequence[str]:
        """Every tensor, in the order of the file's table."""
        return list(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """Shape in Hugging Face's layout and GGUF's type, as in "Q4_K". Raises ModelError as `read` does."""
        tensor, _ = self._find(name)
        return TensorInfo(shape=tensor.shape, stored_as=tensor.type.name)

    def read(self, name: str) -> NDArray[np.float32]:
        """One tensor, dequantised; a view of the file (read-only) where it is stored as float32.

        Raises:
            ModelError: there is no tensor of that name.
            UnsupportedModelError: the `gguf` package does not dequantise its type.
        """
        tensor, permuted_heads = self._find(name)
        values = self._values(tensor)
        return np.require(_unpermute(values, permuted_heads) if permuted_heads else values, requirements=["C"])

    def read_blocks(self, name: str) -> BlockTensor | None:
        """A tensor of Q4_0 or Q4_1 as it is stored; None for one of another type.

        Raises:
            ModelError: there is no tensor of that name.
            QuantizationError: a scale or a minimum is not finite; Q4_0's minimum is -8 times its scale.
        """
        tensor, permuted_heads = self._find(name)
        if tensor.type.name not in BLOCK_TYPES:
            return None
        num_floats = 2 if tensor.type.name == "Q4_1" else 1
        rows = self._stored_rows(tensor)
        blocks = rows.reshape(*tensor.shape[:-1], -1, 2 * num_floats + BLOCK_DEPTH // 2)
        floats = np.ascontiguousarray(blocks[..., : 2 * num_floats]).view("<f2")
        packed = blocks[..., 2 * num_floats :]
        integers = np.concatenate([packed & 15, packed >> 4], axis=-1).reshape(tensor.shape)
        scales = floats[..., 0]
        with np.errstate(over="ignore", invalid="ignore"):
            minima = floats[..., 1] if num_floats == 2 else scales * np.float16(-Q4_0_ZERO)
        if not (np.isfinite(scales).all() and np.isfinite(minima).all()):
            raise QuantizationError(
                f"{self.path}: tensor {tensor.name} has scales or minima that float16 cannot hold; "
                "is the checkpoint damaged? if not, use the scheme 'w8a8-dynamic'"
            )
        if permuted_heads:
            integers, scales, minima = (_unpermute(rows, permuted_heads) for rows in (integers, scales, minima))
        return BlockTensor(integers=integers, scales=scales, minima=minima)

    def _values(self, tensor: GgufTensor) -> NDArray[np.float32]:
        """Dequantised, in the file's order of rows."""
        try:
            with np.errstate(all="ignore"):
                values = dequantize(self._stored_rows(tensor), tensor.type)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"{self.path}: tensor {tensor.name} is stored as {tensor.type.name}, which is not dequantised"
            ) from error
        return np.require(values, np.float32, ["C", "ALIGNED"])

    def _stored_rows(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """The bytes of each row."""
        stored = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.start)
        return stored.reshape(*tensor.shape[:-1], -1)

    def _find(self, name: str) -> tuple[GgufTensor, int | None]:
        if name not in self._tensors:
            raise ModelError(f"{self.path} has no tensor {name}")
        return self._tensors[name]


def _unpermute(rows: NDArray[Scalar], num_heads: int) -> NDArray[Scalar]:
    """Rows ordered for interleaved RoPE (pairs adjacent) back to Hugging Face's rotate-half order."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
