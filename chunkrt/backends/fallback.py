"""Executables that continue on another backend when the NPU fails.

Static subgraphs keep no state, so a second executable on the CPU, under the same scheme, recomputes the chunk at which
the NPU failed. If the NPU is lost, this executable also computes all later chunks. If a value exceeded the NPU's number
range, the next chunk runs on the NPU again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from chunkrt.backends.base import Array, Executable, HistoryExecutable, Passage
from chunkrt.errors import BackendError, NumberRangeError

log = logging.getLogger(__name__)


class NpuHealth:
    """State of the NPU, shared by all executables that run on it. Only the first failure of each kind is logged."""

    def __init__(self) -> None:
        self.is_lost = False
        self._has_overflowed = False
        self._lock = threading.Lock()

    def report(self, error: Exception) -> None:
        """Record a failure of the NPU: from now on no executable uses the NPU."""
        with self._lock:
            if not self.is_lost:
                self.is_lost = True
                log.warning("%s; the CPU takes over", error)

    def report_overflow(self, error: NumberRangeError) -> None:
        """Record a value that exceeds the NPU's number range: the next chunk runs on the NPU again."""
        with self._lock:
            if not self._has_overflowed:
                self._has_overflowed = True
                log.warning("%s; the CPU computes each chunk in which this happens", error)


class FallbackExecutable:
    """Executable that runs on the NPU until it fails, then on the CPU. Chunks that exceed the NPU's number range also
    run on the CPU.
    """

    def __init__(self, on_npu: Executable, on_cpu: Executable, health: NpuHealth) -> None:
        self.fixed_length = on_npu.fixed_length
        self._on_npu = on_npu
        self._on_cpu = on_cpu
        self._health = health

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Passage | None:
        """See `Executable.run`."""
        return self._first(lambda: self._on_npu.run(inputs, outputs), inputs, outputs)

    def _first(
        self, on_npu: Callable[[], Passage | None], inputs: Mapping[str, Array], outputs: Mapping[str, Array]
    ) -> Passage | None:
        if not self._health.is_lost:
            try:
                return on_npu()
            except NumberRangeError as error:
                self._health.report_overflow(error)
            except BackendError as error:
                self._health.report(error)
        return self._on_cpu.run(inputs, outputs)


class HistoryFallbackExecutable(FallbackExecutable):
    """An executable with fallback whose NPU keeps a copy of the state."""

    def __init__(self, on_npu: HistoryExecutable, on_cpu: Executable, health: NpuHealth) -> None:
        super().__init__(on_npu, on_cpu, health)
        self._after = on_npu

    def run_after(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], history: int) -> Passage | None:
        """See `HistoryExecutable.run_after`."""
        return self._first(lambda: self._after.run_after(inputs, outputs, history), inputs, outputs)


def with_fallback(on_npu: Executable, on_cpu: Executable, health: NpuHealth) -> FallbackExecutable:
    """Return an executable that runs on the NPU until the NPU fails, then on the CPU."""
    if isinstance(on_npu, HistoryExecutable):
        return HistoryFallbackExecutable(on_npu, on_cpu, health)
    return FallbackExecutable(on_npu, on_cpu, health)
