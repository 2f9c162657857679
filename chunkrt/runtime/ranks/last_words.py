"""Last message of rank 0, printed even if it is killed.

When a process of a launch ends, mpiexec immediately kills the other processes on its machine, usually before rank 0 can
report the reason. So a shell waits in a separate session, whose processes mpiexec does not kill. The shell receives
each message as soon as rank 0 knows it, and prints the last message when rank 0 has ended. So the output does not
depend on timing.

The stderr of a rank is a pipe to mpiexec. mpiexec stops reading this pipe when it ends, so the line would often be
lost. If mpiexec runs on this machine, and Linux gives access to its stderr, the shell writes to it directly.
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

KILLED = "chunkrt: rank 0 was killed, as happens when another rank ends or rank 0 falls silent; start all ranks again"
_SHELL = f"""
words="{KILLED}"
while read -r line; do words=$line; done
[ -z "$words" ] || printf '%s\\n' "$words" >&2
"""
_PROXY = "hydra_pmi_proxy"
"""Name of the child process of MPICH's mpiexec whose children are the ranks."""


class LastWords:
    """Printer of at most one line on stderr. It requires a POSIX shell, and any thread may use it."""

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
        """Set the line that is printed if the process ends without calling `say`."""
        with self._lock:
            if self._shell is not None:
                assert self._shell.stdin is not None
                with contextlib.suppress(OSError):
                    self._shell.stdin.write(_one_line(line))
                    self._shell.stdin.flush()

    def say(self, line: str) -> None:
        """Print the line, and wait until it is printed. After this call, even with an empty line, no other line is
        printed."""
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
    """Open the stderr of the mpiexec that started this process again; yield None if that is not possible."""
    import psutil

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
