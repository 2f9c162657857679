"""Outliving the NPU: an executable that goes on elsewhere when the NPU is lost.

Static subgraphs keep no state, so the chunk at which the NPU failed is simply computed again, and everything after it,
by a second executable under the same scheme.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from chunkrt.backends.base import Array, Executable, HistoryExecutable, Passage
from chunkrt.errors import BackendError

log = logging.getLogger(__name__)


class NpuHealth:
    """Whether the NPU still works, as all executables on it know. The first failure is told in one warning."""

    def __init__(self) -> None:
        self.is_lost = False
        self._lock = threading.Lock()

    def report(self, error: Exception) -> None:
        """The NPU failed: nobody shall use it any more."""
        with self._lock:
            if not self.is_lost:
                self.is_lost = True
                log.warning("%s; the CPU takes over", error)


class FallbackExecutable:
    """Runs on the NPU while that works, then on the CPU."""

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
            except BackendError as error:
                self._health.report(error)
        return self._on_cpu.run(inputs, outputs)


class HistoryFallbackExecutable(FallbackExecutable):
    """One whose NPU keeps a copy of the state."""

    def __init__(self, on_npu: HistoryExecutable, on_cpu: Executable, health: NpuHealth) -> None:
        super().__init__(on_npu, on_cpu, health)
        self._after = on_npu

    def run_after(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], history: int) -> Passage | None:
        """See `HistoryExecutable.run_after`."""
        return self._first(lambda: self._after.run_after(inputs, outputs, history), inputs, outputs)


def with_fallback(on_npu: Executable, on_cpu: Executable, health: NpuHealth) -> FallbackExecutable:
    """What runs on the NPU while that works, then on the CPU."""
    if isinstance(on_npu, HistoryExecutable):
        return HistoryFallbackExecutable(on_npu, on_cpu, health)
    return FallbackExecutable(on_npu, on_cpu, health)
