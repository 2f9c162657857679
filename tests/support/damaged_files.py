"""Damage to files, which readers must detect."""

from pathlib import Path


def truncate(path: Path) -> None:
    """Remove the last byte."""
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    """Invert a bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def make_empty(path: Path) -> None:
    """Remove the contents."""
    path.write_bytes(b"")
