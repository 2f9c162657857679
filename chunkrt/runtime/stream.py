"""A stream: chunks in flight through an executor, whose tasks worker threads compute.

The threads wait on condition variables that share one lock. Under this lock a worker reports the task that has ended
and claims the next one in a single step. No ready task is missed: the worker that ends a task claims one task itself,
and wakes one idle worker for each remaining ready task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from threading import Condition, Lock, Thread
from time import perf_counter_ns

from chunkrt.gate import Bell
from chunkrt.runtime.affinity import running_on
from chunkrt.runtime.executor import Executor, ExecutorSet
from chunkrt.runtime.request import Chunk, Request
from chunkrt.runtime.tasks import Processor, Task, TaskEvent

EndedChunk = tuple[int, Chunk, list[TaskEvent], BaseException | None]
"""The number of a chunk that has ended, the chunk, its tasks in the order in which they ended, and its error if it
failed.
"""


class Stream:
    """Threads that take chunks through an executor, which is not used by other code at the same time.

    Args:
        executor: the executor, which provides subgraphs, slots and policy. One thread is started for each worker of its
            processors.
        on_end: called, in any thread, when a chunk has ended or the stream has stopped. It must not block.
        chunks: all chunks of one sequence, in order; by default chunks are admitted later.

    The threads start with `start`, so that an interrupt during the construction leaves none behind.
    """

    def __init__(self, executor: Executor, on_end: Callable[[], None], chunks: Sequence[Chunk] = ()) -> None:
        executor.wait_for_threads()
        self.executor = executor
        self._on_end = on_end
        self._schedule = executor.schedule(chunks)
        self._chunks = dict(enumerate(chunks))
        """Chunks that `take_ended` has not returned yet, by number."""
        self._events: dict[int, list[TaskEvent]] = {number: [] for number in self._chunks}
        """Events of these chunks, in the order in which the tasks ended; guarded by the lock."""
        self._error: BaseException | None = None
        """Error of a policy, or another error that stopped a thread."""
        self._lock = Lock()
        self._num_working = 0
        """Number of threads that have not ended. `Thread.is_alive` is not reliable: in Python 3.11 it is False for a
        running thread after an interrupt during a `join` on it.
        """
        self._no_thread_works = Lock()
        self._idle = [(processor, Condition(self._lock)) for processor in self._schedule.processors]
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

    def start(self) -> None:
        """Start the threads. After an error, `close` ends those that have started.

        Raises:
            RuntimeError: the system has no more threads.
        """
        cpus = self.executor.cpus
        self.executor.last_stream = self
        with nullcontext() if cpus is None else running_on(cpus):
            for thread in self._threads:
                thread.start()

    @property
    def num_in_flight(self) -> int:
        """Number of chunks that are in flight, or have ended but were not returned by `take_ended` yet."""
        return len(self._chunks)

    @property
    def has_room(self) -> bool:
        """True if a slot is free for another chunk."""
        return self.num_in_flight < len(self.executor.slots)

    def admit(self, chunk: Chunk, after: Iterable[int]) -> int:
        """Admit a chunk, and return its number. Requires `has_room`.

        `after` lists the numbers of the chunks with earlier tokens of the same sequences.
        """
        durations = self.executor.durations_of(chunk)
        with self._lock:
            number = self._schedule.admit(chunk.route, after, durations)
            self._chunks[number], self._events[number] = chunk, []
            self._announce()
        return number

    def recall(self) -> None:
        """Withdraw the last chunks of which no task has begun."""
        with self._lock:
            num_left = self._schedule.recall()
            for number in [number for number in self._chunks if number >= num_left]:
                del self._chunks[number], self._events[number]

    def take_ended(self) -> list[EndedChunk]:
        """Return the chunks that have ended since the last call. Raise the error of the policy, if it failed."""
        with self._lock:
            passed = self._schedule.ended.copy()
            self._schedule.ended.clear()
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback refers to the stream
        ended = list[EndedChunk]()
        for number, failure in passed:
            chunk, events = self._chunks.pop(number), self._events.pop(number)
            error = None if failure is None else self.executor.failure(failure[0].subgraph, chunk, failure[1])
            ended.append((number, chunk, events, error))
        return ended

    @property
    def are_threads_running(self) -> bool:
        """True if some threads have not ended."""
        return self._num_working > 0

    def close(self) -> None:
        """Stop the threads after their running tasks, and wait for them."""
        self._stop()  # a thread that starts after this claims no task
        with self._no_thread_works:
            pass
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self.executor.last_stream = None

    def _work(self, processor: Processor, idle: Condition, worker: int) -> None:
        with self._lock:
            if not self._num_working:
                self._no_thread_works.acquire()
            self._num_working += 1
        try:
            self._run_tasks(processor, idle, worker)
        except BaseException as error:
            self._error = error
            self._stop()
            self._on_end()
        finally:
            with self._lock:
                self._num_working -= 1
                if not self._num_working:
                    self._no_thread_works.release()

    def _run_tasks(self, processor: Processor, idle: Condition, worker: int) -> None:
        executor, schedule = self.executor, self._schedule
        task = self._claim(processor, idle)
        while task is not None:
            start_ns = perf_counter_ns()
            try:
                passage = executor.run_task(task.subgraph, self._chunks[task.chunk], schedule.slot(task.chunk))
            except BaseException as error:
                with self._lock:
                    schedule.fail(task, error)
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
                self._events[ended.task.chunk].append(ended)
                schedule.complete(ended.task)
            while True:
                task = None if schedule.is_finished else schedule.claim(processor)
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
        if schedule.ended:
            self._on_end()
        for processor, idle in self._idle:
            if schedule.is_finished:
                idle.notify_all()
            elif num_ready := schedule.num_ready(processor):
                idle.notify(num_ready)


def compute_alone(
    executor: Executor,
    request: Request,
    *,
    number: int = 0,
    most: int | None = None,
    must_stop: Callable[[], bool] = bool,
    bell: Bell | None = None,
) -> None:
    """Compute the next tokens of a request, without sharing chunks, up to the executor's reach. The caller manages the
    state.

    The tokens are computed in the calling thread, or, if their tasks can overlap, by the threads of a stream, while the
    calling thread waits, so that an interrupt reaches it. After an error all threads have ended. (After a second
    interrupt they may still run. Then `Request.wait_for_writers` waits for them, as does the next use of the executor.)

    Args:
        executor: an executor that no other thread uses.
        request: a request that has begun.
        number: number of this unit of work if other ranks compute it too; see `Key.number`.
        most: maximum number of tokens; by default all remaining ones.
        must_stop: returns True if no further chunk should begin, because another request waits. It is called whenever
            the bell rings.
        bell: wakes this thread; by default a new one.

    Raises:
        BackendError: a task failed.
        ClosedError: the request was cancelled.
    """
    executor.wait_for_threads()
    end = request.token_ids.size if most is None else min(request.token_ids.size, request.num_taken + most)

    def next_chunk() -> Chunk | None:
        left = end - request.num_taken
        if not left or not executor.reaches(request.position + request.num_taken):
            return None
        return Chunk((request.take(min(left, executor.chunk_length)),), executor.plan.flow, number)

    left = end - request.num_taken
    if executor.overlaps(left):
        _compute_in_stream(executor, request, next_chunk, must_stop, bell or Bell())
        return
    if left > executor.chunk_length and executor.policy.is_concurrent:
        with running_on(executor.cpus):
            _compute_in_order_of_policy(executor, request, next_chunk, must_stop)
        return
    while True:
        _check_goes_on(request)
        if (chunk := next_chunk()) is None:
            return
        request.note(executor.pipeline_in_caller, chunk.segments[0], executor.compute(chunk))
        if must_stop():
            return


def _compute_in_order_of_policy(
    executor: Executor, request: Request, next_chunk: Callable[[], Chunk | None], must_stop: Callable[[], bool]
) -> None:
    """Compute several chunks in the calling thread, one task at a time."""
    first, chunks = request.num_taken, list(iter(next_chunk, None))
    request.num_taken = first  # a chunk counts when it has been computed
    schedule, events = executor.schedule(chunks), [list[TaskEvent]() for _ in chunks]
    while True:
        for number, _ in schedule.ended:
            segment = chunks[number].segments[0]
            request.note(executor.pipeline_in_caller, segment, events[number])
            request.num_taken += segment.num_tokens
        schedule.ended.clear()
        if must_stop():
            schedule.recall()
        if schedule.is_finished:
            return
        _check_goes_on(request)
        claims = ((processor, schedule.claim(processor)) for processor in schedule.processors)
        processor, task = next((processor, task) for processor, task in claims if task is not None)
        chunk, start_ns = chunks[task.chunk], perf_counter_ns()
        try:
            passage = executor.run_task(task.subgraph, chunk, schedule.slot(task.chunk))
        except Exception as error:
            raise executor.failure(task.subgraph, chunk, error)  # noqa: B904 - it has its cause
        events[task.chunk].append(TaskEvent(task, processor.name, 0, start_ns, perf_counter_ns(), passage))
        schedule.complete(task)


def _compute_in_stream(
    executor: Executor,
    request: Request,
    next_chunk: Callable[[], Chunk | None],
    must_stop: Callable[[], bool],
    bell: Bell,
) -> None:
    _check_goes_on(request)
    first, chunks = request.num_taken, list(iter(next_chunk, None))
    request.num_taken = first  # a chunk counts when it has been computed
    computed, events = list[Chunk](), list[list[TaskEvent]]()
    stream = Stream(executor, bell.ring, chunks)
    try:
        stream.start()
        while stream.num_in_flight:
            bell.wait()
            for _, chunk, of_chunk, error in stream.take_ended():
                if error is not None:
                    request.stop(error)
                    break
                segment = chunk.segments[0]
                request.note(executor.pipeline, segment, of_chunk)
                request.num_taken += segment.num_tokens
                computed.append(chunk)
                events.append(of_chunk)
            if request.error is not None:
                break
            _check_goes_on(request)
            if must_stop():
                stream.recall()
    finally:
        try:
            stream.close()
        finally:
            request.wait_for_writers = stream.close if stream.are_threads_running else None
    request.raise_error()
    if computed:
        executor.learn(computed, events)


def _check_goes_on(request: Request) -> None:
    if request.num_left and request.is_over:
        raise request.cancelled(request.num_taken)


def take_part(executors: ExecutorSet, name: str, requests: Sequence[Request], number: int) -> None:
    """Compute the same work as another rank: tokens of a single request, or a chunk of several requests. No state
    advances.

    Args:
        executors: the executors.
        name: name of the executor.
        requests: the requests.
        number: see `Key.number`.

    Raises:
        BackendError: a task failed on this rank or on another one.
    """
    executor: Executor = getattr(executors, name)
    for request in requests:
        request.begin(executor.plan, 1)
    if len(requests) == 1:
        compute_alone(executor, requests[0], number=number)
    else:
        segments = [request.take(executor.chunk_length) for request in requests]
        executor.wait_for_threads()
        executor.compute(Chunk(segments, executor.plan.flow, number))
