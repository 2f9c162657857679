"""Requests, and the chunks that contain their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import attrgetter, itemgetter
from threading import Event, Lock
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from chunkrt.errors import ChunkrtError, ClosedError, ConfigError, unknown_name
from chunkrt.gate import Gate
from chunkrt.graph.flow import Flow, Route
from chunkrt.graph.plan import Plan
from chunkrt.runtime.buffers import aligned_zeros
from chunkrt.runtime.record import ChunkRecord, Pipeline, RunRecord
from chunkrt.runtime.state import State
from chunkrt.runtime.tasks import Task, TaskEvent

Logits = Literal["last", "all", "none", "hidden"]
"""Results to compute: the logits of the last token, of all tokens, or of none. With "hidden", no logits are computed,
but the hidden states of all tokens, which are the input of the LM head.
"""
OF_ALL: tuple[Logits, ...] = ("all", "hidden")
"""Values of Logits that require every token to be computed, so no token may come from the prefix cache."""

Tokens = NDArray[np.int64]


class Cancel:
    """Flag that stops a request, and may be set from any thread. It uses no lock that an interrupt could leave held."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """Stop the request, and every later request until `clear` is called."""
        self._is_set = True

    def clear(self) -> None:
        """Allow requests again."""
        self._is_set = False

    def is_set(self) -> bool:
        """Return True if the flag stops requests."""
        return self._is_set


class Request:
    """Tokens for a decoder, the state that they continue, and the results.

    A scheduler computes the tokens in chunks. Every chunk contains one segment of the tokens. When all tokens have been
    computed, the state advances in one step, and the request calls `then`, which may return the next tokens, for
    example a sampled token. The request ends when no tokens follow, or after an error, which leaves the state as it was
    before the tokens whose computation failed.

    Args:
        token_ids: int64 [n], n at least 1.
        state: a state of the same decoder; it advances by n.
        logits: the results to compute.
        cancel: flag that ends the request as soon as its chunks in flight have ended; it may be set from any thread.
        on_tokens: called in a computing thread after every chunk, with the number of tokens of that chunk; it must not
            raise.
        then: called with the request when all tokens have been computed. It returns the next tokens, of which the
            logits of the last one are computed, or None. It runs in the thread that drives the scheduler; its errors
            end the request.
        num_before: number of tokens that were written to the state but do not count in its position yet, if the request
            is a part of another rank's request.
        is_for_others: True if another rank requested the logits. This rank then computes only its part of the sums, and
            no logits.
    """

    def __init__(
        self,
        token_ids: Tokens,
        state: State,
        *,
        logits: Logits = "last",
        cancel: Cancel | Event | None = None,
        on_tokens: Callable[[int], object] | None = None,
        then: Callable[[Request], Tokens | None] | None = None,
        num_before: int = 0,
        is_for_others: bool = False,
    ) -> None:
        self.token_ids, self.state, self.wanted = token_ids, state, logits
        self.cancel, self.on_tokens = cancel, on_tokens
        self.is_for_others = is_for_others
        self.is_decode = token_ids.size == 1
        """True if the request waits for a single token."""
        self.is_checked = False
        """True if `check` has accepted the state, and the tokens are sampled."""
        self.logits: NDArray[np.float32] | None = None
        """Result: float32 [1, V] for the last token, [n, V] for all tokens, or None if no logits were requested."""
        self.hidden: NDArray[np.float32] | None = None
        """Result: float32 [n, H] if requested: the output of the last norm, which is the input of the LM head."""
        self.num_chunks = 0
        """Number of computed chunks that contain tokens of the request."""
        self.num_taken = 0
        """Number of tokens that chunks have taken so far."""
        self.num_in_flight = 0
        """Number of chunks in flight that contain tokens of the request."""
        self.num_passed = 0
        """Number of chunks formed since the last one with tokens of this request."""
        self.last_chunk = -1
        """Number of the last chunk in the scheduler's stream that contains tokens of the request."""
        self.step = 1
        """See `Waiting.step`."""
        self.is_dropped = False
        """True if the caller no longer waits for the results."""
        self.is_unwanted = False
        """True if the request should end with its chunks in flight, like a cancelled one."""
        self.is_ended = False
        self.is_released = False
        """True if the thread that computed the request no longer uses it."""
        self.error: BaseException | None = None
        """Error because of which some tokens were not computed."""
        self.wait_for_writers: Callable[[], None] | None = None
        """Function that waits until no thread writes into the state. It is set if the request ended while a thread
        could still write.
        """
        self._then, self._num_before = then, num_before
        self._gate: Gate | None = None
        self._on_end: Callable[[], object] = bool
        self._pipeline: Pipeline | None = None
        self._is_unshared = True
        self._records: list[RunRecord] = []
        self._noted: list[tuple[int, int, Sequence[TaskEvent], ChunkRecord | None]] = []
        """Chunks that `_records` lacks: first token, number of tokens, events, and the chunk if it was shared."""
        self._rows: NDArray[np.float32] | None = None
        """Buffer of the logits, float32 [N, V]; N is the number of requested rows, rounded up to complete groups."""

    def check(self, plan: Plan, chunk_length: int) -> None:
        """Raise ConfigError if tokens, state or an option do not fit a decoder with this chunk length."""
        token_ids, state = self.token_ids, self.state
        if self.wanted not in get_args(Logits):
            raise unknown_name("choice of logits", self.wanted, get_args(Logits))
        if self.wanted == "hidden" and plan.flow.hidden is None:
            raise ConfigError(
                "this decoder's plan does not name its hidden states, so they cannot be computed; recompile the model"
            )
        if token_ids.ndim != 1 or token_ids.dtype != np.int64:
            raise ConfigError(f"token ids are {token_ids.dtype} of shape {list(token_ids.shape)}, expected int64 [n]")
        if token_ids.size == 0:
            raise ConfigError("the prompt is empty; pass at least one token")
        low, high = token_ids.min(), token_ids.max()
        if low < 0 or high >= plan.vocab_size:
            wrong = low if low < 0 else high
            raise ConfigError(f"token id {wrong} is outside the vocabulary, 0..{plan.vocab_size - 1}")
        if state.plan is not plan and _memory(state.plan) != _memory(plan):
            raise ConfigError("the state belongs to another decoder; create it from this engine's plan")
        if plan.window and chunk_length > state.chunk_length:
            raise ConfigError(
                f"chunk length {chunk_length} exceeds the chunk length of the state, {state.chunk_length}; "
                "create a new state"
            )
        if chunk_length > state.capacity:
            raise ConfigError(f"chunk length {chunk_length} is outside 1..{state.capacity}, the state's capacity")
        if token_ids.size > state.capacity - state.position:
            raise ConfigError(
                f"{token_ids.size} tokens do not fit at position {state.position} of a state of "
                f"{state.capacity} positions; shorten the prompt, or increase the capacity"
            )

    def begin(self, plan: Plan, logit_group: int) -> None:
        """Prepare the results for the tokens.

        Args:
            plan: the decoder.
            logit_group: number of rows of logits that one call writes; see `BoundSubgraph.logit_group`.
        """
        size, state = self.token_ids.size, self.state
        self.is_decode = size == 1
        self.position = state.position + self._num_before
        """Position of the first token."""
        self.rope_offset = state.rope_offset
        self.num_taken = self.num_passed = self.num_in_flight = 0
        self.last_chunk, self.num_chunks, self._records = -1, 0, []
        self._noted, self._sequence, self._position_bytes = [], state.serial, state.position_bytes
        num_rows = 0
        if not self.is_for_others:
            num_rows = 1 if self.wanted == "last" else size if self.wanted == "all" else 0
            if self.wanted == "hidden":
                assert plan.hidden is not None
                self.hidden = aligned_zeros((size, int(plan.tensors[plan.hidden].shape[-1])), np.float32)
        if num_rows:
            rows = -(-num_rows // logit_group) * logit_group
            if self._rows is None or len(self._rows) != rows:
                self._rows = aligned_zeros((rows, plan.vocab_size), np.float32)
            self.logits = self._rows[:num_rows]
        self._plan, self._logit_group = plan, logit_group

    @property
    def records(self) -> list[RunRecord]:
        """Records of consecutive parts of the tokens. Each part was computed by one pipeline; its record lists every
        task in the order in which they ended, and the data that explain why workers waited. Tokens that share no chunk
        with another request are one part, or one part for each executor.
        """
        self._write_record()
        return self._records

    @property
    def record(self) -> RunRecord:
        """The only record of a request that consists of one part."""
        (record,) = self.records
        return record

    @property
    def num_left(self) -> int:
        """Number of tokens that no chunk has taken yet."""
        return self.token_ids.size - self.num_taken

    @property
    def is_over(self) -> bool:
        """True if no further token may go into a chunk."""
        if self.error is not None or self.is_dropped or self.is_unwanted:
            return True
        return self.cancel is not None and self.cancel.is_set()

    def cancelled(self, num_computed: int) -> ClosedError:
        """Return the error of a request that was cancelled after some of its tokens."""
        return ClosedError(f"the request was cancelled after {num_computed} of {self.token_ids.size} tokens")

    def take(self, most: int) -> Segment:
        """Return the next tokens, at most `most`, as a segment of the next chunk."""
        start, left = self.num_taken, self.token_ids.size - self.num_taken
        num_tokens = min(most, left)
        self.num_taken += num_tokens
        wanted = self.wanted
        num_rows = num_tokens if wanted == "all" else int(wanted == "last" and num_tokens == left)
        return Segment(self, start, num_tokens, num_rows)

    def rest(self, most: int) -> Segment:
        """Return a segment like `take`, but take no tokens."""
        before = self.num_taken
        segment = self.take(most)
        self.num_taken = before
        return segment

    def note(
        self, pipeline: Pipeline, segment: Segment, events: Sequence[TaskEvent], chunk: ChunkRecord | None = None
    ) -> None:
        """Record the events of a chunk with tokens of the request. Consecutive chunks of one pipeline form one
        record. `chunk` describes a chunk that several requests may have shared.
        """
        if pipeline is not self._pipeline or (chunk is None) is not self._is_unshared:
            self._write_record()
            self._pipeline, self._is_unshared = pipeline, chunk is None
        self._noted.append((segment.start, segment.num_tokens, events, chunk))
        self.num_chunks += 1

    def _write_record(self) -> None:
        if not self._noted:
            return
        assert self._pipeline is not None
        noted = self._noted
        if len(noted) == 1:
            chunks: tuple[ChunkRecord, ...] = ()
            _, _, events, record = noted[0]
            if record is not None:
                events, chunks = [_numbered(event, 0) for event in events], (record,)
        else:
            noted = sorted(noted, key=itemgetter(0))  # a chunk may have waited for rows of others
            events = [_numbered(event, chunk) for chunk, (_, _, own, _) in enumerate(noted) for event in own]
            events.sort(key=attrgetter("end_ns"))
            chunks = tuple(record for _, _, _, record in noted if record is not None)
        first, (last, num_tokens, _, _) = noted[0][0], noted[-1]
        self._records.append(
            RunRecord(
                pipeline=self._pipeline,
                num_tokens=last + num_tokens - first,
                position=self.position + first,
                position_bytes=self._position_bytes,
                start_ns=min(events, key=attrgetter("start_ns")).start_ns,
                end_ns=events[-1].end_ns,
                events=events,
                chunks=chunks,
                sequence=self._sequence,
            )
        )
        self._noted, self._pipeline = [], None

    def commit(self) -> None:
        """Advance the state after all tokens have been computed."""
        self.state.advance(self.token_ids.size)

    def following(self) -> Tokens | None:
        """Return the tokens that follow. If there are none, the request has ended.

        Raises:
            BaseException: the error of `then`.
        """
        then = self._then  # another thread may abandon the request
        following = None if then is None else then(self)
        self.is_ended = following is None
        return following

    def abandon(self) -> None:
        """End the request with its chunks in flight, and no longer refer to the function that returns the tokens that
        follow, because the function may refer to the request. Any thread may call this method.
        """
        self.is_unwanted, self._then = True, None

    def go_on(self, following: Tokens) -> None:
        """Continue with other tokens, of which the logits of the last one are computed."""
        self.token_ids, self.wanted = following, "last"
        self.begin(self._plan, self._logit_group)
        self.state.begin(following.size)

    def renew(self, token_ids: Tokens, state: State) -> None:
        """Prepare a request that has ended for other tokens, of which the logits of the last one are computed."""
        self.token_ids, self.wanted, self.state = token_ids, "last", state
        self.is_ended = self.is_dropped = False
        self.is_checked = True
        self.error, self.wait_for_writers, self._gate = None, None, None

    def fail(self, error: BaseException) -> None:
        """Restore the state, immediately or as soon as no thread writes into it. Only the first error is kept."""
        self.stop(error)
        self.is_ended = True
        self._noted, self._pipeline = [], None
        if not self.is_dropped:  # otherwise the state restores itself at its next use
            self.state.roll_back(wait=self.wait_for_writers)

    def stop(self, error: BaseException) -> None:
        """Prevent further tokens from going into a chunk. Only the first error is kept."""
        if self.error is None:
            self.error = _copied(error)

    def queue(self, on_end: Callable[[], object] = bool) -> None:
        """Prepare the request for `wait`, because another thread will compute it; see `Scheduler.submit`."""
        self._gate, self._on_end, self.is_released = Gate(), on_end, False

    @property
    def is_queued(self) -> bool:
        """True if another thread computes the request, or has computed it."""
        return self._gate is not None

    def release(self) -> None:
        """End the waits of other threads."""
        gate, on_end = self._gate, self._on_end
        self.is_released, self._on_end = True, bool  # the listener may refer to the request
        if gate is not None:
            gate.open()  # from here on the caller may submit the request again
        with suppress(Exception):  # the listener may be gone
            on_end()

    def wait(self) -> None:
        """Wait until the request has ended. An interrupt ends the wait, and leaves no lock held."""
        self.waiter()

    @property
    def waiter(self) -> Callable[[], None]:
        """Function that waits like `wait`, but does not refer to the request. A state that outlives the request can
        keep it without a reference cycle.
        """
        assert self._gate is not None
        return self._gate.wait

    def raise_error(self) -> None:
        """Raise the error of the request, if there is one, and remove it, because the error and the request in its
        traceback would form a reference cycle.
        """
        if self.error is not None:
            try:
                raise self.error
            finally:
                self.error = None


class Segment(NamedTuple):
    """Consecutive tokens of a request in one chunk.

    Attributes:
        start: index of the first token among the request's tokens.
        num_rows: number of tokens at the end of the segment whose logits are requested.
    """

    request: Request
    start: int
    num_tokens: int
    num_rows: int

    @property
    def token_ids(self) -> Tokens:
        """Token ids, int64 [num_tokens]."""
        return self.request.token_ids[self.start : self.start + self.num_tokens]

    @property
    def position(self) -> int:
        """Position of the first token."""
        return self.request.position + self.start

    @property
    def logits(self) -> NDArray[np.float32] | None:
        """The request's buffer of logits, starting at the first requested row of the segment; None if another rank
        receives the logits.
        """
        rows = self.request._rows
        if rows is None:
            return None
        return rows[self.start if self.request.wanted == "all" else 0 :]


class Chunk:
    """A chunk: consecutive segments, one for each request with rows in the chunk.

    `number` identifies the chunk if other ranks compute it too; see `Key.number`.
    """

    def __init__(self, segments: Sequence[Segment], flow: Flow, number: int = 0) -> None:
        self.number = number
        self.segments = segments
        first = segments[0]
        self.num_tokens, self.num_rows = first.num_tokens, first.num_rows
        self.wants_hidden = first.request.wanted == "hidden"
        for segment in segments[1:]:
            self.num_tokens += segment.num_tokens
            self.num_rows += segment.num_rows
            self.wants_hidden |= segment.request.wanted == "hidden"
        self.route: Route = flow.without_logits
        """Subgraphs that the chunk passes through."""
        if self.num_rows or self.wants_hidden:
            self.route = flow.with_logits if self.num_rows else flow.with_hidden
            if first.request.is_for_others:
                self.route = flow.with_sums if self.num_rows else flow.with_inner_sums
        self.loading = Lock()
        """Lock of the thread that fills the graph inputs."""
        self.is_loaded = False

    @property
    def is_over(self) -> bool:
        """True if the results of all requests in the chunk are no longer needed."""
        return all(segment.request.is_over for segment in self.segments)


def _numbered(event: TaskEvent, chunk: int) -> TaskEvent:
    """Return an event with another number of its chunk."""
    return event._replace(task=Task(event.task.subgraph, chunk))


def _memory(plan: Plan) -> tuple[object, ...]:
    """Return the parts of a plan that determine the memory and the contents of a state."""
    return plan.state_tensors, plan.window, plan.key_form


def _copied(error: BaseException) -> BaseException:
    """Return a copy of the error for the waiting thread, which adds its own traceback."""
    if not isinstance(error, ChunkrtError):
        return error
    try:
        other = type(error)(*error.args)
    except Exception:  # an exception class of a plug-in may require other arguments
        return error
    other.__cause__ = error.__cause__
    return other
