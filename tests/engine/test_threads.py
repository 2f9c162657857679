"""Threads: their number is the requested one, on any number of cores, with any backend as the NPU."""

from __future__ import annotations

import gc
import sys
import threading
import time
from pathlib import Path

import onnxruntime as ort
import pytest
from fixture_checkpoints import checkpoint, input_ids

import chunkrt
from chunkrt.backends import qnn
from chunkrt.runtime.executor import Executor
from chunkrt.runtime.stream import Stream

TASKS = Path("/proc/self/task")
if sys.platform != "linux":
    pytest.skip(f"{sys.platform} does not list a process's threads in {TASKS}", allow_module_level=True)

GGUF = checkpoint("llama_biased_gguf")
TOKENS = input_ids("llama_biased_gguf")[:40]


def threads_now() -> set[str]:
    """Return the names of this process's threads. A thread that has ended may be listed for a moment more."""
    return {path.name for path in TASKS.iterdir()}


@pytest.fixture
def during_runs(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Lists of the process's threads at the time when a concurrent run has started its own and none has ended."""
    seen: list[set[str]] = []
    has_looked = threading.Event()
    has_looked.set()
    start, run_task = Stream.start, Executor.run_task

    def run_held(*task: object) -> object:
        assert has_looked.wait(60)
        return run_task(*task)

    def start_and_look(self: Stream) -> None:
        has_looked.clear()
        start(self)
        seen.append(threads_now())
        has_looked.set()

    monkeypatch.setattr(Stream, "start", start_and_look)
    monkeypatch.setattr(Executor, "run_task", run_held)
    return seen


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("threads", [1, 2, 4, 8])
@pytest.mark.parametrize("npu", ["native", "onnxrt", "reference"])
def test_engine_has_the_requested_threads(npu: str, threads: int, during_runs: list[set[str]]) -> None:
    """Workers during a run, and the native pool's helpers, which are one fewer, because a caller computes too."""
    chunkrt.load(GGUF, npu=npu, chunk_length=8, threads=1).session().prefill(TOKENS)  # imports its libraries
    gc.collect()  # pools that earlier tests have left
    before = threads_now()
    with chunkrt.load(GGUF, npu=npu, chunk_length=8, threads=threads, policy="in_order") as engine:
        helpers = threads_now() - before
        assert len(helpers) == (threads - 1 if npu == "native" else 0)
        engine.session().prefill(TOKENS)
        workers = [len(threads_then - before - helpers) for threads_then in during_runs]
        assert workers == ([threads] if threads > 1 else [])
        deadline = time.monotonic() + 60
        while threads_now() - before != helpers:
            assert time.monotonic() < deadline, "a run has left threads behind"


def test_sessions_for_an_npu_have_no_onnx_runtime_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default each would have as many as there are cores, and an engine has dozens of sessions."""
    pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn, which emulates the NPU, is not installed")
    if not qnn.open_htp().is_emulated:
        pytest.skip("this machine has an NPU, and a compiler for that NPU alone")
    make, sessions = ort.InferenceSession, []

    def recorded(*arguments: object):
        sessions.append(make(*arguments))
        return sessions[-1]

    monkeypatch.setattr(ort, "InferenceSession", recorded)
    with chunkrt.load(GGUF, npu="qnn", chunk_length=8, threads=2):
        assert sessions
        assert {session.get_session_options().intra_op_num_threads for session in sessions} == {1}
