"""A clock of tasks in progress, which detects a device that does not respond."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from time import monotonic


class TaskClock:
    """Start times of the tasks in progress."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._starts: dict[object, float] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record a task as in progress inside the block."""
        key = object()
        with self._lock:
            self._starts[key] = monotonic()
        try:
            yield
        finally:
            with self._lock:
                del self._starts[key]

    def longest_s(self) -> float:
        """Return the seconds since the oldest task in progress began, or 0 if no task is in progress."""
        with self._lock:
            return monotonic() - min(self._starts.values()) if self._starts else 0.0
