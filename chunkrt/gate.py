"""A gate: a thread waits at it until another thread has ended its work, and leaves it when an interrupt comes."""

from __future__ import annotations

from threading import Lock

LOOK_S = 0.1
"""Seconds after which a waiting thread looks for an interrupt. The system may deliver a signal to any thread, which
wakes no other thread; and on Windows an interrupt wakes no thread that waits for a lock."""


class Gate:
    """Gate that is closed until `open`, and open from then on.

    It uses a lock, not a condition: an interrupt inside a condition, which is written in Python, may leave its lock
    held forever. Here an interrupt at any point is harmless.
    """

    def __init__(self) -> None:
        self._is_open = False
        self._lock = Lock()
        self._lock.acquire()

    @property
    def is_open(self) -> bool:
        """True if `wait` would return at once."""
        return self._is_open

    def open(self) -> None:
        """Let all waiting threads through; called once."""
        self._is_open = True
        self._lock.release()

    def wait(self) -> None:
        """Wait until it is open. An interrupt ends the wait."""
        while not self._is_open:
            if self._lock.acquire(timeout=LOOK_S):
                self._lock.release()  # wakes the next waiting thread
