"""Threads: there are as many as were asked for, on any number of cores, whoever plays the NPU."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
from fixture_checkpoints import checkpoint, input_ids

import chunkrt
from chunkrt.runtime.workers import Workers

TASKS = Path("/proc/self/task")
if not TASKS.is_dir():
    pytest.skip(f"{sys.platform} does not list a process's threads in {TASKS}", allow_module_level=True)

GGUF = checkpoint("llama_biased_gguf")
TOKENS = input_ids("llama_biased_gguf")[:40]


def num_threads() -> int:
    """Those of this process, whoever started them."""
    return len(list(TASKS.iterdir()))


@pytest.fixture
def during_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fills with the process's threads while tasks run: all of a run's workers live until its last task has ended."""
    seen: list[int] = []
    make = Workers.__init__

    def counting(self, schedule, execute, **options) -> None:
        def noted(task) -> None:
            started.wait(60)
            seen.append(num_threads())
            execute(task)

        make(self, schedule, noted, **options)
        started = threading.Barrier(sum(processor.workers for processor in schedule.processors))
        work = self._work

        def wait_and_work(processor, idle, worker) -> None:
            started.wait(60)
            work(processor, idle, worker)

    monkeypatch.setattr(Workers, "__init__", counting)
    return seen
