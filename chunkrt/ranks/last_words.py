"""What rank 0 says at its end, even if it is killed.

When a process of a launch dies, mpiexec kills the others on its machine at once, mostly before rank 0 can say why. So a
shell waits beside it, in a session of its own that mpiexec does not reach: it prints the line that it is given, or
another one if rank 0 goes without a word.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys

KILLED = "chunkrt: rank 0 was killed, as mpiexec does when another rank ends; start all ranks again"
_SHELL = f"""
if read -r line; then [ -z "$line" ] || printf '%s\\n' "$line"; else printf '%s\\n' "{KILLED}"; fi >&2
"""


class LastWords:
    """One line on stderr at most. Needs a POSIX shell."""

    def __init__(self) -> None:
        self._shell: subprocess.Popen[str] | None = subprocess.Popen(
            ["/bin/sh", "-c", _SHELL],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
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
