"""Handling of Ctrl-C, which is deferred while the main thread performs an indivisible action such as sending a
message."""

from __future__ import annotations

import signal
from collections.abc import Callable
from threading import current_thread, main_thread
from types import FrameType
from typing import Self


class Interrupts:
    """SIGINT handler that replaces the present handler if it is created in the main thread.

    In a `with` block no interrupt reaches the main thread. An interrupt that arrives in the block is handled at its
    end. Blocks may be nested.
    """

    def __init__(self) -> None:
        self._num_held, self._is_due = 0, False
        found = signal.getsignal(signal.SIGINT)
        self._act: Callable[[int, FrameType | None], object] | None = found if callable(found) else None
        if self._act is not None and current_thread() is main_thread():
            signal.signal(signal.SIGINT, self._handle)

    @property
    def can_be_held(self) -> bool:
        """True if no interrupt can reach the calling thread in a block; False if another handler has been installed."""
        return current_thread() is not main_thread() or signal.getsignal(signal.SIGINT) in (
            self._handle,
            signal.SIG_IGN,
            signal.SIG_DFL,
        )

    def __enter__(self) -> Self:
        if current_thread() is main_thread():
            self._num_held += 1
        return self

    def __exit__(self, *error: object) -> None:
        if current_thread() is main_thread():
            self._num_held -= 1
            if self._is_due:
                self._handle(signal.SIGINT, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._is_due = self._num_held > 0
        if not self._is_due and self._act is not None:
            self._act(number, frame)
