"""What the peers need: a virtual environment, and the model in each form that one of them reads."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from peers.contenders import FORMS
from peers.process import ContenderError, convert, last_line

REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def make_environment(folder: Path, tell: Callable[[str], None], *, only: Collection[str] = ()) -> str:
    """A virtual environment with the peers' packages, made once and again when `requirements.txt` changes.

    A package that cannot be installed is told, and left out: its contender will say that it is absent.

    Args:
        only: the packages that are needed; all, if it is empty. What else there is stays.

    Returns: its interpreter.

    Raises:
        ContenderError: it cannot be made.
    """
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    stamp, log = folder / "installed.txt", folder / "pip.log"
    wanted = [r for r in REQUIREMENTS.read_text("utf-8").split() if not only or r.partition("==")[0] in only]
    if stamp.exists() and set(wanted) <= set(stamp.read_text("utf-8").split()):
        return str(python)
    slow = "; llama.cpp is compiled for this processor, which takes its time"
    tell(f"installing the peers into {folder}{'' if only else slow}")
    command = [sys.executable, "-m", "venv", str(folder)]
    made = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if made.returncode:
        raise ContenderError(f"no environment can be made in {folder}: {' '.join(made.stdout.split())[:300]}")

    def install(*what: str) -> bool:
        with log.open("a", encoding="utf-8") as output:
            command = [str(python), "-m", "pip", "install", *what]
            return subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode == 0

    is_whole = True
    if not install(*wanted):
        for requirement in wanted:
            if not install(requirement):
                is_whole = False
                tell(f"{requirement} cannot be installed: {last_line(log)}")
    if is_whole:
        stamp.write_text("\n".join(wanted) + "\n", "utf-8")
    return str(python)


def check_interpreter(python: str) -> None:
    """Raises ContenderError if this starts no Python."""
    command = [python, "-c", "import sys; print(sys.version_info[0])"]
    try:
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=60)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise ContenderError(f"{python!r} cannot be started: {error}; give a Python interpreter") from error
    if ended.returncode or ended.stdout.strip() != b"3":
        raise ContenderError(f"{python!r} is no Python 3 interpreter")


class Forms:
    """The forms of one checkpoint, made when they are first asked for, and kept in a folder named after its content."""

    def __init__(self, checkpoint: Path, folder: Path, python: str, tell: Callable[[str], None]) -> None:
        with checkpoint.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self.checkpoint = checkpoint
        self.folder = folder / f"{checkpoint.stem}-{digest[:12]}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._python, self._tell = python, tell
        self._failures: dict[str, ContenderError] = {}

    def make(self, name: str) -> Path:
        """The file or folder of a form. Raises ContenderError if it cannot be made."""
        if name == "checkpoint":
            return self.checkpoint
        if name in self._failures:
            raise self._failures[name]
        target = self.folder / name
        if not target.exists():
            form = FORMS[name]
            try:
                source = self.make(form.of)
                self._tell(f"making {target}")
                convert(form.engine, source, target, form.options, python=self._python)
            except ContenderError as error:
                self._failures[name] = error
                raise
        return target
