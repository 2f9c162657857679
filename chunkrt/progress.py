"""Display of progress: a bar in a terminal or a notebook, or otherwise a line on standard error at intervals."""

from __future__ import annotations

import sys
import time
from threading import Lock
from typing import TYPE_CHECKING

from chunkrt.errors import ConfigError
from chunkrt.files import Progress, no_progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

SHOWN_AFTER_SECONDS = 1.0
SECONDS_BETWEEN_LINES = 10.0
PREFILL = "prefill"
"""Description of the progress of a prefill, which is displayed with a rate in tokens per second."""


class ShownProgress:
    """A `Progress` function that displays a bar, and may be called from any thread.

    Work that takes less than a second is not displayed. The bar is removed at the end of the `with` block, or if it is
    called with a total of 0.
    """

    def __init__(self) -> None:
        is_open = not getattr(sys.stderr, "closed", sys.stderr is None)
        is_terminal = is_open and getattr(sys.stderr, "isatty", bool)()
        self._draws = is_terminal or type(sys.stderr).__module__.startswith("ipykernel")
        self._bars: Bars | None = None
        self._what = ""
        self._begin = self._told = 0.0
        self._first = 0
        self._lock = Lock()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Update the display with the amount done and the total."""
        with self._lock:
            now = time.monotonic()
            if what != self._what or not total:
                self._stop()
                self._what, self._begin, self._told, self._first = what, now, now, done
            if not total:
                return
            if self._draws:
                self._draw(done, total, now)
            elif now - self._told >= SECONDS_BETWEEN_LINES:
                self._told = now
                print(self._line(done, total, now), file=sys.stderr, flush=True)
            if done >= total:
                self._stop()
                self._what = ""

    def __enter__(self) -> ShownProgress:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._stop()

    def _draw(self, done: int, total: int, now: float) -> None:
        if now - self._begin < SHOWN_AFTER_SECONDS and self._bars is None:
            return
        if self._bars is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bars

            pace = TextColumn("{task.fields[pace]}")
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), pace)
            self._bars = Bars(*columns, console=Console(stderr=True), transient=True)
            self._bars.add_task(self._what, total=total, pace="")
            self._bars.start()
        (task,) = self._bars.task_ids
        self._bars.update(task, completed=done, total=total, pace=self._pace(done, total, now))

    def _line(self, done: int, total: int, now: float) -> str:
        unit = " tokens" if self._what == PREFILL else ""
        return f"{self._what}: {done:,} of {total:,}{unit}, {self._pace(done, total, now)}"

    def _pace(self, done: int, total: int, now: float) -> str:
        """Return a text with the rate of tokens and the remaining time."""
        rate = (done - self._first) / max(now - self._begin, 1e-9)
        if not rate:
            return f"{now - self._begin:.0f} s so far"
        left = f"{(total - done) / rate:.0f} s left"
        return f"{rate:.0f} tokens/s, {left}" if self._what == PREFILL else left

    def _stop(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


def find_progress(progress: Progress | bool | None) -> Progress:
    """Return the progress function for an argument: a function is returned unchanged, True selects a display, and None
    or False no progress.

    Raises:
        ConfigError: the argument is none of these.
    """
    if progress is True:
        return ShownProgress()
    if progress is None or progress is False:
        return no_progress
    if not callable(progress):
        raise ConfigError(f"progress is {progress!r}, expected True, or a function of (description, done, total)")
    return progress
