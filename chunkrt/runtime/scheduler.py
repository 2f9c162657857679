"""The scheduler: computes a decoder's requests, in chunks that they share.

A request that is alone is computed in its caller's thread. When another request arrives, the first one stops after the
chunks that have begun. The scheduler's thread then batches all requests into the same chunks, until none is left.
Callers only put requests into the scheduler's inbox and wait, so an interrupted caller never leaves a lock held.

A request stays with the scheduler while tokens follow (`Request.then`), for example sampled tokens.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread, get_ident
from typing import Any

from chunkrt.errors import ClosedError, ConfigError
from chunkrt.gate import MOST_SECONDS_AT_END, Bell
from chunkrt.runtime.batcher import Batcher, may_enter, next_rows
from chunkrt.runtime.executor import Executor, ExecutorSet
from chunkrt.runtime.record import ChunkRecord, Pipeline, SegmentRecord
from chunkrt.runtime.request import Chunk, Request, Segment
from chunkrt.runtime.stream import Stream, compute_alone
from chunkrt.runtime.tasks import TaskEvent

OnAllRanks = Callable[[str, Sequence[Segment], Callable[[int], Any]], Any]
"""Function that computes the same work on all ranks. Its arguments are the name of the executor, the tokens of one
request or the segments of a chunk, and a function that does the work on this rank, whose argument is the number that
identifies the sums. It returns the result of the work after all ranks have completed it. If the work fails on this rank
or another one, it raises the error, and the other ranks stop too.
"""

CLOSED = "the engine is closed; load the model again"


_schedulers: weakref.WeakSet[Scheduler] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for scheduler in tuple(_schedulers):
        scheduler.end()


class Scheduler:
    """Scheduler that assigns a decoder's requests to executors and batches them into chunks.

    Args:
        executors: the executors, which only this scheduler uses.
        batcher: forms the chunks that requests share.
        on_all_ranks: computes the same work on other ranks, which this rank leads; None for a single rank.
        takes_turns: True if the other ranks execute the same requests without a leader. Requests are then computed one
            after another, in order of arrival, and never share chunks.
    """

    def __init__(
        self,
        executors: ExecutorSet,
        batcher: Batcher,
        *,
        on_all_ranks: OnAllRanks | None = None,
        takes_turns: bool = False,
    ) -> None:
        self._executors: ExecutorSet | None = executors
        self._batcher, self._on_all_ranks, self.takes_turns = batcher, on_all_ranks, takes_turns
        self._step, self._logit_group = executors.parting_step, executors.logit_group
        self._turn = Lock()
        """Lock held by the thread that uses the executors: the caller of a single request, or the scheduler's
        thread."""
        self._asking: dict[int, Request] = {}
        """Requests that callers wait for, by thread. If an interrupt leaves an entry behind, it is harmless: requests
        that could be computed alone then use the scheduler's thread.
        """
        self._sharing: dict[object, bool] = {}
        """Blocks in progress whose requests share chunks; see `sharing`."""
        self._inbox: SimpleQueue[Request] = SimpleQueue()
        """New requests, and requests whose caller no longer waits."""
        self._bell = Bell()
        """Wakes the thread that uses the executors: a request has arrived, or a chunk has ended."""
        self._committing = Lock()
        """Lock of the thread that changes the state of a submitted request: it is dropped, or advances, or goes on."""
        self._requests: list[Request] = []
        """Requests that share chunks and have not ended, in order of arrival."""
        self._starting = Lock()
        self._thread: Thread | None = None
        self._driver: int | None = None
        """Identifier of the scheduler's thread, if there is one."""
        self.is_closed = False
        self._process_id = os.getpid()
        _schedulers.add(self)
        self._in_stream: dict[int, list[Request]] = {}
        """Requests whose rows a chunk in the stream contains, by number of the chunk."""
        self._last_executor: Executor | None = None
        """Executor of the last chunk that the scheduler's thread computed itself."""
        self.num_chunks = 0
        """Number of chunks computed for requests that share chunks, whether or not several requests had rows in
        them."""
        self.num_rows = 0
        """Number of tokens in the chunks that `num_chunks` counts."""

    @property
    def executors(self) -> ExecutorSet:
        """The executors. Access after `close` raises ClosedError."""
        if self._executors is None:
            raise ClosedError(CLOSED)
        return self._executors

    @property
    def num_waiting(self) -> int:
        """Number of requests that share chunks, or wait for a shared chunk."""
        return sum(not request.is_released for request in self._requests) + self._inbox.qsize()

    @property
    def is_driver(self) -> bool:
        """True in the scheduler's thread, where the garbage collector may end generators. They must not wait there."""
        return get_ident() == self._driver

    @property
    def is_shared(self) -> bool:
        """True if another thread uses the executors, or other requests wait."""
        if self.takes_turns:
            return False
        return self._turn.locked() or bool(self._sharing) or bool(self._requests) or not self._inbox.empty()

    def run(self, request: Request) -> Request:
        """Compute a request, alone or batched with other requests, until it ends, and return it.

        Raises:
            ConfigError: the tokens, the state or an option do not fit; nothing was computed.
            BackendError: a task failed; the message names its subgraph and chunk, the cause is chained.
            ClosedError: the request was cancelled, or the engine was closed.
        """
        self._begin(request)
        thread = get_ident()
        try:
            self._asking[thread] = request
            request.state.begin(request.token_ids.size)
            if self.takes_turns or not (self._turn.locked() or self._others_ask()):
                with self._turn:
                    self._run_alone(request)
            if not request.is_ended:
                self._share(request)
        except BaseException as error:
            if not request.is_ended:
                request.fail(error)
            request.error = None  # its traceback refers to this frame
            raise
        finally:
            self._asking.pop(thread, None)
            if self.is_closed:
                self._release()
            if request.wait_for_writers is None:
                del request.state  # an error may refer to the request; the memory of the state can be freed
        if request.error is not None:
            request.raise_error()
        return request

    def submit(self, request: Request, on_end: Callable[[], object] = bool) -> None:
        """Begin a request without waiting for it.

        Args:
            request: a request. At its end `Request.wait` returns, and `Request.raise_error` raises its error.
            on_end: called in the scheduler's thread when the request has ended; it must not raise.

        Raises:
            ConfigError, ClosedError: see `run`.
        """
        self._check_open()
        self._begin(request)
        request.state.begin(request.token_ids.size)
        try:
            request.queue(on_end)
            self._send(request)
        except BaseException:
            if request.is_queued:  # users of the state wait for it, and it may have been sent
                self.drop(request)
            raise

    def drop(self, request: Request) -> None:
        """End a submitted request, or one whose caller was interrupted. The state is restored as soon as the chunks
        with the request's tokens are done; until then every use of the state waits.
        """
        if request.is_released:
            return
        request.is_unwanted = True
        with self._committing:
            request.is_dropped = True
            if not request.is_ended:
                request.state.roll_back(wait=request.waiter)
        self._send(request)

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Batch all requests of the block, because it has several at a time, or soon will."""
        key = object()
        self._sharing[key] = True
        try:
            yield
        finally:
            del self._sharing[key]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the executors while the block runs, so that requests wait."""
        with self._turn:
            yield

    def close(self) -> None:
        """End all requests with ClosedError once their chunks in progress are done, and release the executors.

        If ranks work without a leader, a request in progress is completed, because the other ranks continue it. If this
        thread computes requests, because a signal handler or a sampler closes the engine, it releases them afterwards.
        """
        self.is_closed = True
        self._bell.ring()
        if get_ident() not in self._asking and not self.is_driver:  # otherwise this thread releases them later
            self._release()

    def _release(self) -> None:
        with self._turn:
            self._executors = self._last_executor = None

    def end(self) -> None:
        """End all requests before the process exits: a thread that returned from a kernel after the interpreter has
        shut down would crash the process. Do not wait for a thread that is stuck in a driver.
        """
        if os.getpid() != self._process_id:
            return
        self.is_closed = True
        self._bell.ring()
        if self._turn.acquire(timeout=MOST_SECONDS_AT_END):
            self._turn.release()

    def _begin(self, request: Request) -> None:
        """Check that any executor can compute a request, and prepare its results."""
        if get_ident() == self._driver:
            raise ConfigError("a sampler or a constraint cannot use the engine; compute its input earlier")
        executors = self._executors or self.executors
        executor = executors.tokens if request.is_decode else executors.prompts
        if not request.is_checked:
            request.check(executor.plan, executor.chunk_length)
        request.step = self._step
        request.begin(executor.plan, self._logit_group)

    def _run_alone(self, request: Request) -> None:
        """Compute a request until it ends or another request arrives. Each executor continues up to its reach, and then
        the next one takes over.
        """
        while True:
            executors = self._executors or self.executors
            executor = executors.for_one(request)
            if request.is_decode and self._on_all_ranks is None:
                self._run_token(executor, request)
            elif self._on_all_ranks is None:
                compute_alone(executor, request, must_stop=self._others_ask, bell=self._bell)
            else:
                self._run_on_all_ranks(executor, request)
            if request.num_taken == request.token_ids.size:
                request.commit()
                if (following := request.following()) is None:
                    return
                request.go_on(following)
            if self._others_ask():
                return

    def _run_token(self, executor: Executor, request: Request) -> None:
        if executor.last_stream is not None:
            executor.wait_for_threads()
        if request.is_over:
            raise request.cancelled(0)
        chunk = Chunk((request.take(1),), executor.plan.flow)
        request.note(executor.pipeline_in_caller, chunk.segments[0], executor.compute(chunk))

    def _run_on_all_ranks(self, executor: Executor, request: Request) -> None:
        """Compute the next tokens of a request on all ranks, as many as the executor's slots hold, because a rank
        cannot withdraw chunks that others may have begun.
        """
        assert self._on_all_ranks is not None
        most = len(executor.slots) * executor.chunk_length
        self._on_all_ranks(
            self.executors.name_of(executor),
            [request.rest(most)],
            lambda number: compute_alone(executor, request, number=number, most=most, bell=self._bell),
        )

    def _others_ask(self) -> bool:
        if self.takes_turns:
            return False
        return self.is_closed or len(self._asking) > 1 or bool(self._sharing) or not self._inbox.empty()

    def _share(self, request: Request) -> None:
        """Wait while the scheduler's thread computes a request. After an interrupt, wait for the chunks that contain
        its tokens; after a second interrupt the next use of the state waits.
        """
        self._check_open()
        request.queue()
        try:
            self._send(request)
            request.wait()
        except BaseException:
            request.wait_for_writers = request.waiter
            self.drop(request)  # the interrupt may have occurred before the request was sent
            request.wait()
            request.wait_for_writers = None
            raise

    def _send(self, request: Request) -> None:
        """Put a request into the inbox, and start the thread that computes it.

        While the interpreter shuts down, no thread can start: `Thread.start` would wait forever (Python 3.11) or raise.
        If a generator is garbage-collected at this time, its requests end here, after `_end_all` has stopped all
        computation.
        """
        if sys.is_finalizing():
            self._end(request, ClosedError(CLOSED))
            return
        self._inbox.put(request)
        self._bell.ring()
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                self._thread = Thread(target=self._serve, name="chunkrt-scheduler", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError as error:  # too many threads, or the end of the process (Python 3.12 and later)
                    self._thread = None
                    self._end(request, ClosedError(CLOSED) if self.is_closed else error)
                    if not self.is_closed:
                        raise

    def _check_open(self) -> None:
        if self.is_closed:
            raise ClosedError(CLOSED)

    def _serve(self) -> None:
        """Compute shared requests in the scheduler's thread until none is left. The thread then ends."""
        self._driver = get_ident()
        while True:
            with self._turn:
                try:
                    self._compute_shared()
                except BaseException as error:  # an error of a batcher, a policy or a backend
                    self._in_stream.clear()
                    for request in self._requests:
                        self._end(request, error)
                    self._requests = []
            if self.is_closed:
                self._release()
            with self._starting:
                if self._inbox.empty():
                    self._thread = self._driver = None
                    return

    def _compute_shared(self) -> None:
        stream = None
        try:
            while self._has_requests():
                if stream is None and self.executors.for_stream(self._waiting):
                    stream = Stream(self.executors.many, self._bell.ring)
                    stream.start()
                if stream is not None:
                    self._admit_to(stream)
                if not self._compute_apart() and stream is not None and stream.num_in_flight:
                    self._bell.wait()
                if stream is not None:
                    for number, chunk, events, error in stream.take_ended():
                        requests = self._in_stream.pop(number)
                        if error is None:
                            stream.executor.learn([chunk], [events])
                        self._note(chunk, requests, events, error, stream.executor.pipeline)
        finally:
            if stream is not None:
                stream.close()

    @property
    def _waiting(self) -> list[Request]:
        """Requests with tokens that wait for a chunk."""
        return [request for request in self._requests if request.num_left and request.error is None]

    def _has_requests(self) -> bool:
        """Receive all requests from the inbox, and end those that need no more rows. Return True if one is left."""
        while not self._inbox.empty():
            request = self._inbox.get()
            if not request.is_released and request not in self._requests:
                self._requests.append(request)
        for request in self._requests:
            if self.is_closed:
                request.stop(ClosedError("the engine was closed; load the model again"))
            elif request.num_left and request.is_over:
                request.stop(request.cancelled(request.num_taken))
        self._end_done()
        return bool(self._requests)

    def _end_done(self) -> None:
        """Complete or end the requests that have no chunk in flight and no waiting tokens."""
        left = []
        for request in self._requests:
            if request.num_in_flight or (request.num_left and request.error is None) or self._goes_on(request):
                left.append(request)
        self._requests = left

    def _goes_on(self, request: Request) -> bool:
        """Advance a request whose tokens have been computed. Return False if it has ended."""
        error = request.error
        try:
            if error is None and self._changes(request, request.commit):
                following = request.following()
                if following is None:
                    request.release()
                    return False
                if self._changes(request, partial(request.go_on, following)):
                    return True
            error = error or ClosedError("the request was dropped")
        except BaseException as failure:  # for example, an error of a sampler, or MemoryError
            error = failure
        self._end(request, error)
        del error  # its traceback refers to this frame
        return False

    def _changes(self, request: Request, change: Callable[[], None]) -> bool:
        """Change the state of a request, unless it was dropped. Return True if it was changed."""
        with self._committing:
            if request.is_dropped:
                return False
            change()
            return True

    def _end(self, request: Request, error: BaseException) -> None:
        if not request.is_ended:
            request.fail(error)
        request.release()

    def _compute_apart(self) -> bool:
        """Compute a chunk in this thread if one can be formed. This thread keeps no reference to a request while it
        waits.
        """
        apart = self.executors.for_thread(self._waiting, self._last_executor)
        if apart is not None:
            self._compute_chunk(*apart)
        return apart is not None

    def _form(self, requests: Sequence[Request], executor: Executor) -> tuple[Chunk, list[Request]]:
        """Form the next chunk with the batcher, and return it with the requests whose rows it contains."""
        rows = next_rows(self._batcher, requests, executor.chunk_length)
        segments = [request.take(num_tokens) for request, num_tokens in rows]
        for request, _ in rows:
            request.num_in_flight += 1
        return Chunk(segments, executor.plan.flow), [request for request, _ in rows]

    def _admit_to(self, stream: Stream) -> None:
        """Fill the stream's slots."""
        while stream.has_room and (waiting := self.executors.for_stream(self._waiting)):
            if not may_enter(stream.num_in_flight, self._requests):
                return
            chunk, taken = self._form(waiting, stream.executor)
            number = stream.admit(chunk, [request.last_chunk for request in taken])
            for request in taken:
                request.last_chunk = number
            self._in_stream[number] = taken

    def _compute_chunk(self, requests: Sequence[Request], executor: Executor) -> None:
        """Form a chunk and compute it in this thread."""
        chunk, taken = self._form(requests, executor)
        self._last_executor = executor
        events, failure = list[TaskEvent](), None

        def compute(number: int) -> list[TaskEvent]:
            chunk.number = number
            executor.wait_for_threads()
            return executor.compute(chunk)

        try:
            if self._on_all_ranks is None:
                events = compute(0)
            else:
                events = self._on_all_ranks(self.executors.name_of(executor), chunk.segments, compute)
            executor.learn([chunk], [events])
        except Exception as error:
            failure = error
        self._note(chunk, taken, events, failure, executor.pipeline_in_caller)
        del failure  # its traceback refers to this frame

    def _note(
        self,
        chunk: Chunk,
        requests: Sequence[Request],
        events: Sequence[TaskEvent],
        error: BaseException | None,
        pipeline: Pipeline,
    ) -> None:
        """Record the end of a chunk, after which its requests have advanced or failed."""
        record = ChunkRecord(self.num_chunks, tuple(_recorded(segment) for segment in chunk.segments))
        for request, segment in zip(requests, chunk.segments, strict=True):
            request.num_in_flight -= 1
            if error is not None:
                request.stop(error)
            else:
                request.note(pipeline, segment, events, record)
        self.num_chunks += 1
        self.num_rows += chunk.num_tokens


def _recorded(segment: Segment) -> SegmentRecord:
    return SegmentRecord(segment.request.state.serial, segment.position, segment.num_tokens)
