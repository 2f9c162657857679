"""A gate: what a thread waits at until another has ended its work, and leaves when an interrupt comes."""

from __future__ import annotations

from threading import Lock

LOOK_S = 0.1
"""Until whoever waits looks for an interrupt. The system may give a signal to any thread, which wakes no other; and on
Windows an interrupt wakes nobody who waits for a lock."""


class Gate:
    """Closed until `open`, and open from then on.

    A lock and no condition: an interrupt that falls into one, which is written in Python, may leave its lock taken for
    ever. Here whatever an interrupt leaves does no harm.
    """

    def __init__(self) -> None:
        self._is_open = False
        self._lock = Lock()
        self._lock.acquire()

    @property
    def is_open(self) -> bool:
        """Whether `wait` would come back at once."""
        return self._is_open

    def open(self) -> None:
        """Let those through who wait; once."""
        self._is_open = True
        self._lock.release()

    def wait(self) -> None:
        """Wait until it is open. An interrupt gets through."""
        while not self._is_open:
            if self._lock.acquire(timeout=LOOK_S):
                self._lock.release()  # for the next that waits
