"""A checkpoint file in memory: mapped read-only, so that only what is read is ever loaded."""

from __future__ import annotations

import mmap
from pathlib import Path

from chunkrt.errors import ModelError
from chunkrt.files import check_regular


def map_file(path: Path) -> mmap.mmap:
    """Map a file for reading; the map stays open for as long as an array views it.

    Raises:
        ModelError: the file is missing, unreadable or empty.
    """
    try:
        check_regular(path)
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise ModelError(f"{path} is empty (0 bytes); fetch it again")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
