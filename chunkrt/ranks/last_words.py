"""What rank 0 says at its end, even if it is killed.

When a process of a launch dies, mpiexec kills the others on its machine at once, mostly before rank 0 can say why. So a
shell waits beside it, in a session of its own that mpiexec does not reach: it prints the line that it is given, or
another one if rank 0 goes without a word.

A rank's stderr is a pipe to mpiexec, which reads it no more once it ends, so the line would often be lost. Where
mpiexec is on this machine, and Linux shows its stderr, the shell writes there.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import psutil

KILLED = "chunkrt: rank 0 was killed, as mpiexec does when another rank ends; start all ranks again"
_SHELL = f"""
if read -r line; then [ -z "$line" ] || printf '%s\\n' "$line"; else printf '%s\\n' "{KILLED}"; fi >&2
"""
_PROXY = "hydra_pmi_proxy"
"""The child of MPICH's mpiexec whose children are the ranks."""


class LastWords:
    """One line on stderr at most. Needs a POSIX shell."""

    def __init__(self) -> None:
        with _launcher_stderr() as stderr:
            self._shell: subprocess.Popen[str] | None = subprocess.Popen(
                ["/bin/sh", "-c", _SHELL],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
                text=True,
            )

    def say(self, line: str) -> None:
        """Print the line, and wait until it is printed. Nothing more is said after it, nor after an empty one."""
        shell, self._shell = self._shell, None
        if shell is not None:
            sys.stderr.flush()
            with contextlib.suppress(OSError):
                shell.communicate(f"{' '.join(line.split())}\n")


@contextmanager
def _launcher_stderr() -> Iterator[int | None]:
    """The stderr of the mpiexec that started this process, opened anew; None where that cannot be had."""
    opened = None
    with contextlib.suppress(OSError, psutil.Error):
        parents = psutil.Process().parents()
        for proxy, launcher in pairwise(parents):
            if proxy.name() == _PROXY and launcher.name().startswith("mpiexec"):
                path = f"/proc/{launcher.pid}/fd/2"
                opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK)
                os.set_blocking(opened, True)
    try:
        yield opened
    finally:
        if opened is not None:
            os.close(opened)
