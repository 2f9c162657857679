"""A file of the prefix cache: the contents of states for up to 256 tokens, with data to verify that the file is
complete.

    8 bytes   CHKRTPFX
    4 + 4     the format, and the bytes of the header; little-endian
    header    JSON: description of the contents (`Header`)
    arrays    caches and rings of each 32 tokens, then recurrent tensors by position, in memory layout
    16 bytes  xxh3_128 of all before

A file with unexpected contents counts as damaged. No memory is allocated before all sizes have been checked.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import xxhash

from chunkrt.engine.prefix_cache.tree import STEP, Addition
from chunkrt.files import check_regular, parse_json
from chunkrt.runtime.buffers import Array
from chunkrt.runtime.prefix import PrefixPiece, StateForms

MAGIC, FORMAT = b"CHKRTPFX", 1
_START = struct.Struct("<8sII")
_DIGEST_BYTES = 16
_MOST_HEADER_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Header:
    """Description of a file's contents.

    Attributes:
        model, scheme: names for display.
        engine: digest of everything that can change the stored values.
        parent: name of the file of the preceding tokens.
        start: position of the first token of `tokens`.
        rings: for each 32 tokens, True if rings are stored.
        recurrent: positions with stored recurrent tensors.
    """

    model: str
    scheme: str
    engine: str
    parent: str
    start: int
    tokens: tuple[int, ...]
    rings: tuple[bool, ...]
    recurrent: tuple[int, ...]


def write_block(file: BinaryIO, header: Header, addition: Addition) -> None:
    """Write a file. Raise OSError if the disk is full or fails."""
    digest = xxhash.xxh3_128()
    parts: Iterator[bytes | memoryview] = chain([_start(header)], map(_bytes, _arrays(addition)))
    for part in parts:
        digest.update(part)
        file.write(part)
    file.write(digest.digest())


def block_bytes(header: Header, addition: Addition) -> int:
    """Return the size of a file."""
    return len(_start(header)) + sum(array.nbytes for array in _arrays(addition)) + _DIGEST_BYTES


def read_header(path: Path) -> Header:
    """Read the header of a file. Raise OSError if the file cannot be read, or ValueError if it is damaged."""
    check_regular(path)
    with path.open("rb") as file:
        return _read_header(file)[0]


def read_block(path: Path, forms: StateForms, expected: Header) -> Addition:
    """Read the contents of a file for the expected tokens, with all stored rings and recurrent tensors.

    Raises:
        OSError: the file cannot be read, or does not exist.
        ValueError: the file is damaged, or contains other tokens.
    """
    check_regular(path)
    with path.open("rb", buffering=0) as file:
        header, start = _read_header(file)
        for name in ("engine", "parent", "start", "tokens"):
            if getattr(header, name) != getattr(expected, name):
                raise ValueError(f"its {name} differs from the expected value")
        within = range(header.start + 1, header.start + len(header.tokens) + 1)
        positions = set(header.recurrent)
        if len(header.rings) * STEP != len(header.tokens) or len(positions) < len(header.recurrent):
            raise ValueError("the values of its header contradict each other")
        if not all(position in within for position in positions):
            raise ValueError("the values of its header contradict each other")
        size = len(header.tokens) * forms.cache_bytes + sum(header.rings) * STEP * forms.ring_bytes
        size += len(positions) * forms.recurrent_bytes + len(start) + _DIGEST_BYTES
        if (found := os.fstat(file.fileno()).st_size) != size:  # the name may refer to another file now
            raise ValueError(f"its size is {found} bytes, expected {size}")
        arrays = _empty(header, forms)
        digest = xxhash.xxh3_128(start)
        for array in _arrays(arrays):
            part = _bytes(array)
            _read_into(file, part)
            digest.update(part)
        if _read(file, _DIGEST_BYTES) != digest.digest():
            raise ValueError("its checksum does not match its contents")
    return arrays


def _start(header: Header) -> bytes:
    text = json.dumps(asdict(header)).encode()
    return _START.pack(MAGIC, FORMAT, len(text)) + text


def _read_header(file: BinaryIO) -> tuple[Header, bytes]:
    start = _read(file, _START.size)
    magic, version, length = _START.unpack(start)
    if magic != MAGIC:
        raise ValueError("it is not a file of the prefix cache")
    if version != FORMAT:
        raise ValueError(f"its format is {version}, expected {FORMAT}")
    if length > _MOST_HEADER_BYTES:
        raise ValueError(f"its header has {length} bytes")
    text = _read(file, length)
    return msgspec.convert(parse_json(text), Header), start + text


def _empty(header: Header, forms: StateForms) -> Addition:
    """Allocate arrays for all contents of a file."""
    pieces = []
    for index, has_rings in enumerate(header.rings):
        start = header.start + index * STEP
        caches = tuple(stack.empty(STEP) for stack in forms.caches)
        rings = tuple(stack.empty(STEP) for stack in forms.rings) if has_rings else None
        pieces.append(PrefixPiece(start, start + STEP, caches, rings))
    recurrent = {
        position: tuple(np.empty(shape, np.float32) for shape in forms.recurrent.values())
        for position in header.recurrent
    }
    return Addition(pieces=tuple(pieces), recurrent=recurrent)


def _arrays(addition: Addition) -> Iterator[Array]:
    for piece in addition.pieces:
        yield from piece.caches
        yield from piece.rings or ()
    for arrays in addition.recurrent.values():
        yield from arrays


def _bytes(array: Array) -> memoryview:
    return np.ascontiguousarray(array).data.cast("B")


def _read(file: BinaryIO, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    _read_into(file, memoryview(data))
    return bytes(data)


def _read_into(file: BinaryIO, into: memoryview) -> None:
    while into:
        length = file.readinto(into)  # type: ignore[attr-defined]
        if not length:
            raise ValueError("it is truncated")
        into = into[length:]
