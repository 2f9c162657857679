"""Executables that handle failures of the NPU.

Static subgraphs keep no state, so a second executable on the CPU, under the same scheme, recomputes the chunk at which
the NPU failed. It also computes later chunks until the NPU is restored: a thread opens its contexts again. If a value
exceeded the NPU's number range, the next chunk runs on the NPU again.

Without a second executable a failure is an error, and the next run restores the NPU first.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from chunkrt.backends.base import Array, Executable, HistoryExecutable, Passage
from chunkrt.errors import BackendError, DeviceLostError, NumberRangeError
from chunkrt.gate import MOST_SECONDS_AT_END

log = logging.getLogger(__name__)

RESTORE_DELAYS_S = (0.0, 1.0, 5.0, 30.0, 120.0)
"""Seconds before each attempt to restore the NPU. Their number is the maximum number of attempts."""

STEADY_RUNS = 1000
"""Number of runs without a failure after which the attempts are counted from the beginning again."""


STATUSES = ("ok", "restoring", "lost")
"""Values of `NpuState.status`."""


@dataclass(frozen=True, kw_only=True)
class NpuState:
    """State of the NPU.

    Attributes:
        status: "ok"; "restoring" if the CPU computes until the NPU is back; "lost" if no further attempt follows.
        failures: number of times that the NPU failed.
        restored: number of times that it was restored.
        fallbacks: number of runs of subgraphs that the CPU computed for it.
        error: the last failure; empty if there was none.
    """

    status: str = "ok"
    failures: int = 0
    restored: int = 0
    fallbacks: int = 0
    error: str = ""


_made: weakref.WeakSet[NpuHealth] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End the threads of engines that were not closed before the process exits; see `TimedCalls.end`."""
    for health in tuple(_made):
        health.close(MOST_SECONDS_AT_END)


class NpuHealth:
    """State of the NPU, shared by all executables that run on it. Failures, and the first value that exceeds the NPU's
    number range, are logged.

    Args:
        restore: opens the contexts again, or raises an error; None if the NPU cannot be restored.
    """

    def __init__(self, restore: Callable[[], None] | None = None) -> None:
        self.is_lost = False
        self.num_fallbacks = 0
        """Number of runs of subgraphs that the CPU computed for the NPU."""
        self.num_restored = 0
        """Number of times that the NPU was restored."""
        self._restore = restore
        self._num_failures = self._num_attempts = self._num_good_runs = 0
        self._error = ""
        self._is_final = False
        self._has_overflowed = False
        self._lock = threading.Lock()
        self._restoring = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        _made.add(self)

    @property
    def can_restore(self) -> bool:
        """True if there is a way to restore the NPU."""
        return self._restore is not None

    @property
    def state(self) -> NpuState:
        """The current state."""
        with self._lock:
            status = "ok" if not self.is_lost else "lost" if self._is_final or not self.can_restore else "restoring"
            return NpuState(
                status=status,
                failures=self._num_failures,
                restored=self.num_restored,
                fallbacks=self.num_fallbacks,
                error=self._error,
            )

    def report(self, error: Exception, num_restored: int, *, in_background: bool) -> None:
        """Record a failure of the NPU: no executable uses it until it is restored.

        Args:
            num_restored: the attribute before the run that failed. If the NPU was restored since then, the run used the
                contexts that were closed, and its failure is not a new one.
            in_background: the CPU takes over, and a thread restores the NPU; otherwise `require` restores it.
        """
        with self._lock:
            if self.is_lost or self._closed.is_set() or num_restored != self.num_restored:
                return
            self.is_lost = True
            self._num_failures += 1
            self._num_good_runs = 0
            self._error = str(error)
            if not in_background:
                return
            log.warning("%s; the CPU takes over", error)
            if self.can_restore:
                self._thread = threading.Thread(target=self._restore_later, name="chunkrt-npu-restore", daemon=True)
                self._thread.start()

    def give_up(self, error: Exception) -> None:
        """Record that the NPU cannot be used at all."""
        with self._lock:
            self.is_lost = self._is_final = True
            self._error = str(error)
        log.warning("%s; the CPU takes over", error)

    def report_overflow(self, error: NumberRangeError) -> None:
        """Record a value that exceeds the NPU's number range: the next chunk runs on the NPU again."""
        with self._lock:
            if not self._has_overflowed:
                self._has_overflowed = True
                log.warning("%s; the CPU computes each chunk in which this happens", error)

    def report_success(self) -> None:
        """Record a run without a failure."""
        with self._lock:
            self._num_good_runs += 1
            if self._num_good_runs == STEADY_RUNS:
                self._num_attempts = 0

    def report_fallback(self) -> None:
        """Record a run that the CPU computes for the NPU."""
        with self._lock:
            self.num_fallbacks += 1

    def require(self) -> None:
        """Restore the NPU if it failed. Raise DeviceLostError if this is not possible."""
        if not self.is_lost:
            return
        with self._restoring:
            if self.is_lost and (error := self._try_to_restore()) is not None:
                raise DeviceLostError(f"the NPU was lost ({self._error}), and cannot be restored: {error}") from error

    def close(self, most_seconds: float | None = None) -> None:
        """End the attempts to restore the NPU. A current one is completed first, unless it takes more than
        `most_seconds`.
        """
        self._closed.set()
        if (thread := self._thread) is not None and thread is not threading.current_thread():
            thread.join(most_seconds)

    def _restore_later(self) -> None:
        while self._num_attempts < len(RESTORE_DELAYS_S):
            if self._closed.wait(RESTORE_DELAYS_S[self._num_attempts]):
                return
            with self._lock:
                self._num_attempts += 1
            with self._restoring:
                error = self._try_to_restore()
            if error is None:
                return
            log.info("the NPU cannot be restored: %s", error)
        with self._lock:
            self._is_final = True
        log.warning("the NPU did not come back after %d attempts; the CPU computes from now on", self._num_attempts)

    def _try_to_restore(self) -> Exception | None:
        assert self._restore is not None
        try:
            self._restore()
        except Exception as error:  # a plug-in's backend may raise any type
            return error
        with self._lock:
            self.num_restored += 1
            self.is_lost = False
        log.warning("the NPU is restored")
        return None


class GuardedExecutable:
    """Executable that runs on the NPU unless it failed.

    Args:
        on_npu: the executable on the NPU.
        on_cpu: computes a run that the NPU did not compute; None if a failure is an error.
        health: state of the NPU.
    """

    def __init__(self, on_npu: Executable, on_cpu: Executable | None, health: NpuHealth) -> None:
        self.fixed_length = on_npu.fixed_length
        self._on_npu = on_npu
        self._on_cpu = on_cpu
        self._health = health

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Passage | None:
        """See `Executable.run`."""
        return self._guarded(lambda: self._on_npu.run(inputs, outputs), inputs, outputs)

    def _guarded(
        self, on_npu: Callable[[], Passage | None], inputs: Mapping[str, Array], outputs: Mapping[str, Array]
    ) -> Passage | None:
        health = self._health
        if self._on_cpu is None:
            health.require()
            num_restored = health.num_restored
            try:
                return on_npu()
            except DeviceLostError as error:
                health.report(error, num_restored, in_background=False)
                raise
        num_restored = health.num_restored
        if not health.is_lost:
            try:
                passage = on_npu()
                health.report_success()
                return passage
            except NumberRangeError as error:
                health.report_overflow(error)
            except BackendError as error:
                health.report(error, num_restored, in_background=True)
        health.report_fallback()
        return self._on_cpu.run(inputs, outputs)


class GuardedHistoryExecutable(GuardedExecutable):
    """A guarded executable whose NPU keeps a copy of the state."""

    def __init__(self, on_npu: HistoryExecutable, on_cpu: Executable | None, health: NpuHealth) -> None:
        super().__init__(on_npu, on_cpu, health)
        self._after = on_npu

    def run_after(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], history: int) -> Passage | None:
        """See `HistoryExecutable.run_after`."""
        return self._guarded(lambda: self._after.run_after(inputs, outputs, history), inputs, outputs)


def guarded(on_npu: Executable, on_cpu: Executable | None, health: NpuHealth) -> GuardedExecutable:
    """Return a guarded executable; see `GuardedExecutable`."""
    if isinstance(on_npu, HistoryExecutable):
        return GuardedHistoryExecutable(on_npu, on_cpu, health)
    return GuardedExecutable(on_npu, on_cpu, health)
