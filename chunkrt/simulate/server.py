"""A server on a virtual clock: sequences arrive, are batched into chunks, and leave.

The server feeds an open schedule by the scheduler's rules, which `runtime.batcher` contains. If single tokens run on
the CPU alone although an NPU exists, only one such chunk runs at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from chunkrt.graph.flow import Route
from chunkrt.runtime.batcher import Batcher, may_enter, next_rows
from chunkrt.runtime.record import ChunkRecord, SegmentRecord
from chunkrt.runtime.schedule import Schedule
from chunkrt.simulate.arrivals import SimulatedRequest


class ChunkCosts(NamedTuple):
    """Computation of a chunk: its route through the plan, and the duration of each of its tasks alone, by subgraph."""

    route: Route
    durations: Sequence[int]


Admit = Callable[[ChunkRecord, int, bool], ChunkCosts]
"""Function of a chunk, the number of its rows that need logits, and a flag: the chunk bypasses the NPU and runs on the
CPU.
"""

DecodesApart = Callable[[Sequence[int]], bool]
"""Function of the positions of decoding sequences; returns True if these sequences bypass the NPU."""


class SimulatedClient:
    """A request in progress: a sequence that waits for chunks to take its tokens.

    Args:
        number: number of the sequence.
        request: lengths of its prompt and answer.
        arrival_ns: its arrival time.
        step: see `Waiting.step`.
    """

    def __init__(self, number: int, request: SimulatedRequest, arrival_ns: float, step: int) -> None:
        self.number, self.request, self.arrival_ns = number, request, arrival_ns
        self.start_ns = 0.0
        """Time at which the request was admitted."""
        self.ready_ns = 0.0
        """Time from which chunks may take the waiting tokens."""
        self.token_ns: list[float] = []
        """Completion times of the tokens of the answer."""
        self.position = 0
        """Position of the next token that a chunk takes."""
        self.num_left = request.prompt
        """Number of waiting tokens: those of the prompt, or the last generated one."""
        self.num_passed, self.step = 0, step
        self.in_flight: list[int] = []
        """Chunks that contain rows of this sequence."""

    @property
    def is_decode(self) -> bool:
        """True if the sequence waits for the row of a single token."""
        return bool(self.token_ns) or self.request.prompt == 1

    @property
    def time_to_first_token_ns(self) -> float:
        """Time from the arrival of the request to its first token."""
        return self.token_ns[0] - self.arrival_ns


class Server:
    """Admits requests, forms chunks of waiting sequences, and records the completion time of every token.

    Args:
        schedule: an open schedule without chunks; the server closes it once all requests have been answered.
        requests: the requests in order of arrival.
        batcher: forms the chunks.
        chunk_length: number of tokens of a chunk.
        most_sessions: number of requests that are admitted at once; further requests wait.
        most_in_flight: limit of chunks in flight, except for those that bypass the NPU.
        step: value of `Waiting.step` for all requests.
        prompt_ns: time from the admission of a request until its tokens may be taken.
        step_ns, token_ns: time from the end of a chunk until the tokens that follow it may be taken: a constant, and a
            time for each of these tokens.
        admit: returns the route and durations of a chunk.
        decodes_apart: returns True if single tokens bypass the NPU.
    """

    def __init__(
        self,
        schedule: Schedule,
        requests: Sequence[SimulatedRequest],
        batcher: Batcher,
        *,
        chunk_length: int,
        most_sessions: int,
        most_in_flight: int,
        step: int,
        prompt_ns: float,
        step_ns: float,
        token_ns: float,
        admit: Admit,
        decodes_apart: DecodesApart,
    ) -> None:
        self._schedule, self._batcher = schedule, batcher
        self._admit, self._decodes_apart = admit, decodes_apart
        self._chunk_length, self._step = chunk_length, step
        self._prompt_ns, self._step_ns, self._token_ns = prompt_ns, step_ns, token_ns
        self._most_sessions, self._most_in_flight = most_sessions, most_in_flight
        self._coming = deque(enumerate(requests))
        self._queue: deque[SimulatedClient] = deque()
        self._waiting: list[SimulatedClient] = []
        """Requests with tokens that no chunk has taken; the request that has waited longest is first."""
        self._inside: list[SimulatedClient] = []
        self._flying: dict[int, list[tuple[SimulatedClient, bool]]] = {}
        """Requests of each chunk in flight. The flag of a request is True if the chunk contains the last of its waiting
        tokens.
        """
        self._apart: int | None = None
        """The chunk that bypasses the NPU, if one exists."""
        self.clients: list[SimulatedClient] = []
        """All requests that have arrived."""
        self.chunks: list[ChunkRecord] = []
        """All chunks that were formed."""

    def __call__(self, now: float) -> float | None:
        """Process finished chunks and new requests, and form chunks; return the time of the next call."""
        for number, _ in self._schedule.ended:
            if number == self._apart:
                self._apart = None
            inside = self._flying.pop(number)
            ready_ns = now + self._step_ns + self._token_ns * sum(has_last for _, has_last in inside)
            for client, has_last in inside:
                client.in_flight.remove(number)
                if has_last:
                    self._note_token(client, now, ready_ns)
        self._schedule.ended.clear()
        self._take_in(now)
        self._form_chunks([client for client in self._waiting if client.ready_ns <= now])
        if not (self._coming or self._queue or self._inside) and self._schedule.is_open:
            self._schedule.close()
        calls = [client.ready_ns for client in self._waiting if client.ready_ns > now]
        if self._coming and (arrival_ns := self._coming[0][1].arrival_ns) is not None:
            calls.append(arrival_ns)
        return min(calls, default=None)

    def _take_in(self, now: float) -> None:
        """Queue new requests, and admit them while places are free."""
        while self._coming:
            number, request = self._coming[0]
            has_room = len(self._inside) + len(self._queue) < self._most_sessions
            if not (has_room if request.arrival_ns is None else request.arrival_ns <= now):
                break
            self._coming.popleft()
            arrival_ns = now if request.arrival_ns is None else request.arrival_ns
            client = SimulatedClient(number, request, arrival_ns, self._step)
            self.clients.append(client)
            self._queue.append(client)
        while self._queue and len(self._inside) < self._most_sessions:
            client = self._queue.popleft()
            client.start_ns, client.ready_ns = now, now + self._prompt_ns
            self._inside.append(client)
            self._waiting.append(client)

    def _note_token(self, client: SimulatedClient, now: float, ready_ns: float) -> None:
        client.token_ns.append(now)
        if len(client.token_ns) == client.request.generate:
            self._inside.remove(client)
        else:
            client.num_left, client.num_passed, client.ready_ns = 1, 0, ready_ns
            self._waiting.append(client)

    def _form_chunks(self, ready: Sequence[SimulatedClient]) -> None:
        if self._apart is not None:
            return
        decoding = [client for client in ready if client.is_decode]
        is_apart = bool(decoding) and self._decodes_apart([client.position for client in decoding])
        while len(self._flying) < self._most_in_flight and may_enter(len(self._flying), self._inside):
            together = [client for client in ready if client.num_left and not (is_apart and client.is_decode)]
            if not together:
                break
            self._form_chunk(together, is_apart=False)
        if is_apart:
            self._apart = self._form_chunk(decoding, is_apart=True)

    def _form_chunk(self, ready: Sequence[SimulatedClient], *, is_apart: bool) -> int:
        """Form a chunk of some waiting requests; return its number."""
        takes = next_rows(self._batcher, ready, self._chunk_length)
        segments = tuple(SegmentRecord(client.number, client.position, num_tokens) for client, num_tokens in takes)
        after = {number for client, _ in takes for number in client.in_flight}
        for client, num_tokens in takes:
            client.num_left -= num_tokens
            client.position += num_tokens
        rows = [(client, not client.num_left) for client, _ in takes]
        self._waiting = [client for client in self._waiting if client.num_left]
        chunk = ChunkRecord(len(self.chunks), segments)
        self.chunks.append(chunk)
        admission = self._admit(chunk, sum(has_last for _, has_last in rows), is_apart)
        self._flying[chunk.number] = rows
        for client, _ in takes:
            client.in_flight.append(chunk.number)
        number = self._schedule.admit(admission.route, after, admission.durations)
        assert number == chunk.number
        return number
