"""The conductor: shares a decoder's executors among concurrent runs.

A single run is computed in its caller's thread, without sharing chunks. When another run arrives, the first run gives
way as soon as the chunks that have begun are done. The conductor's thread then batches all runs into the same chunks,
until no run is left. Callers only put tickets into the conductor's inbox and wait, so an interrupted caller never
leaves a lock held.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock, Thread, get_ident
from time import perf_counter_ns

from chunkrt.errors import ClosedError
from chunkrt.runtime.batcher import Batcher, next_chunk
from chunkrt.runtime.executor import Executor
from chunkrt.runtime.followers import Followers, Result
from chunkrt.runtime.job import Job, Segment
from chunkrt.runtime.lanes import Lanes
from chunkrt.runtime.open_stream import OpenStream
from chunkrt.runtime.record import ChunkRecord, Pipeline, SegmentRecord
from chunkrt.runtime.run import Run, RunResult
from chunkrt.runtime.schedule import Schedule
from chunkrt.runtime.sharing import for_stream, for_thread
from chunkrt.runtime.stream import Chunk
from chunkrt.runtime.tasks import TaskEvent
from chunkrt.runtime.ticket import Ticket
from chunkrt.runtime.ticket_queue import TicketQueue

MOST_SECONDS_AT_END = 10.0

CLOSED = "the engine is closed; load the model again"


_conductors: weakref.WeakSet[Conductor] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for conductor in tuple(_conductors):
        conductor.end()


class Conductor:
    """Scheduler that assigns a decoder's runs to executors and batches them into chunks.

    Args:
        lanes: the executors, which only this conductor uses.
        batcher: forms the chunks that runs share.
        followers: the other ranks, which compute the same work as this rank.
        takes_turns: True if the other ranks execute the same runs without a leader. Runs are then computed one after
            another, in order of arrival, and never share chunks.
    """

    def __init__(
        self, lanes: Lanes, batcher: Batcher, *, followers: Followers | None = None, takes_turns: bool = False
    ) -> None:
        self._lanes: Lanes | None = lanes
        self._batcher = batcher
        self._followers = followers
        self.takes_turns = takes_turns
        self._step = lanes.parting_step
        self._logit_group = lanes.logit_group
        self._turn = Lock()
        """Lock held by the thread that uses the executors: the caller of a single run, or the conductor's thread."""
        self._asking: dict[int, Job] = {}
        """Runs that callers wait for, by thread. If an interrupt leaves an entry behind, it is harmless: runs that
        could be computed alone then use the conductor's thread.
        """
        self._queue = TicketQueue()
        self._starting = Lock()
        self._thread: Thread | None = None
        self._is_closed = False
        self._process_id = os.getpid()
        _conductors.add(self)
        self._in_stream: dict[int, tuple[list[Ticket], int]] = {}
        """Maps the number of a chunk in the stream to the tickets whose rows it contains, and its start time in
        nanoseconds.
        """
        self._last_lane: Executor | None = None
        """Executor of the last chunk that the conductor's thread computed itself."""
        self.num_chunks = 0
        """Number of chunks computed for runs that share chunks, whether or not several runs had rows in them."""
        self.num_rows = 0
        """Number of tokens in the chunks that `num_chunks` counts."""

    @property
    def lanes(self) -> Lanes:
        """The executors. Raises ClosedError after `close`."""
        if self._lanes is None:
            raise ClosedError(CLOSED)
        return self._lanes

    @property
    def num_waiting(self) -> int:
        """Number of runs that share chunks, or wait for a shared chunk."""
        return self._queue.num_tickets

    def run(self, run: Run) -> RunResult:
        """Compute a run, alone or batched with other runs, and advance its state; see `Executor.run`."""
        job = self.job(run)
        thread = get_ident()
        self._asking[thread] = job
        try:
            return job.carry_out(self._compute)
        finally:
            self._asking.pop(thread, None)

    def ticket(self, run: Run, on_end: Callable[[], object]) -> Ticket:
        """Return a ticket for a run that is batched with other runs. `begin` starts the run; `Ticket.result` or
        `abandon` ends it.

        Raises ConfigError or ClosedError if the run cannot be computed.
        """
        self._check_open()
        return Ticket(self.job(run), self._step, on_end)

    def begin(self, ticket: Ticket) -> None:
        """Start computing a run without waiting for it."""
        run = ticket.job.run
        run.state.begin(run.token_ids.size)
        if not self.takes_turns:
            self._send(ticket)
            return
        try:
            self._compute(ticket.job)
        except BaseException as error:
            ticket.stop(error)
        ticket.end()

    def abandon(self, ticket: Ticket) -> None:
        """End a run. Its state is restored as soon as the chunks with its tokens are done."""
        ticket.is_cancelled = True
        ticket.job.wait_for_writers = ticket.waiter
        ticket.job.give_up()  # from here on every use of the state waits, even after an interrupt
        self._send(ticket)

    def job(self, run: Run) -> Job:
        """Return a run as a job that any lane can compute. Raise ConfigError if the run does not fit the decoder."""
        lane = self.lanes.prompts if run.token_ids.size > 1 else self.lanes.tokens
        run.check(lane.plan, lane.chunk_length)
        if self._followers is not None:
            self._followers.check(run)
        return Job(run, lane.plan, self._logit_group)

    def close(self) -> None:
        """End all runs with ClosedError once their chunks in progress are done, and release the executors.

        If ranks work without a leader, a run in progress is completed, because the other ranks continue it.
        """
        self._is_closed = True
        self._queue.close()
        with self._turn:
            self._lanes = self._last_lane = None

    def end(self) -> None:
        """End all runs before the process exits: a thread that returned from a kernel after the interpreter has shut
        down would crash the process. Do not wait for a thread that is stuck in a driver.
        """
        if os.getpid() != self._process_id:
            return
        self._is_closed = True
        self._queue.close()
        if self._turn.acquire(timeout=MOST_SECONDS_AT_END):
            self._turn.release()

    def _compute(self, job: Job) -> None:
        """Compute a job alone while it is the only run, and then batched with the other runs."""
        if self.takes_turns or not (self._turn.locked() or self._others_ask()):
            with self._turn:
                self._check_open()
                start_ns = perf_counter_ns()
                self._compute_alone(job)
                self._queue.note_end(perf_counter_ns() - start_ns, [job])
        if job.num_left:
            self._share(job)

    def _compute_alone(self, job: Job) -> None:
        """Compute a job until another run arrives. Each executor continues up to its reach, and then the next one takes
        over.
        """
        while True:
            lane = self.lanes.of_lone(job)

            def compute(number: int, lane: Executor = lane) -> None:
                lane.compute(job, partial(self._give_way, number), number=number)

            self._on_all_ranks(lane, [job.rest], compute)
            if not job.num_left or self._others_ask():
                return

    def _on_all_ranks(self, lane: Executor, segments: Sequence[Segment], work: Callable[[int], Result]) -> Result:
        """Do some work on this rank and on the other ranks."""
        if self._followers is None:
            return work(0)
        return self._followers.compute(self.lanes.name_of(lane), segments, work)

    def _give_way(self, number: int, schedule: Schedule) -> None:
        """Once another run arrives, withdraw the chunks of a single run that have not begun, on all ranks."""
        if not self.takes_turns and self._others_ask():
            before, left = schedule.num_chunks, schedule.withdraw()
            if left < before and self._followers is not None:
                self._followers.keep(number, left)

    def _others_ask(self) -> bool:
        return self._is_closed or len(self._asking) > 1 or not self._queue.is_quiet

    def _share(self, job: Job) -> None:
        """Wait while the conductor's thread computes a job. After an interrupt, wait for the chunks that contain its
        tokens.
        """
        ticket = Ticket(job, self._step, _nothing)
        try:
            self._check_open()
            self._send(ticket)
            ticket.wait()
        except BaseException:
            job.wait_for_writers = ticket.waiter  # after a second interrupt the state waits at its next use
            ticket.is_cancelled = True
            self._send(ticket)  # the interrupt may have occurred before the ticket was sent
            ticket.wait()
            job.wait_for_writers = None
            raise
        ticket.check()

    def _send(self, ticket: Ticket) -> None:
        """Put a ticket into the queue, and start the thread that serves it.

        While the interpreter shuts down, no thread can start: `Thread.start` would wait forever (Python 3.11) or raise.
        If a generator is garbage-collected at this time, its runs end here, after `_end_all` has stopped all
        computation.
        """
        if sys.is_finalizing():
            ticket.end(ClosedError(CLOSED))
            return
        self._queue.put(ticket)
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                self._thread = Thread(target=self._serve, name="chunkrt-conductor", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:
                    if not self._is_closed:
                        raise
                    ticket.end(ClosedError(CLOSED))  # Python 3.12 and later raise at the end of the process

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(CLOSED)

    def _serve(self) -> None:
        """Compute shared runs in the conductor's thread until none is left; the thread then ends."""
        while True:
            with self._turn:
                try:
                    self._compute_shared()
                except BaseException as error:  # an error of a batcher, a policy or a backend
                    self._in_stream.clear()
                    self._queue.end_all(error)
            with self._starting:
                if self._queue.is_quiet:
                    self._thread = None
                    return

    def _compute_shared(self) -> None:
        stream = None
        try:
            while self._queue.somebody_waits():
                if stream is None and for_stream(self.lanes, self._queue.waiting):
                    stream = OpenStream(self.lanes.many, self._queue.wake)
                if stream is not None:
                    self._settle(stream)  # the message that woke this thread is no longer in the inbox
                    self._admit_to(stream)
                if not self._compute_apart() and stream is not None and stream.num_in_flight:
                    self._queue.wait()
        finally:
            if stream is not None:
                stream.close()

    def _compute_apart(self) -> bool:
        """Compute a chunk in this thread if one can be formed. This thread keeps no reference to a ticket while it
        waits.
        """
        apart = for_thread(self.lanes, self._queue.waiting, self._last_lane)
        if apart is not None:
            self._compute_chunk(*apart)
        return apart is not None

    def _form(self, tickets: Sequence[Ticket], lane: Executor) -> tuple[Chunk, list[Ticket]]:
        """Form the next chunk with the batcher, and return it with the tickets whose rows it contains."""
        takes = next_chunk(self._batcher, [ticket.waiting for ticket in tickets], lane.chunk_length)
        taken = [tickets[take.place] for take in takes]
        for ticket in tickets:
            ticket.num_passed = 0 if ticket in taken else ticket.num_passed + 1
        segments = [ticket.job.take(take.num_tokens) for ticket, take in zip(taken, takes, strict=True)]
        for ticket in taken:
            ticket.num_in_flight += 1
        return Chunk(segments, lane.plan.flow), taken

    def _admit_to(self, stream: OpenStream) -> None:
        """Fill the stream's slots. While a sequence decodes in the stream, use only two slots, because its token waits
        for all earlier chunks.
        """
        while stream.has_room and (waiting := for_stream(self.lanes, self._queue.waiting)):
            if stream.num_in_flight >= 2 and any(ticket.waiting.is_decode for ticket in self._queue.tickets):
                return
            chunk, taken = self._form(waiting, self.lanes.many)
            number = stream.admit(chunk, [ticket.last_chunk for ticket in taken])
            for ticket in taken:
                ticket.last_chunk = number
            self._in_stream[number] = taken, perf_counter_ns()

    def _settle(self, stream: OpenStream) -> None:
        """Record the chunks that have ended in the stream."""
        for number, chunk, events, error in stream.take_ended():
            taken, start_ns = self._in_stream.pop(number)
            self._note(chunk, taken, events, error, self.lanes.many.pipeline, start_ns)

    def _compute_chunk(self, tickets: Sequence[Ticket], lane: Executor) -> None:
        """Form a chunk and compute it in this thread."""
        chunk, taken = self._form(tickets, lane)
        self._last_lane = lane
        start_ns, events, failure = perf_counter_ns(), list[TaskEvent](), None
        try:
            events = self._on_all_ranks(lane, chunk.segments, partial(lane.compute_chunk, chunk))
        except Exception as error:
            failure = error
        self._note(chunk, taken, events, failure, lane.pipeline_in_caller, start_ns)

    def _note(
        self,
        chunk: Chunk,
        tickets: Sequence[Ticket],
        events: Sequence[TaskEvent],
        error: BaseException | None,
        pipeline: Pipeline,
        start_ns: int,
    ) -> None:
        """Record the end of a chunk, after which its jobs have advanced or failed."""
        record = ChunkRecord(self.num_chunks, tuple(_recorded(segment) for segment in chunk.segments))
        for ticket, segment in zip(tickets, chunk.segments, strict=True):
            ticket.num_in_flight -= 1
            if error is not None:
                ticket.stop(error)
            else:
                ticket.note(pipeline, segment, events, record)
        self.num_chunks += 1
        self.num_rows += chunk.num_tokens
        self._queue.note_end(perf_counter_ns() - start_ns, [t.job for t in tickets if not t.job.num_left])
        self._queue.let_go()


def _recorded(segment: Segment) -> SegmentRecord:
    return SegmentRecord(segment.job.run.state.serial, segment.position, segment.num_tokens)


def _nothing() -> None:
    """Do nothing, because the caller waits on the ticket."""
