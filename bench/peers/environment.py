"""Environment of the other runtimes: a virtual environment, and the model in each form that they read."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from peers.contenders import FORMS
from peers.process import ContenderError, convert, last_line

REQUIREMENTS = Path(__file__).with_name("requirements.txt")


COMPILED = "llama-cpp-python"
"""The package that is compiled during installation, which takes about ten minutes."""


def make_environment(folder: Path, tell: Callable[[str], None], packages: Mapping[str, Sequence[str]]) -> str:
    """Return the interpreter of a virtual environment with packages of `requirements.txt`, installing missing versions.

    A package that cannot be installed is reported and omitted: its contender will report that it is absent.

    Args:
        packages: the names of the required ones, and of the contenders that need each. Other installed packages stay.

    Returns: the environment's interpreter.

    Raises:
        ContenderError: the environment cannot be created.
    """
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    stamp, log = folder / "installed.txt", folder / "pip.log"
    wanted = [r for r in REQUIREMENTS.read_text("utf-8").split() if r.partition("==")[0] in packages]
    installed = stamp.read_text("utf-8").split() if stamp.exists() else []
    if python.exists() and set(wanted) <= set(installed):
        return str(python)
    wanted = [requirement for requirement in wanted if requirement not in installed]
    names = [requirement.partition("==")[0] for requirement in wanted]
    slow = f"; {COMPILED} is compiled, in about ten minutes, for {', '.join(packages.get(COMPILED, ()))}"
    tell(f"installing {', '.join(names) or 'no packages'} into {folder}{slow if COMPILED in names else ''}")
    command = [sys.executable, "-m", "venv", str(folder)]
    made = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if made.returncode:
        raise ContenderError(f"cannot create an environment in {folder}: {' '.join(made.stdout.split())[:300]}")

    def install(*what: str) -> bool:
        with log.open("a", encoding="utf-8") as output:
            command = [str(python), "-m", "pip", "install", *what]
            return subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode == 0

    is_whole = True
    if wanted and not install(*wanted):
        for requirement in wanted:
            if not install(requirement):
                is_whole = False
                tell(f"{requirement} cannot be installed: {last_line(log)}")
    if is_whole:
        others = [r for r in installed if r.partition("==")[0] not in names]
        stamp.write_text("\n".join([*others, *wanted]) + "\n", "utf-8")
    return str(python)


def check_interpreter(python: str) -> None:
    """Raise ContenderError if this does not start a Python 3."""
    command = [python, "-c", "import sys; print(sys.version_info[0])"]
    try:
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=60)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise ContenderError(f"{python!r} cannot be started: {error}; give a Python interpreter") from error
    if ended.returncode or ended.stdout.strip() != b"3":
        raise ContenderError(f"{python!r} is not a Python 3 interpreter")


class Forms:
    """The forms of one checkpoint, converted on first use, and kept in a folder named after its content."""

    def __init__(self, checkpoint: Path, folder: Path, python: str, tell: Callable[[str], None]) -> None:
        with checkpoint.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self.checkpoint = checkpoint
        self.folder = folder / f"{checkpoint.stem}-{digest[:12]}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._python, self._tell = python, tell
        self._failures: dict[str, ContenderError] = {}

    def make(self, name: str) -> Path:
        """Return the file or folder of a form. Raise ContenderError if it cannot be made."""
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
