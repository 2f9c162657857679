"""Progress of a prefill."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from chunkrt.engine.sequence import TokenSequence
from chunkrt.files import Progress, no_progress
from chunkrt.progress import PREFILL, find_progress


class _Counter:
    """Counter of the prompt tokens that threads have computed."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done, self._lock = progress, total, 0, Lock()

    def add(self, num_tokens: int) -> None:
        """Report `num_tokens` more computed tokens. Earlier tokens that are run again do not count."""
        with self._lock:
            self._done = min(self._done + num_tokens, self._total)
            self._progress(PREFILL, self._done, self._total)


@contextmanager
def telling(sequence: TokenSequence, progress: Progress | bool, num_tokens: int) -> Iterator[None]:
    """Report the number of computed tokens of a prompt with `num_tokens` tokens while the block runs."""
    shown = find_progress(progress)
    if shown is no_progress:
        yield
        return
    sequence.on_tokens = _Counter(shown, num_tokens).add
    try:
        yield
    finally:
        sequence.on_tokens = None
        shown("", 0, 0)
