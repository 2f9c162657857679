"""Calls of one compiled context: one computes while the values of another are converted. The NPU is a fake one."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from native_cases import make_case, node, tensor

from chunkrt.backends.qnn.executable import NUM_PLACES, Context, QnnExecutable
from chunkrt.backends.qnn.timed_calls import TimedCalls
from chunkrt.errors import BackendError, DeviceLostError

pytest.importorskip("onnxruntime")
ROWS, WIDTH, TIMEOUT = 32, 8, 20


class FakeSession:
    """Doubles its input. A computing call signals it, and waits until it may end."""

    def __init__(self) -> None:
        self.began = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)
        self.num_computing = self.most_computing = 0
        self.error: Exception | None = None

    def io_binding(self) -> Any:
        values: dict[str, Any] = {}
        return SimpleNamespace(
            values=values,
            bind_ortvalue_input=lambda name, value: values.update(x=value),
            bind_ortvalue_output=lambda name, value: values.update(y=value),
        )

    def run_with_iobinding(self, binding: Any) -> None:
        self.num_computing += 1
        self.most_computing = max(self.most_computing, self.num_computing)
        self.began.release()
        assert self.may_end.acquire(timeout=TIMEOUT)
        if self.error is not None:
            self.num_computing -= 1
            raise self.error
        binding.values["y"].update_inplace(binding.values["x"].numpy() * np.float16(2))
        self.num_computing -= 1


def made() -> tuple[QnnExecutable, FakeSession]:
    subgraph, plan, _ = make_case([node("Add", "x x", "y")], [tensor("x", "T", WIDTH), tensor("y", "T", WIDTH)], "y")
    session = FakeSession()
    calls = TimedCalls()

    def open_context(inputs: Any, outputs: Any, num_places: int) -> Context:
        call = lambda function: calls.call(function, TIMEOUT)  # noqa: E731
        return Context("static.0", session, inputs, outputs, call, num_places=num_places)

    return QnnExecutable(subgraph, plan, ROWS, {ROWS: open_context}), session


class Call(threading.Thread):
    def __init__(self, executable: QnnExecutable, value: float) -> None:
        super().__init__(daemon=True)
        self.x = Watched(np.full((ROWS, WIDTH), value, np.float32))
        self.y = np.zeros((ROWS, WIDTH), np.float32)
        self.passage: Any = None
        self._executable = executable
        self.start()

    def run(self) -> None:
        self.passage = self._executable.run({"x": self.x}, {"y": self.y})


class Watched(np.ndarray):
    """An array that signals when it has been read."""

    def __new__(cls, array: np.ndarray) -> Watched:
        watched = array.view(cls)
        watched.was_read = threading.Event()
        return watched

    def __array_finalize__(self, source: Any) -> None:
        self.was_read = getattr(source, "was_read", None)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        plain = [a.view(np.ndarray) if isinstance(a, Watched) else a for a in args]
        result = function(*plain, **kwargs)
        self.was_read.set()
        return result


def test_inputs_enter_while_the_previous_call_computes() -> None:
    executable, session = made()
    first = Call(executable, 1.0)
    assert session.began.acquire(timeout=TIMEOUT)
    second = Call(executable, 2.0)
    assert second.x.was_read.wait(TIMEOUT)  # and the first call still computes, because it has not been released
    assert not session.began.acquire(blocking=False)
    session.may_end.release()
    first.join(TIMEOUT)
    assert session.began.acquire(timeout=TIMEOUT)
    session.may_end.release()
    second.join(TIMEOUT)
    assert session.most_computing == 1
    np.testing.assert_array_equal(first.y, np.full((ROWS, WIDTH), 2.0))
    np.testing.assert_array_equal(second.y, np.full((ROWS, WIDTH), 4.0))
    for call in (first, second):
        assert list(call.passage) == sorted(call.passage)
    assert first.passage.ended_ns <= second.passage.began_ns


def test_number_of_entering_calls_is_limited() -> None:
    executable, session = made()
    calls = [Call(executable, value) for value in range(NUM_PLACES)]
    assert all(call.x.was_read.wait(TIMEOUT) for call in calls)
    late = Call(executable, 9.0)
    assert session.began.acquire(timeout=TIMEOUT)
    assert not late.x.was_read.is_set()
    session.may_end.release(NUM_PLACES + 1)
    for value, call in enumerate(calls):
        call.join(TIMEOUT)
        np.testing.assert_array_equal(call.y, np.full((ROWS, WIDTH), 2.0 * value))
    late.join(TIMEOUT)
    np.testing.assert_array_equal(late.y, np.full((ROWS, WIDTH), 18.0))


@pytest.mark.parametrize("fails", ["entering", "computing"])
def test_failed_call_releases_its_place(fails: str) -> None:
    executable, session = made()
    session.may_end.release(100)
    x, y = np.ones((ROWS, WIDTH), np.float32), np.zeros((ROWS, WIDTH), np.float32)
    for _ in range(NUM_PLACES + 1):
        if fails == "entering":
            with pytest.raises(BackendError, match="left the range of float16"):
                executable.run({"x": x * np.float32(1e6)}, {"y": y})
        else:
            session.error = RuntimeError("gone")
            with pytest.raises(DeviceLostError, match=r"the NPU failed in subgraph static\.0: gone"):
                executable.run({"x": x}, {"y": y})
    session.error = None
    executable.run({"x": x}, {"y": y})
    np.testing.assert_array_equal(y, 2 * x)
