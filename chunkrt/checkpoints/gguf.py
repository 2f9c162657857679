"""GGUF files as sources of tensors: memory-mapped, and read tensor by tensor, under Hugging Face's names."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from chunkrt.checkpoints.checkpoint import map_file, parts_of
from chunkrt.checkpoints.gguf_header import GgufHeader, GgufTensor, read_header
from chunkrt.checkpoints.gguf_keys import NEXTN, Keys
from chunkrt.checkpoints.gguf_names import (
    AS_IT_IS,
    EACH,
    Layout,
    find_architecture,
    is_of_later_layer,
    translate_config,
    translate_name,
)
from chunkrt.checkpoints.source import BLOCK_DEPTH, BLOCK_TYPES, LEFT_OUT, BlockTensor, Refuse, TensorInfo, strictly
from chunkrt.errors import ModelError, QuantizationError, UnsupportedModelError

log = logging.getLogger(__name__)

MOST_PARTS = 4096
"""Largest number of tensors (experts) in one stacked tensor."""

Q4_0_ZERO = 8
"""Q4_0 has no minima: w = (integer - 8) * scale."""


class GgufSource:
    """A GGUF checkpoint. `rope_freqs.weight`, which divides the inverse frequencies, keeps its GGUF name.

    Args:
        path: a GGUF file, version 2 or 3, little-endian; for a file in several parts, any part.
        refuse: called with each unsupported feature; the default raises the error. If it returns, a refused key is
            skipped, and so is a tensor that the architecture lacks. If the config then cannot be derived,
            `architecture` and the names of tensors are the file's own, and `config` is empty.

    Raises:
        ModelError: the file is not GGUF, is truncated, or its header contradicts itself or the file's size.
        UnsupportedModelError: the architecture or one of its features is not implemented.
    """

    path: Path
    architecture: str
    config: Mapping[str, Any]
    metadata: Mapping[str, Any]
    """GGUF's own keys, including "tokenizer.ggml.tokens"; a value is decoded at each access."""

    def __init__(self, path: str | os.PathLike[str], *, refuse: Refuse = strictly) -> None:
        paths = parts_of(Path(path))
        self.path = paths[0]
        self._maps = [map_file(part) for part in paths]
        headers = [read_header(data, part) for data, part in zip(self._maps, paths, strict=True)]
        header = _joined(headers, paths)
        self.metadata = header.metadata
        self.architecture, self.config = str(self.metadata.get("general.architecture")), {}
        self._tensors: dict[str, tuple[GgufTensor, Layout]] = {n: (t, AS_IT_IS) for n, t in header.tensors.items()}
        refusals: list[UnsupportedModelError] = []
        try:
            self._translate(header, refusals.append)
        except UnsupportedModelError as error:
            refusals.append(error)
        except ModelError as error:
            if not refusals:  # keys that contradict each other without the refused keys may be consistent with them
                raise ModelError(f"{self.path}: {error}") from error
        for refusal in refusals:
            refuse(UnsupportedModelError(f"{self.path}: {refusal}", feature=refusal.feature))

    def _translate(self, header: GgufHeader, refuse: Refuse) -> None:
        """Translate the file's names and keys to Hugging Face's. Raises the constructor's errors, without the path."""
        if self.metadata.get("general.type") == "adapter":
            raise ModelError("it holds only an adapter; give its base model, and this file as `adapter`")
        architecture = find_architecture(self.metadata.get("general.architecture"))
        shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
        keys = Keys(self.metadata, shapes, lambda name: self._values(header.tensors[name]))
        config = translate_config(architecture, keys, refuse)
        tensors: dict[str, tuple[GgufTensor, Layout]] = {}
        num_layers, num_extra = config["num_hidden_layers"], keys.count(NEXTN, default=0)
        left_out = {name for name in header.tensors if num_extra and is_of_later_layer(name, num_layers)}
        if left_out:
            log.warning(LEFT_OUT, self.path.name, len(left_out), f"blk.{num_layers}.* and later")
        for tensor in (tensor for name, tensor in header.tensors.items() if name not in left_out):
            try:
                name, layout = translate_name(architecture, config, tensor)
            except UnsupportedModelError as refusal:
                refuse(refusal)
                continue
            for part_name, part in _parts(name, tensor):
                tensors[part_name] = (part, layout)
        self.architecture, self.config, self._tensors = config["model_type"], config, tensors

    def names(self) -> Sequence[str]:
        """Return the names of all tensors, in the order of the file's table."""
        return list(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """Return the shape in Hugging Face's layout and GGUF's type, e.g. "Q4_K". Raises ModelError as `read` does."""
        tensor, layout = self._find(name)
        is_readable = _is_dequantised(tensor.type)
        return TensorInfo(shape=layout.shape(tensor.shape), stored_as=tensor.type.name, is_readable=is_readable)

    def read(self, name: str) -> NDArray[np.float32]:
        """Return one tensor, dequantised; a view of the file (read-only) if it stores float32.

        Raises:
            ModelError: the file has no tensor of that name.
            UnsupportedModelError: the `gguf` package does not dequantise its type.
        """
        tensor, layout = self._find(name)
        return np.require(layout.restore(self._values(tensor)), requirements=["C"])

    def read_blocks(self, name: str) -> BlockTensor | None:
        """Return a tensor of type Q4_0 or Q4_1 as it is stored; None for a tensor of another type.

        Raises:
            ModelError: there is no tensor of that name.
            QuantizationError: a scale or a minimum is not finite (Q4_0's minimum is -8 times its scale); or the file
                has another order of columns, which would split blocks.
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

    def stored(self, name: str) -> NDArray[np.uint8]:
        """See `TensorSource`."""
        return self._stored_rows(self._find(name)[0])

    def _values(self, tensor: GgufTensor) -> NDArray[np.float32]:
        """Return the dequantised tensor in the file's order of rows."""
        return dequantised(self._maps[tensor.part], tensor, self.path)

    def _stored_rows(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        return _rows(self._maps[tensor.part], tensor)

    def _find(self, name: str) -> tuple[GgufTensor, Layout]:
        if name not in self._tensors:
            raise ModelError(f"{self.path} has no tensor {name}")
        return self._tensors[name]


def dequantised(data: mmap, tensor: GgufTensor, path: Path) -> NDArray[np.float32]:
    """Return a tensor of a file, dequantised, in the file's order of rows.

    Args:
        data: the part of the file that has the tensor.
        path: the file's path, for messages.

    Raises:
        UnsupportedModelError: the `gguf` package does not dequantise its type.
    """
    try:
        with np.errstate(all="ignore"):
            values = dequantize(_rows(data, tensor), tensor.type)
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"{path}: tensor {tensor.name} is stored as {tensor.type.name}, which cannot be dequantised"
        ) from error
    return np.require(values, np.float32, ["C", "ALIGNED"])


def _rows(data: mmap, tensor: GgufTensor) -> NDArray[np.uint8]:
    """Return the bytes of each row of a tensor."""
    stored = np.frombuffer(data, np.uint8, tensor.num_bytes, tensor.start)
    return stored.reshape(*tensor.shape[:-1], -1)


def _joined(headers: Sequence[GgufHeader], paths: Sequence[Path]) -> GgufHeader:
    """Join the headers of all parts of a file: the keys of the first part, and the tensors of all parts.

    Raises:
        UnsupportedModelError: the names of the other parts do not follow from the part's name.
        ModelError: the parts do not belong to one file, or are not in order.
    """
    tensors: dict[str, GgufTensor] = {}
    for number, (header, path) in enumerate(zip(headers, paths, strict=True)):
        count = header.metadata.get("split.count", 0) or 1
        if len(headers) == 1 and count != 1:
            raise UnsupportedModelError(
                f"{path} is one of {count} parts; rename all of them in the style of llama-gguf-split, e.g. "
                f"model-00001-of-{count:05}.gguf"
            )
        found = header.metadata.get("split.no", 0)
        if (count, found) != (len(headers), number):
            expected = f"part {number + 1} of {len(headers)}"
            raise ModelError(
                f"{path} has the part number {found} of {count} from 0, expected {expected}; fetch it again"
            )
        if twice := tensors.keys() & header.tensors.keys():
            raise ModelError(f"{path} has {min(twice)}, which an earlier part has too; fetch the parts again")
        tensors |= {name: replace(tensor, part=number) for name, tensor in header.tensors.items()}
    first = headers[0].metadata
    if len(headers) > 1 and (expected_tensors := first.get("split.tensors.count", len(tensors))) != len(tensors):
        raise ModelError(f"{paths[0]} and its parts have {len(tensors)} tensors, expected {expected_tensors}")
    return GgufHeader(metadata=first, tensors=tensors)


@cache
def _is_dequantised(kind: GGMLQuantizationType) -> bool:
    """Return whether the `gguf` package dequantises a type, by converting a block of zeros."""
    _, block_bytes = GGML_QUANT_SIZES[kind]
    try:
        with np.errstate(all="ignore"):
            dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _parts(name: str, tensor: GgufTensor) -> Iterator[tuple[str, GgufTensor]]:
    """Map names to tensors: one tensor under its name, or the tensors that are stacked in it, whose numbers replace
    EACH in the name.
    """
    if name and EACH not in name:
        yield name, tensor
    elif name:
        num_parts, *shape = tensor.shape
        if num_parts > MOST_PARTS:
            raise ModelError(f"tensor {tensor.name} stacks {num_parts} tensors, expected at most {MOST_PARTS}")
        num_bytes = tensor.num_bytes // num_parts
        for index in range(num_parts):
            start = tensor.start + index * num_bytes
            part = replace(tensor, shape=tuple(shape), start=start, num_bytes=num_bytes)
            yield name.replace(EACH, str(index)), part
