"""What rank 0 says at its end, even if it is killed.

When a process of a launch dies, mpiexec kills the others on its machine at once, mostly before rank 0 can say why. So a
shell waits beside it, in a session of its own that mpiexec does not reach. It is told what is known as soon as that is
known, and prints the last of it when rank 0 has ended: so no line depends on who is quicker.

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
from threading import Lock

import psutil

KILLED = "chunkrt: rank 0 was killed, as happens when another rank ends or rank 0 falls silent; start all ranks again"
_SHELL = f"""
words="{KILLED}"
while read -r line; do words=$line; done
[ -z "$words" ] || printf '%s\\n' "$words" >&2
"""
_PROXY = "hydra_pmi_proxy"
"""The child of MPICH's mpiexec whose children are the ranks."""


class LastWords:
    """One line on stderr at most. Needs a POSIX shell. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = Lock()
        with _launcher_stderr() as stderr:
            self._shell: subprocess.Popen[str] | None = subprocess.Popen(
                ["/bin/sh", "-c", _SHELL],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
                text=True,
            )

    def prepare(self, line: str) -> None:
        """Have the line printed if the process ends without another word."""
        with self._lock:
            if self._shell is not None:
                assert self._shell.stdin is not None
                with contextlib.suppress(OSError):
                    self._shell.stdin.write(_one_line(line))
                    self._shell.stdin.flush()

    def say(self, line: str) -> None:
        """Print the line, and wait until it is printed. Nothing more is said after it, nor after an empty one."""
        with self._lock:
            shell, self._shell = self._shell, None
        if shell is not None:
            sys.stderr.flush()
            with contextlib.suppress(OSError):
                shell.communicate(_one_line(line))


def _one_line(words: str) -> str:
    return f"{' '.join(words.split())}\n"


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
