"""Workers drive a schedule in real time, with threads or in the calling thread.

Threads wait on condition variables that share one lock. Under this lock a worker reports the task that has ended and
claims the next one in a single step. No ready task is missed: the worker that ends a task claims one task itself, and
wakes one idle worker for each remaining ready task.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from threading import Condition, Event, Lock, Thread
from time import perf_counter_ns
from typing import TypeVar

from chunkrt.backends.base import Passage
from chunkrt.gate import Gate
from chunkrt.runtime.affinity import running_on
from chunkrt.runtime.run import Cancel
from chunkrt.runtime.schedule import Schedule
from chunkrt.runtime.tasks import Processor, Task, TaskEvent

Execute = Callable[[Task], Passage | None]
Changed = TypeVar("Changed")


GivesWay = Callable[[Schedule], object]
"""Function that is called before every claim, and may withdraw chunks."""


def never(schedule: Schedule) -> None:
    """Never give way to another run."""


def run_in_caller(
    schedule: Schedule,
    execute: Execute,
    *,
    cancel: Cancel | Event | None = None,
    gives_way: GivesWay = never,
) -> list[TaskEvent]:
    """Drive a schedule to its end in the calling thread, one task at a time.

    See `Workers.run`. In contrast to `Workers.run`, an interrupt is raised within `execute`.
    """
    events: list[TaskEvent] = []
    while not schedule.is_finished:
        if cancel is not None and cancel.is_set():
            schedule.cancel()
            break
        gives_way(schedule)
        if schedule.is_finished:
            break
        for processor in schedule.processors:
            if (task := schedule.claim(processor)) is not None:
                break
        else:
            raise AssertionError("a schedule that is not finished has a ready task when none runs")
        start_ns = perf_counter_ns()
        try:
            passage = execute(task)
        except Exception as error:
            schedule.fail(task, error)
            break
        events.append(TaskEvent(task, processor.name, 0, start_ns, perf_counter_ns(), passage))
        schedule.complete(task)
    return events


class Workers:
    """The threads of one run. Each thread claims tasks from the schedule for its processor.

    Args:
        schedule: the schedule to drive, which must not be used by other code until `run` has returned. One thread is
            started for each worker of its processors.
        execute: runs one task, in a worker's thread.
        cancel: flag that is checked before every claim.
        gives_way: called before every claim, under the lock; it may withdraw chunks.
        cpus: CPUs that the threads run on; by default the CPUs of the thread that starts them.
        on_chunk_end: for an open schedule, called under the lock when `Schedule.ended` contains a new chunk or the
            schedule has stopped.
    """

    def __init__(
        self,
        schedule: Schedule,
        execute: Execute,
        *,
        cancel: Cancel | Event | None = None,
        gives_way: GivesWay = never,
        cpus: Collection[int] | None = None,
        on_chunk_end: Callable[[], None] | None = None,
    ) -> None:
        self._schedule = schedule
        self._execute = execute
        self._cancel = cancel
        self._gives_way = gives_way
        self._cpus = cpus
        self._on_chunk_end = on_chunk_end
        self.events: list[TaskEvent] = []
        """Events of completed tasks, in the order in which they ended; guarded by the lock."""
        self.error: BaseException | None = None
        """Error of a policy, or another error that stopped a thread."""
        self._lock = Lock()
        self._num_working = 0
        """Number of threads that have not ended. `Thread.is_alive` is not reliable: in Python 3.11 it is False for a
        running thread after an interrupt during a `join` on it.
        """
        self._no_thread_works = Lock()
        self._finished = Gate()
        self._has_told = False
        self._idle = [(processor, Condition(self._lock)) for processor in schedule.processors]
        self._threads = [
            Thread(
                target=self._work,
                args=(processor, idle, worker),
                name=f"chunkrt-{processor.name}-{worker}",
                daemon=True,  # a thread that is stuck in a driver must not keep the process alive
            )
            for processor, idle in self._idle
            for worker in range(processor.workers)
        ]

    def run(self) -> list[TaskEvent]:
        """Drive the schedule to its end.

        If a task fails, the schedule's `failure` contains the error. A cancellation sets the schedule's `is_cancelled`.

        Returns:
            The events of completed tasks, in the order in which they ended.

        Raises:
            BaseException: an error of this thread, such as KeyboardInterrupt, or of the policy. The threads have ended,
            unless
                a second interrupt occurred while this thread waited for them; `close` then waits again.
        """
        try:
            self.start()
            self._finished.wait()
        finally:
            self.close()
        if self.error is not None:
            raise self.error
        return self.events

    def start(self) -> None:
        """Start the threads and return immediately."""
        with running_on(self._cpus):
            for thread in self._threads:
                thread.start()

    def change(self, change: Callable[[], Changed]) -> Changed:
        """Change or read the schedule under the lock, and wake the workers that have tasks."""
        with self._lock:
            changed = change()
            self._announce()
            return changed

    @property
    def are_running(self) -> bool:
        """True if some threads have not ended."""
        return self._num_working > 0

    def close(self) -> None:
        """Stop the schedule if it is still running, and wait until every thread has ended."""
        self._stop()  # a thread that starts after this claims no task
        with self._no_thread_works:
            pass
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _work(self, processor: Processor, idle: Condition, worker: int) -> None:
        with self._lock:
            if not self._num_working:
                self._no_thread_works.acquire()
            self._num_working += 1
        try:
            self._run_tasks(processor, idle, worker)
        except BaseException as error:
            self.error = error
            self._stop()
            if self._on_chunk_end is not None:
                self._on_chunk_end()
        finally:
            with self._lock:
                self._num_working -= 1
                if not self._num_working:
                    self._no_thread_works.release()

    def _run_tasks(self, processor: Processor, idle: Condition, worker: int) -> None:
        task = self._claim(processor, idle)
        while task is not None:
            start_ns = perf_counter_ns()
            try:
                passage = self._execute(task)
            except BaseException as error:
                with self._lock:
                    self._schedule.fail(task, error)
                    self._announce()
                task = self._claim(processor, idle)
            else:
                event = TaskEvent(task, processor.name, worker, start_ns, perf_counter_ns(), passage)
                task = self._claim(processor, idle, event)

    def _claim(self, processor: Processor, idle: Condition, ended: TaskEvent | None = None) -> Task | None:
        """Report the completed task and claim the next one in a single step. Return None when no further task will
        follow.
        """
        schedule = self._schedule
        with self._lock:
            if ended is not None:
                self.events.append(ended)
                schedule.complete(ended.task)
            while True:
                if self._cancel is not None and self._cancel.is_set() and not schedule.is_finished:
                    schedule.cancel()
                self._gives_way(schedule)
                task = schedule.claim(processor)
                if ended is not None or schedule.is_finished:
                    self._announce()
                    ended = None
                if task is not None or schedule.is_finished:
                    return task
                idle.wait()

    def _stop(self) -> None:
        with self._lock:
            if not self._schedule.is_finished:
                self._schedule.cancel()
            self._announce()

    def _announce(self) -> None:
        """Wake an idle worker for every ready task, and all threads at the end."""
        schedule = self._schedule
        if schedule.ended and self._on_chunk_end is not None:
            self._on_chunk_end()
        if schedule.is_finished:
            if not self._has_told:
                self._has_told = True
                self._finished.open()
            for _, idle in self._idle:
                idle.notify_all()
            return
        for processor, idle in self._idle:
            if num_ready := schedule.num_ready(processor):
                idle.notify(num_ready)
