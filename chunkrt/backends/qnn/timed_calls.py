"""Calls to the NPU with a time limit: one thread makes them, one at a time, as the NPU computes one graph at a time."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, TypeVar, cast

from chunkrt.errors import DeviceLostError

Result = TypeVar("Result")

DEVICE_LIMIT_S, EMULATOR_LIMIT_S = 10.0, 600.0
"""Default time limits. A graph takes milliseconds on a device, and up to minutes in the emulator."""


class TimedCalls:
    """A thread that makes calls.

    A call of native code cannot be interrupted. If a call exceeds its limit, its thread is abandoned: the thread ends
    when the call returns, and the next call gets a new thread.
    """

    def __init__(self) -> None:
        self._turn = Lock()
        self._num_stuck = 0
        self._thread: _Caller | None = None

    def call(self, function: Callable[[], Result], limit_s: float) -> Result:
        """Return the result of a function, or raise its error. Calls from several threads take turns.

        Raises:
            DeviceLostError: the call exceeded its limit; or it waited for its turn while another call exceeded its
                limit.
        """
        num_stuck = self._num_stuck
        with self._turn:
            if self._num_stuck != num_stuck:
                raise DeviceLostError("another call to the NPU did not return")
            if self._thread is None or not self._thread.is_alive():  # a forked process has no threads
                self._thread = _Caller()
                self._thread.start()
            call = _Call(function)
            self._thread.calls.put(call)
            if not call.has_ended.wait(limit_s):
                self._thread.calls.put(None)
                self._thread, self._num_stuck = None, num_stuck + 1
                raise DeviceLostError(f"the NPU did not respond within {limit_s:g} s (`npu_timeout`)")
        if call.error is not None:
            try:
                raise call.error
            finally:
                call.error = None  # its traceback refers to the call
        return cast(Result, call.result)


class _Call:
    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.has_ended = Event()
        self.result: Any = None
        self.error: BaseException | None = None


class _Caller(Thread):
    def __init__(self) -> None:
        super().__init__(name="chunkrt-npu-calls", daemon=True)  # a stuck call must not keep the process alive
        self.calls: SimpleQueue[_Call | None] = SimpleQueue()

    def run(self) -> None:
        while (call := self.calls.get()) is not None:
            try:
                call.result = call.function()
            except BaseException as error:
                call.error = error
            call.has_ended.set()
            del call  # it refers to the buffers of a session
