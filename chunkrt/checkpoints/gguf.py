"""A GGUF file as a `TensorSource`: memory-mapped, read tensor by tensor, under Hugging Face's names."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from chunkrt.checkpoints.gguf_header import GgufHeader, GgufTensor, read_header
from chunkrt.checkpoints.gguf_keys import Keys
from chunkrt.checkpoints.gguf_layout import AS_IT_IS, Layout
from chunkrt.checkpoints.gguf_names import EACH, find_architecture, translate_config, translate_name
from chunkrt.checkpoints.source import (
    BLOCK_DEPTH,
    BLOCK_TYPES,
    BlockTensor,
    Refuse,
    TensorInfo,
    map_file,
    spread,
    strictly,
)
from chunkrt.errors import ModelError, QuantizationError, UnsupportedModelError

MOST_PARTS = 4096
"""Tensors that one may stack up: experts."""

Q4_0_ZERO = 8
"""Q4_0 has no minima: w = (integer - 8) * scale."""


class GgufSource:
    """A GGUF checkpoint. `rope_freqs.weight`, which divides the inverse frequencies, keeps its GGUF name.

    Args:
        path: a GGUF file, version 2 or 3, little-endian, in one piece.
        refuse: told of what is not implemented; by default it raises that. If it does not, a refused key is passed
            over, and so is a tensor that the architecture lacks. Where the config cannot be told, `architecture` and
            the names of tensors are the file's own, and `config` is empty.

    Raises:
        ModelError: the file is not GGUF, is truncated, or its header contradicts itself or the file's size.
        UnsupportedModelError: an architecture or a feature of it that is not implemented.
    """

    path: Path
    architecture: str
    config: Mapping[str, Any]
    metadata: Mapping[str, Any]
    """GGUF's own keys, "tokenizer.ggml.tokens" among them; a value is decoded each time it is read."""

    def __init__(self, path: str | os.PathLike[str], *, refuse: Refuse = strictly) -> None:
        self.path = Path(path)
        self._data = map_file(self.path)
        header = read_header(self._data, self.path)
        self.metadata = header.metadata
        if (parts := self.metadata.get("split.count", 0)) not in (0, 1):
            raise UnsupportedModelError(
                f"{self.path} is one of {parts} parts; join them first (llama-gguf-split --merge)"
            )
        self.architecture, self.config = str(self.metadata.get("general.architecture")), {}
        self._tensors: dict[str, tuple[GgufTensor, Layout]] = {n: (t, AS_IT_IS) for n, t in header.tensors.items()}
        refusals: list[UnsupportedModelError] = []
        try:
            self._translate(header, refusals.append)
        except UnsupportedModelError as error:
            refusals.append(error)
        except ModelError as error:
            if not refusals:  # what contradicts itself without the refused keys may make sense with them
                raise ModelError(f"{self.path}: {error}") from error
        for refusal in refusals:
            refuse(UnsupportedModelError(f"{self.path}: {refusal}", feature=refusal.feature))

    def _translate(self, header: GgufHeader, refuse: Refuse) -> None:
        """The file's words in Hugging Face's. Raises as the constructor does, without the path."""
        architecture = find_architecture(self.metadata.get("general.architecture"))
        shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
        keys = Keys(self.metadata, shapes, lambda name: self._values(header.tensors[name]))
        config = translate_config(architecture, keys, refuse)
        tensors: dict[str, tuple[GgufTensor, Layout]] = {}
        for tensor in header.tensors.values():
            try:
                name, layout = translate_name(architecture, config, tensor)
            except UnsupportedModelError as refusal:
                refuse(refusal)
                continue
            for part_name, part in _parts(name, tensor):
                tensors[part_name] = (part, layout)
        self.architecture, self.config, self._tensors = architecture.model_type, config, tensors

    def names(self) -> Sequence[str]:
        """Every tensor, in the order of the file's table."""
        return list(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """Shape in Hugging Face's layout and GGUF's type, as in "Q4_K". Raises ModelError as `read` does."""
        tensor, layout = self._find(name)
        is_readable = _is_dequantised(tensor.type)
        return TensorInfo(shape=layout.shape(tensor.shape), stored_as=tensor.type.name, is_readable=is_readable)

    def read(self, name: str) -> NDArray[np.float32]:
        """One tensor, dequantised; a view of the file (read-only) where it is stored as float32.

        Raises:
            ModelError: there is no tensor of that name.
            UnsupportedModelError: the `gguf` package does not dequantise its type.
        """
        tensor, layout = self._find(name)
        return np.require(layout.restore(self._values(tensor)), requirements=["C"])

    def read_blocks(self, name: str) -> BlockTensor | None:
        """A tensor of Q4_0 or Q4_1 as it is stored; None for one of another type.

        Raises:
            ModelError: there is no tensor of that name.
            QuantizationError: a scale or a minimum is not finite; Q4_0's minimum is -8 times its scale. Or the file's
                order of columns is another one, and tears blocks apart.
        """
        tensor, layout = self._find(name)
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
        try:
            return layout.restore_blocks(BlockTensor(integers=integers, scales=scales, minima=minima))
        except QuantizationError as error:
            raise QuantizationError(f"{self.path}: tensor {tensor.name}: {error}") from error

    def sample(self, name: str) -> bytes:
        """See `TensorSource`."""
        return spread(self._stored_rows(self._find(name)[0]))

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

    def _find(self, name: str) -> tuple[GgufTensor, Layout]:
        if name not in self._tensors:
            raise ModelError(f"{self.path} has no tensor {name}")
        return self._tensors[name]


@cache
def _is_dequantised(kind: GGMLQuantizationType) -> bool:
    """Whether the `gguf` package has float32 for a type: it is asked for a block of zeros."""
    _, block_bytes = GGML_QUANT_SIZES[kind]
    try:
        with np.errstate(all="ignore"):
            dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _parts(name: str, tensor: GgufTensor) -> Iterator[tuple[str, GgufTensor]]:
    """A tensor under its name; or each of those that it stacks up, whose number goes where the name has EACH."""
    if name and EACH not in name:
        yield name, tensor
    elif name:
        num_parts, *shape = tensor.shape
        if num_parts > MOST_PARTS:
            raise ModelError(f"tensor {tensor.name} stacks up {num_parts} others; at most {MOST_PARTS} are believed")
        num_bytes = tensor.num_bytes // num_parts
        for index in range(num_parts):
            start = tensor.start + index * num_bytes
            part = replace(tensor, shape=tuple(shape), start=start, num_bytes=num_bytes)
            yield name.replace(EACH, str(index)), part
