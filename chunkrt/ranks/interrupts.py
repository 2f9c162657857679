"""Ctrl-C, held back while the main thread is where it must not be left: in the middle of a message, say."""

from __future__ import annotations

import signal
from collections.abc import Callable
from threading import current_thread, main_thread
from types import FrameType
from typing import Self


class Interrupts:
    """SIGINT's handler, in the place of the one that is there, if made in the main thread."""

    def __init__(self) -> None:
        self._is_held = self._is_due = False
        found = signal.getsignal(signal.SIGINT)
        self._act: Callable[[int, FrameType | None], object] | None = found if callable(found) else None
        if self._act is not None and current_thread() is main_thread():
            signal.signal(signal.SIGINT, self._handle)

    @property
    def can_be_held(self) -> bool:
        """Whether none can reach the thread that asks while it holds them; not if somebody has another handler now."""
        return current_thread() is not main_thread() or signal.getsignal(signal.SIGINT) in (
            self._handle,
            signal.SIG_IGN,
            signal.SIG_DFL,
        )

    def __enter__(self) -> Self:
        if current_thread() is main_thread():
            self._is_held = True
        return self

    def __exit__(self, *error: object) -> None:
        if current_thread() is main_thread():
            self._is_held = False
            if self._is_due:
                self._handle(signal.SIGINT, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._is_due = self._is_held
        if not self._is_held and self._act is not None:
            self._act(number, frame)
