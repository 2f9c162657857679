"""Raise Ctrl-C at a chosen place of this thread's execution in chunkrt's files."""

import dis
import signal
import sys
import weakref
from functools import cache
from itertools import pairwise

from chunkrt import gate
from chunkrt.engine import admission, engine, generation, many, sequence, session
from chunkrt.engine.ranks import leader
from chunkrt.runtime import executor, request, schedule, scheduler, state, state_file, state_tensors, stream
from chunkrt.runtime.ranks import messages, mpi

ENGINE = (admission, engine, gate, generation, many, sequence, session)
CALLER = (*ENGINE, executor, request, scheduler, state, state_file, state_tensors, stream)
"""Modules that calls of a session execute, for any threads and other sessions."""

WORKERS = (*CALLER, schedule)
RANKS = (*WORKERS, leader, messages, mpi)


@cache
def places(code):
    """Return the offsets where CPython may deliver a signal: after calls and at the start of a function.

    An offset counts only if both instructions have the same exception handler.
    """
    table = dis._parse_exception_table(code)

    def handler(offset):
        return next((entry.target for entry in table if entry.start <= offset < entry.end), None)

    return {
        after.offset
        for before, after in pairwise(dis.get_instructions(code))
        if before.opname in ("CALL", "CALL_FUNCTION_EX", "RESUME") and handler(before.offset) == handler(after.offset)
    }


def _is_in_finalizer(frame):
    """Return True if a weak reference called the function, or a function that calls it."""
    while (frame := frame.f_back) is not None:
        if frame.f_code.co_filename == weakref.__file__:
            return True
    return False


class InterruptAt:
    """Context that raises SIGINT at the n-th place that this thread reaches in some modules, and counts the places."""

    def __init__(self, at, modules=CALLER):
        self.at, self.count = at, 0
        self._files = {module.__file__ for module in modules}

    def __enter__(self):
        self._previous = sys.gettrace()  # the tracer that measures coverage
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_):
        sys.settrace(self._previous)

    def _enter(self, frame, event, argument):
        if frame.f_code.co_filename not in self._files or _is_in_finalizer(frame):
            return None  # CPython prints errors of finalizers and drops them
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame, event, argument):
        if event == "opcode" and frame.f_lasti in places(frame.f_code):
            self.count += 1
            if self.count == self.at:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self._step
