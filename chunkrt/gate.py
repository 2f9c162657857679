"""A gate, at which threads wait until another thread opens it. An interrupt ends the wait."""

from __future__ import annotations

from threading import Lock

LOOK_S = 0.1
"""Seconds after which a waiting thread checks for an interrupt. The system may deliver a signal to any thread, and
other threads do not wake up. On Windows an interrupt does not wake a thread that waits for a lock.
"""


class Gate:
    """Gate that is closed until `open` is called, and open from then on.

    It uses a lock, not a condition variable. `threading.Condition` is written in Python, so an interrupt inside it may
    leave its lock held forever. In this class an interrupt at any point is harmless.
    """

    def __init__(self) -> None:
        self._is_open = False
        self._lock = Lock()
        self._lock.acquire()

    @property
    def is_open(self) -> bool:
        """True if `wait` would return immediately."""
        return self._is_open

    def open(self) -> None:
        """Open the gate, and wake all waiting threads. This method may be called only once."""
        self._is_open = True
        self._lock.release()

    def wait(self) -> None:
        """Wait until the gate is open. An interrupt ends the wait."""
        while not self._is_open:
            if self._lock.acquire(timeout=LOOK_S):
                self._lock.release()  # wakes the next waiting thread
