"""The common interface of all checkpoint formats.

A `TensorSource` presents a checkpoint in Hugging Face's vocabulary, regardless of the file format: tensor names such as
"model.layers.0.self_attn.q_proj.weight", config keys such as "num_attention_heads", and weights in Hugging Face's
layout (linears [out_features, in_features], no permuted rows). A decoder family is therefore written once for all
formats.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from chunkrt.errors import UnsupportedModelError

BLOCK_DEPTH = 32
"""Number of weights of one output channel that share a scale and a minimum, as in GGUF's Q4_0 and Q4_1."""

INT4 = "INT4"
"""Value of `TensorInfo.stored_as`: 4-bit integers in groups of a multiple of BLOCK_DEPTH, in a Hugging Face folder."""

BLOCK_TYPES = frozenset(("Q4_0", "Q4_1", INT4))
FLOAT_TYPES = frozenset(("F64", "F32", "F16", "BF16"))
"""Values of `TensorInfo.stored_as`: types that `read_blocks` supports, and types that are not quantised."""


SAMPLED_BYTES = 1021
"""Number of sampled bytes of each tensor, to distinguish checkpoints. The number is prime, so samples cover all byte
positions of an element.
"""

LEFT_OUT = "%s: one token at a time is predicted; ignoring %d tensors of multi-token prediction: %s"
"""Warning about ignored tensors, with the checkpoint's name, the number of tensors, and their pattern."""

COMPARED_BYTES = 2**22
"""Size of a block that `are_equal` compares at once."""


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """A tensor's entry in the header: its shape in Hugging Face's layout and its storage type.

    `is_readable` is True if `TensorSource.read` can convert the type to float32.
    """

    shape: tuple[int, ...]
    stored_as: str
    is_readable: bool = True


@dataclass(frozen=True, kw_only=True)
class BlockTensor:
    """A tensor of 4-bit integers in blocks along its rows: w ~ integer * scale + minimum.

    integers: uint8 [N, K], 0 to 15; K is a multiple of BLOCK_DEPTH. scales, minima: float16 [N, K / BLOCK_DEPTH],
        finite.
    """

    integers: NDArray[np.uint8]
    scales: NDArray[np.float16]
    minima: NDArray[np.float16]

    def dequantise(self) -> NDArray[np.float32]:
        """Return the dequantised tensor, float32 [N, K]; products are exact, and sums are rounded once."""
        blocks = self.integers.reshape(*self.scales.shape, BLOCK_DEPTH).astype(np.float32)
        values = blocks * self.scales[..., None].astype(np.float32) + self.minima[..., None].astype(np.float32)
        return values.reshape(self.integers.shape)


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of a safetensors file: its shape, safetensors' type, and bytes."""

    shape: tuple[int, ...]
    dtype: str
    stored: NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class QuantisedWeight:
    """A weight that several stored tensors contain.

    Attributes:
        shape: shape in Hugging Face's layout.
        stored_as: storage type; INT4 if `read_blocks` may return blocks.
        parts: names of the stored tensors.
        read: returns the dequantised weight.
        read_blocks: returns the weight in blocks of 4 bits; None if float16 cannot hold its scales.
    """

    shape: tuple[int, ...]
    stored_as: str
    parts: tuple[str, ...]
    read: Callable[[], NDArray[np.float32]]
    read_blocks: Callable[[], BlockTensor | None] = lambda: None


Refuse = Callable[[UnsupportedModelError], None]
"""A function called with the error for each unsupported feature of a checkpoint; if it returns, reading continues."""


def strictly(refusal: UnsupportedModelError) -> None:
    """Raise the refusal."""
    raise refusal


class TensorSource(Protocol):
    """A memory-mapped checkpoint that is read tensor by tensor."""

    path: Path
    architecture: str
    """Hugging Face's `model_type`: "llama", "mistral", ..."""
    config: Mapping[str, Any]
    """Hugging Face's config.json keys; a GGUF's metadata is translated into them."""

    def names(self) -> Sequence[str]:
        """Return the names of all tensors of the checkpoint, in file order."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Return the shape and stored type of one tensor. Raises ModelError if the checkpoint has none of that name."""
        ...

    def read(self, name: str) -> NDArray[np.float32]:
        """Return one tensor, dequantised to float32, in Hugging Face's layout. Raises ModelError as `info` does."""
        ...

    def read_blocks(self, name: str) -> BlockTensor | None:
        """Return one tensor in its own blocks of 4 bits, in Hugging Face's layout; None if its type is not in
        BLOCK_TYPES.

        Raises:
            ModelError: as `info` does.
            QuantizationError: a scale or a minimum is not finite.
        """
        ...

    def stored(self, name: str) -> NDArray[np.uint8]:
        """Return an array, of any shape, with the bytes of one tensor as the checkpoint stores them. Raises ModelError
        as `info` does.
        """
        ...


def spread(values: NDArray[Any]) -> bytes:
    """Return up to SAMPLED_BYTES bytes of an array, evenly spread over its memory."""
    flat = values.reshape(-1).view(np.uint8)
    return flat[np.linspace(0, flat.size - 1, min(SAMPLED_BYTES, flat.size)).astype(np.int64)].tobytes()


def weights_digest(source: TensorSource) -> str:
    """Return the SHA-256, in hexadecimal, of data that distinguish a checkpoint's weights from other weights of the
    same shapes.

    The data consist of the name, the shape, the type and a sample of the values of each tensor, in the order of names.
    """
    digest = hashlib.sha256()
    for name in sorted(source.names()):
        info = source.info(name)
        digest.update(repr((name, info.shape, info.stored_as)).encode())
        digest.update(spread(source.stored(name)))
    return digest.hexdigest()


def are_equal(source: TensorSource, left: str, right: str) -> bool:
    """Return whether two tensors have the same shape and values; stop reading at the first block that differs.

    Raises:
        ModelError: the checkpoint lacks one of them.
    """
    infos = source.info(left), source.info(right)
    if infos[0].shape != infos[1].shape:
        return False
    if infos[0].stored_as != infos[1].stored_as:
        return np.array_equal(source.read(left), source.read(right))
    ours, theirs = (source.stored(name).reshape(-1) for name in (left, right))
    blocks = (slice(start, start + COMPARED_BYTES) for start in range(0, ours.size, COMPARED_BYTES))
    return all(np.array_equal(ours[block], theirs[block]) for block in blocks)
