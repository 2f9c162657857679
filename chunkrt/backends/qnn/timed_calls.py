"""Calls to the NPU with a time limit: one thread makes them, one at a time, as the NPU computes one graph at a time."""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar, cast

from chunkrt.errors import DeviceLostError
from chunkrt.gate import MOST_SECONDS_AT_END

Result = TypeVar("Result")

DEVICE_LIMIT_S, EMULATOR_LIMIT_S = 10.0, 600.0
"""Default time limits. A graph takes milliseconds on a device, and up to minutes in the emulator."""

_made: weakref.WeakSet[TimedCalls] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for calls in tuple(_made):
        calls.end()


class TimedCalls:
    """A thread that makes calls.

    A call of native code cannot be interrupted. If a call exceeds its limit, its thread is abandoned: the thread ends
    when the call returns, and the next call gets a new thread.
    """

    def __init__(self) -> None:
        self._turn = Lock()
        self._num_stuck = 0
        self._thread: _Caller | None = None
        self._process_id = os.getpid()
        self._has_ended = False
        _made.add(self)

    def call(self, function: Callable[[], Result], limit_s: float) -> Result:
        """Return the result of a function, or raise its error. Calls from several threads take turns.

        Raises:
            DeviceLostError: the call exceeded its limit; or it waited for its turn while another call exceeded its
                limit; or the process exits.
        """
        num_stuck = self._num_stuck
        with self._turn:
            if self._num_stuck != num_stuck:
                raise DeviceLostError("another call to the NPU did not return")
            if self._has_ended:
                raise DeviceLostError("the NPU is not used while the process exits")
            if self._thread is None or not self._thread.is_alive():  # a forked process has no threads
                self._thread, self._process_id = _Caller(), os.getpid()
                self._thread.start()
            call = _Call(function)
            self._thread.calls.put(call)
            if not call.has_ended.acquire(timeout=limit_s):
                self._thread.calls.put(None)
                self._thread, self._num_stuck = None, num_stuck + 1
                raise DeviceLostError(f"the NPU did not respond within {limit_s:g} s (`npu_timeout`)")
        if call.error is not None:
            try:
                raise call.error
            finally:
                call.error = None  # its traceback refers to the call
        return cast(Result, call.result)

    def end(self) -> None:
        """End the thread before the process exits: a call that returned from native code after the interpreter has shut
        down would abort the process. An interrupt may have left a call whose caller no longer waits for it. Do not wait
        for a call that is stuck.
        """
        self._has_ended = True
        if os.getpid() != self._process_id:
            return
        until = time.monotonic() + MOST_SECONDS_AT_END
        if not self._turn.acquire(timeout=MOST_SECONDS_AT_END):
            return
        if self._thread is not None:
            self._thread.calls.put(None)
            self._thread.join(max(0.0, until - time.monotonic()))
        self._turn.release()


class _Call:
    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.has_ended = Lock()  # not an Event, whose own lock an interrupt may leave held
        self.has_ended.acquire()
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
            call.has_ended.release()
            del call  # it refers to the buffers of a session
