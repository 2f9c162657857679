"""Download of a file, which is streamed in bounded memory, resumable, and verified by its SHA-256."""

from __future__ import annotations

from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from chunkrt.errors import ModelError
from chunkrt.files import fingerprint

BLOCK_BYTES = 1 << 20
TIMEOUT_SECONDS = 60
PARTIAL_CONTENT = 206
RANGE_NOT_SATISFIABLE = 416

Received = Callable[[int], None]
"""A function that takes the number of bytes downloaded so far."""


class UnreachableError(ModelError):
    """Error for an address that cannot be opened: no connection, no permission, no trusted certificate, or no such
    file.
    """


def download(url: str, part: Path, num_bytes: int, sha256: str, progress: Received) -> None:
    """Fetch a file into `part`, resuming an earlier attempt if `part` exists.

    A file that is longer than expected is abandoned. A resumed file with wrong content is fetched once more from the
    start. After an error or an interruption `part` stays for the next attempt.

    Raises:
        UnreachableError: the address cannot be opened.
        ModelError: the connection breaks repeatedly, or the content differs from the expected one.
        OSError: `part` cannot be written.
    """
    while True:
        resumed = part.exists() and part.stat().st_size > 0
        with part.open("ab") as file:
            _fetch_rest(url, file, num_bytes, progress)
        wrong = difference(part, num_bytes, sha256)
        if wrong is None:
            return
        part.unlink()
        if not resumed:
            raise ModelError(f"{url} is not the expected file: {wrong}")


def difference(path: Path, num_bytes: int, sha256: str) -> str | None:
    """Return a description of the difference between a file and the expected one, or None if they are equal."""
    found_bytes, found = fingerprint(path)
    if found_bytes != num_bytes:
        return f"it has {found_bytes} bytes, expected {num_bytes}"
    return None if found == sha256 else f"its SHA-256 is {found}, expected {sha256}"


def _fetch_rest(url: str, file: BinaryIO, num_bytes: int, progress: Received) -> None:
    """Download, and connect again whenever a connection breaks, as long as every connection makes progress."""
    while True:
        start = file.tell()
        if _fetch_some(url, file, num_bytes, progress):
            return
        if file.tell() <= start:
            raise ModelError(f"{url} breaks off after {start} bytes; try again to resume the download")


def _fetch_some(url: str, file: BinaryIO, num_bytes: int, progress: Received) -> bool:
    """Append the data of one connection, and return whether the file is complete."""
    start = file.tell()
    request = Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        response = urlopen(request, timeout=TIMEOUT_SECONDS)
    except HTTPError as error:
        error.close()
        if error.code == RANGE_NOT_SATISFIABLE and start > 0:
            return True
        raise UnreachableError(f"{url} answers {error.code} {error.reason}") from error
    except (OSError, HTTPException) as error:
        raise UnreachableError(f"cannot reach {url}: {error}") from error
    with response:
        if response.status != PARTIAL_CONTENT:
            file.truncate(0)
            file.seek(0)
        while True:
            try:
                block = response.read(BLOCK_BYTES)
            except (OSError, HTTPException):
                return False
            if not block:
                return not getattr(response, "length", 0)
            file.write(block)
            if file.tell() > num_bytes:
                return True
            progress(file.tell())
