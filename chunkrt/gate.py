"""Waits of a thread for other threads: a gate, a bell, and a channel. An interrupt ends each wait."""

from __future__ import annotations

from collections import deque
from threading import Lock
from typing import Generic, TypeVar

Item = TypeVar("Item")

LOOK_S = 0.1
"""Seconds after which a waiting thread checks for an interrupt. The system may deliver a signal to any thread, and
other threads do not wake up. On Windows an interrupt does not wake a thread that waits for a lock.
"""

MOST_SECONDS_AT_END = 10.0
"""Seconds that an exiting process waits for a thread that computes."""


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


class Bell:
    """Bell that wakes the thread that waits for it, also if it rings before the wait. An interrupt ends the wait."""

    def __init__(self) -> None:
        self._silent = Lock()
        self._silent.acquire()

    def ring(self) -> None:
        """Wake the waiting thread. Any thread may call this method, several times before one wait."""
        try:  # noqa: SIM105 - every generated token rings a bell
            self._silent.release()
        except RuntimeError:  # the bell has rung already
            pass

    def wait(self) -> None:
        """Wait until the bell rings."""
        while not self._silent.acquire(timeout=LOOK_S):
            pass


class Outbox(Generic[Item]):
    """Queue of items from any threads to one thread. An interrupt ends the wait for an item."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._bell = Bell()

    def put(self, item: Item) -> None:
        """Add an item."""
        self._items.append(item)
        self._bell.ring()

    def get(self) -> Item:
        """Remove and return the first item; wait until there is one."""
        while not self._items:
            self._bell.wait()
        return self._items.popleft()
