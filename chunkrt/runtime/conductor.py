"""The conductor: shares a decoder's executors among the runs that are asked for.

A lone run is computed in its caller's thread, in chunks of its own. Once another comes, the first gives way as soon as
the chunks that it has begun are through, and then all share chunks, in a thread of the conductor's, until nobody is
left. Callers only put tickets into the conductor's inbox and wait: whoever is interrupted there leaves nothing locked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import lcm
from queue import Empty, SimpleQueue
from threading import Lock, Thread, get_ident
from time import perf_counter_ns
from typing import NamedTuple

from chunkrt.errors import ChunkrtError, ClosedError
from chunkrt.graph.linear_attention import LINEAR_ATTENTION_OP, find_variant
from chunkrt.graph.plan import Plan
from chunkrt.runtime.batcher import Batcher, next_chunk
from chunkrt.runtime.executor import Executor
from chunkrt.runtime.job import Job, Segment
from chunkrt.runtime.record import ChunkRecord, SegmentRecord
from chunkrt.runtime.run import Run, RunResult
from chunkrt.runtime.stream import Chunk
from chunkrt.runtime.ticket import Ticket

DELTA_RULE_ROWS = 32
"""Rows that the native gated delta rule takes at once."""

LINGER = 0.25
"""The share of the last chunk's time for which the next waits for those that had a row in it and may come back: with
them it costs little more than without."""


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """The executors that a conductor shares.

    prompts: takes lone runs of several tokens. tokens: lone runs of one. many: chunks that hold rows of prompts. few:
    chunks of decoding sequences alone.
    """

    prompts: Executor
    tokens: Executor
    many: Executor
    few: Executor


class Conductor:
    """Who computes a decoder's runs, and together with which others.

    Args:
        lanes: the executors. They are nobody else's.
        batcher: forms the chunks that runs share.
    """

    def __init__(self, lanes: Lanes, batcher: Batcher) -> None:
        self.lanes = lanes
        self._batcher = batcher
        self._chunk_length = lanes.many.chunk_length
        self._step = parting_step(lanes.prompts.plan, self._chunk_length)
        self._logit_group = lcm(*(lane.logit_group for lane in (lanes.prompts, lanes.tokens, lanes.many, lanes.few)))
        self._turn = Lock()
        """Whose it is uses the executors: a lone run's caller, or the conductor's thread."""
        self._asking: dict[int, Job] = {}
        """The runs that callers wait for, by their threads. One that an interrupt left here does no harm: runs that
        could have been alone share chunks with nobody."""
        self._inbox: SimpleQueue[Ticket | None] = SimpleQueue()
        """New tickets; None stands for a look at those that there are."""
        self._tickets: list[Ticket] = []
        """Those that have not ended, in the order in which they came; the thread's."""
        self._starting = Lock()
        self._thread: Thread | None = None
        self._is_closed = False
        self._last = _Last(0, 0, frozenset())
        self.num_chunks = 0
        """Chunks that have been computed for runs which could share them."""
        self.num_rows = 0
        """Tokens in them."""

    @property
    def num_waiting(self) -> int:
        """Runs that share chunks, or wait to."""
        return len(self._tickets) + self._inbox.qsize()

    def run(self, run: Run) -> RunResult:
        """Compute a run, alone or with others, and advance its state; see `Executor.run`."""
        job = self.job(run)
        thread = get_ident()
        self._asking[thread] = job
        try:
            return job.carry_out(self._compute)
        finally:
            self._asking.pop(thread, None)

    def run_alone(self, run: Run) -> RunResult:
        """Compute a run when nobody else's is under way, and share no chunk."""
        job = self.job(run)

        def compute(job: Job) -> None:
            with self._turn:
                self._check_open()
                self._lane_of(run).compute(job)

        return job.carry_out(compute)

    def begin(self, run: Run, on_end: Callable[[], object]) -> Ticket:
        """Have a run computed beside others, and do not wait for it.

        Args:
            run: its state is begun here, and advanced or rolled back by the ticket's `result` or by `abandon`.
            on_end: see `Ticket`.
        """
        self._check_open()
        job = self.job(run)
        run.state.begin(run.token_ids.size)
        ticket = Ticket(job, self._step, on_end)
        self._send(ticket)
        return ticket

    def abandon(self, ticket: Ticket) -> None:
        """End a run that was begun. Its state is what it was as soon as the chunk that holds some of it is through."""
        self._cancel(ticket)
        ticket.job.wait_for_writers = ticket.wait
        ticket.job.give_up()

    def job(self, run: Run) -> Job:
        """A run as one that any lane may compute. Raises ConfigError if something of it does not fit."""
        lane = self._lane_of(run)
        run.check(lane.plan, lane.chunk_length)
        return Job(run, lane.plan, self._logit_group)

    def close(self) -> None:
        """End all that is shared, with ClosedError, and wait until nothing runs. A lone run is waited for."""
        self._is_closed = True
        self._send(None)
        with self._turn:
            pass

    def _lane_of(self, run: Run) -> Executor:
        return self.lanes.tokens if run.token_ids.size == 1 else self.lanes.prompts

    def _compute(self, job: Job) -> None:
        """Alone as long as nobody else is there; then with the others."""
        if not self._turn.locked() and self._inbox.empty() and not self._others_ask():
            with self._turn:
                self._check_open()
                start_ns = perf_counter_ns()
                self._lane_of(job.run).compute(job, gives_way=self._others_ask)
                end_ns = perf_counter_ns()
                self._last = _Last(end_ns, end_ns - start_ns, frozenset([job.run.state.serial]))
        if job.num_left:
            self._share(job)

    def _others_ask(self) -> bool:
        return len(self._asking) > 1 or not self._inbox.empty()

    def _share(self, job: Job) -> None:
        """Wait while the conductor's thread computes a job. An interrupt waits for the chunk that holds some of it."""
        ticket = Ticket(job, self._step, _nothing)
        try:
            self._check_open()
            self._send(ticket)
            ticket.wait()
        except BaseException:
            job.wait_for_writers = ticket.wait  # a second interrupt leaves it at that
            self._cancel(ticket)
            ticket.wait()
            job.wait_for_writers = None
            raise
        if ticket.error is not None:
            raise ticket.error

    def _cancel(self, ticket: Ticket) -> None:
        ticket.is_cancelled = True
        self._send(ticket)  # an interrupt may have come before it was sent

    def _send(self, message: Ticket | None) -> None:
        """Put something into the inbox, and see to it that the thread looks."""
        self._inbox.put(message)
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                self._thread = Thread(target=self._serve, name="chunkrt-conductor", daemon=True)
                self._thread.start()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the engine is closed; load the model again")

    def _serve(self) -> None:
        """Compute what is shared until there is nothing more; in the conductor's thread, which ends with it."""
        while True:
            with self._turn:
                try:
                    while self._wait_for_tickets():
                        self._compute_chunk()
                except BaseException as error:  # whatever a batcher or a backend raises
                    for ticket in self._tickets:
                        ticket.end(_copied(error))
                    self._tickets.clear()
            with self._starting:
                if self._inbox.empty():
                    self._thread = None
                    return

    def _wait_for_tickets(self) -> bool:
        """Wait for those that may come back from the last chunk; whether anybody has rows to compute then."""
        self._take_in()
        last, absent = self._last, self._absent()
        if len(last.states) < 2 and not self._tickets:
            return False
        end_ns = last.end_ns + int(LINGER * last.took_ns)
        while absent and (left_ns := end_ns - perf_counter_ns()) > 0:
            try:
                message = self._inbox.get(timeout=left_ns / 1e9)
            except Empty:
                break
            self._take_in(message)
            absent = self._absent()
        return bool(self._tickets)

    def _absent(self) -> frozenset[int]:
        """The states, by their serials, that had their last row in the last chunk and have not come back."""
        return self._last.states.difference(ticket.job.run.state.serial for ticket in self._tickets)

    def _take_in(self, *messages: Ticket | None) -> None:
        """Take what lies in the inbox, and let go whoever wants no more rows."""
        while not self._inbox.empty():
            messages = (*messages, self._inbox.get())
        self._tickets += [ticket for ticket in dict.fromkeys(messages) if ticket and ticket not in self._tickets]
        for ticket in self._tickets:
            if self._is_closed:
                ticket.end(ClosedError("the engine was closed; load the model again"))
            elif ticket.is_over:
                ticket.end(ClosedError(f"the run was cancelled after {ticket.job.num_taken} tokens"))
        self._tickets = [ticket for ticket in self._tickets if not ticket.is_ended]

    def _compute_chunk(self) -> None:
        """Form the next chunk, compute it, and let go whose last row it held."""
        takes = next_chunk(self._batcher, [ticket.waiting for ticket in self._tickets], self._chunk_length)
        tickets = [self._tickets[take.place] for take in takes]
        is_few = all(ticket.waiting.is_decode for ticket in tickets)
        lane = self.lanes.few if is_few else self.lanes.many
        segments = [ticket.job.take(take.num_tokens) for ticket, take in zip(tickets, takes, strict=True)]
        chunk = Chunk(segments, lane.plan.flow)
        for ticket in self._tickets:
            ticket.num_passed = 0 if ticket in tickets else ticket.num_passed + 1
        start_ns = perf_counter_ns()
        try:
            events = lane.compute_chunk(chunk)
        except Exception as error:
            for ticket in tickets:
                ticket.end(_copied(error))
        else:
            record = ChunkRecord(self.num_chunks, tuple(_recorded(segment) for segment in segments))
            for ticket, segment in zip(tickets, segments, strict=True):
                ticket.note(lane.pipeline_in_caller, segment, events, record)
        end_ns = perf_counter_ns()
        self.num_chunks += 1
        self.num_rows += chunk.num_tokens
        done = [ticket for ticket in tickets if not ticket.job.num_left]
        self._last = _Last(end_ns, end_ns - start_ns, frozenset(ticket.job.run.state.serial for ticket in done))
        for ticket in done:
            ticket.end()
        self._tickets = [ticket for ticket in self._tickets if not ticket.is_ended]


class _Last(NamedTuple):
    """The last chunk: when it ended, how long it took, and the states, by their serials, whose last row it held."""

    end_ns: int
    took_ns: int
    states: frozenset[int]


def parting_step(plan: Plan, chunk_length: int) -> int:
    """A prompt that shares chunks is parted after multiples of so many tokens: the bits are those of running alone.

    All but one kind of layer compute every row by itself. The native gated delta rule takes up to 32 rows at once, from
    a chunk's beginning on; of other recurrent kinds nothing is known.
    """
    kinds = {n.attributes["attn_type"] for s in plan.subgraphs for n in s.nodes if n.op == LINEAR_ATTENTION_OP}
    recurrent = {kind for kind in kinds if find_variant(str(kind)).is_recurrent}
    if not recurrent:
        return 1
    return DELTA_RULE_ROWS if recurrent == {"gated_delta_rule"} and not chunk_length % DELTA_RULE_ROWS else chunk_length


def _recorded(segment: Segment) -> SegmentRecord:
    return SegmentRecord(segment.job.run.state.serial, segment.position, segment.num_tokens)


def _copied(error: BaseException) -> BaseException:
    """The same error for another thread, which adds its own traceback."""
    if not isinstance(error, ChunkrtError):
        return error
    other = type(error)(*error.args)
    other.__cause__ = error.__cause__
    return other


def _nothing() -> None:
    """Whoever waits does so for the ticket."""
