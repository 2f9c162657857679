"""Many sequences at once, driven by one thread. Their runs share chunks, and results are returned when they are
ready."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from chunkrt.engine.sequence import Steps, Work
from chunkrt.runtime.run import Run, RunResult

Result = TypeVar("Result")
Part = Generator[Steps[Result], None, None]
"""Work of one of many sequences: consecutive series of steps, and every series returns a result."""

MOST_AT_ONCE = 16
"""Default maximum number of sequences in progress."""


class Pending(Protocol):
    """A run that has begun; see `Ticket`."""

    def result(self) -> RunResult:
        """Return the result of the run after it has ended."""
        ...


class Runs(Protocol):
    """Interface of an object that computes concurrent runs; see `Conductor`."""

    def ticket(self, run: Run, on_end: Callable[[], object]) -> Any:
        """Return a `Pending` for a run. `on_end` is called when the run has ended."""
        ...

    def begin(self, pending: Any) -> None:
        """Start computing a pending run."""
        ...

    def abandon(self, pending: Any) -> None:
        """End a pending run."""
        ...


class _Active(Generic[Result]):
    """A part in progress. `ticket` is the run for which the part waits, until the result has been taken."""

    def __init__(self, index: int, part: Part[Result]) -> None:
        self.index, self.part = index, part
        self.steps: Steps[Result] | None = None
        self.ticket: Pending | None = None
        self.is_done = False

    def advance(self, runs: Runs, on_end: Callable[[], object]) -> Iterator[tuple[int, Result]]:
        """Continue the part until it has started a run or has ended. Yield its results."""
        while True:
            try:
                if self.steps is None:
                    self.steps = next(self.part, None)
                    if self.steps is None:
                        self.is_done = True
                        return
                    wanted = next(self.steps)
                else:
                    ticket, self.ticket = self.ticket, None
                    assert ticket is not None
                    try:
                        result = ticket.result()
                    except BaseException as error:
                        wanted = self.steps.throw(error)
                    else:
                        wanted = self.steps.send(result)
                self.ticket = runs.ticket(_after_work(self.steps, wanted), on_end)
                runs.begin(self.ticket)
                return
            except StopIteration as end:
                self.steps = None
                yield self.index, end.value


def _after_work(steps: Steps[Result], wanted: Run | Work) -> Run:
    """Do the pending work, and return the next run."""
    while isinstance(wanted, Work):
        try:
            wanted.do()
        except BaseException as error:
            wanted = steps.throw(error)
        else:
            wanted = steps.send(None)
    return wanted


def drive_many(
    num_parts: int, open_part: Callable[[int, bool], Part[Result] | None], runs: Runs, most: int
) -> Iterator[tuple[int, Result]]:
    """Execute all parts to their end, at most `most` at a time.

    Args:
        num_parts: number of parts.
        open_part: begins the part with a given index. It returns None if the part cannot begin yet. If its second
        argument
            is True, it waits until the part can begin.
        runs: computes the runs of the parts.
        most: maximum number of parts in progress.

    Yields:
        Results, each with the index of its part.

    Raises:
        BaseException: the error of a part. After an error, or if the caller closes the generator, all other parts are
        ended.
    """
    begun = 0
    active: dict[int, _Active[Result]] = {}
    ended: SimpleQueue[int] = SimpleQueue()
    ready: deque[int] = deque()
    try:
        while True:
            while begun < num_parts and len(active) < most:
                part = open_part(begun, not active)
                if part is None:
                    break
                active[begun] = _Active(begun, part)
                ready.append(begun)
                begun += 1
            if not active:
                return
            index = ready.popleft() if ready else ended.get()
            one = active[index]
            yield from one.advance(runs, partial(ended.put, index))
            if one.is_done:
                del active[index]
    finally:
        for one in active.values():
            if one.ticket is not None:
                runs.abandon(one.ticket)
            if one.steps is not None:
                one.steps.close()
            one.part.close()
