"""Result of a prefill, with its duration, and its progress."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from chunkrt.files import Progress, no_progress
from chunkrt.progress import PREFILL, find_progress
from chunkrt.runtime.tasks import TaskEvent

if TYPE_CHECKING:
    from chunkrt.engine.sequence import TokenSequence

Float32 = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class PrefillResult:
    """Result of a prefill.

    Args:
        logits: float32 [vocab] of the last token, [T, vocab] if all logits were requested, None if none were requested.
        hidden: float32 [T, H] of all tokens if requested: the output of the last norm, which is the input of the LM
            head.
        position: number of tokens in the session's context after the prefill. `Session.rewind(result.position)` drops
            everything that was added later.
        num_tokens: number of tokens that were computed. It includes earlier tokens that had to be run again, and
            excludes tokens from the prefix cache.
        num_cached: number of tokens from the prefix cache.
        num_chunks: number of chunks that were computed.
        seconds: wall time.
        events: one record for each task, for statistics and traces. The subgraph of a task is an index into the stages
            of its run (`RunRecord.pipeline`, see `Session.on_run`). For a prompt of one chunk without an NPU these are
            the two fused parts of the plan.
    """

    logits: Float32 | None
    hidden: Float32 | None = None
    position: int
    num_tokens: int
    num_cached: int = 0
    num_chunks: int
    seconds: float
    events: Sequence[TaskEvent]

    def __repr__(self) -> str:
        """Return a summary, in which only the sizes of arrays and events are shown."""
        logits = "none" if self.logits is None else f"float32 {list(self.logits.shape)}"
        rate = self.num_tokens / self.seconds if self.seconds else 0
        cached = f", {self.num_cached} cached" if self.num_cached else ""
        return (
            f"PrefillResult({self.num_tokens} tokens in {self.num_chunks} chunks{cached}, position {self.position}, "
            f"{self.seconds:.3f} s, {rate:.1f} tokens/s, logits {logits}, {len(self.events)} events)"
        )


def joined(results: Sequence[PrefillResult]) -> PrefillResult:
    """Return the combined statistics of several results, with the logits of the last one."""
    return PrefillResult(
        logits=results[-1].logits,
        hidden=results[-1].hidden,
        position=results[-1].position,
        num_tokens=sum(result.num_tokens for result in results),
        num_cached=sum(result.num_cached for result in results),
        num_chunks=sum(result.num_chunks for result in results),
        seconds=sum(result.seconds for result in results),
        events=[event for result in results for event in result.events],
    )


@contextmanager
def telling(sequence: TokenSequence, progress: Progress | bool, num_tokens: int) -> Iterator[None]:
    """Report the number of computed tokens of a prompt with `num_tokens` tokens while the block runs."""
    shown = find_progress(progress)
    if shown is no_progress:
        yield
        return
    num_done, lock = 0, Lock()

    def add(number: int) -> None:
        """Report more computed tokens, from any thread. Earlier tokens that are run again do not count."""
        nonlocal num_done
        with lock:
            num_done = min(num_done + number, num_tokens)
            shown(PREFILL, num_done, num_tokens)

    sequence.on_tokens = add
    try:
        yield
    finally:
        sequence.on_tokens = None
        shown("", 0, 0)
