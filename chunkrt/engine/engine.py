"""An engine: a loaded model with its sessions."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import numpy as np

from chunkrt.backends.dispatch import PLUGINS as OPERATOR_PLUGINS
from chunkrt.backends.dispatch import Dispatcher, default_base, registered_operators
from chunkrt.backends.link import Communicator, LinkBackend, ranks_of
from chunkrt.backends.switches import Switches
from chunkrt.engine.arguments import as_token_ids, checked_salt, listed, require_path, require_whole
from chunkrt.engine.cache_memory import CacheMemory
from chunkrt.engine.capability import plan_to_run
from chunkrt.engine.checks import check_cache, check_cache_memory, check_shift, default_cache_dtype
from chunkrt.engine.embedding import Float32, Pooling
from chunkrt.engine.executors import ExecutorBuilder
from chunkrt.engine.generation import Piece
from chunkrt.engine.lengths import choose_chunk_length, choose_context_length
from chunkrt.engine.many import MOST_AT_ONCE, in_sessions
from chunkrt.engine.npu_attention import as_compiled
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.prefix_cache.opening import open_cache
from chunkrt.engine.roles import open_backends, runs_on_qnn
from chunkrt.engine.sampling import GREEDY, PluginSampler, Sampler, SamplingOptions
from chunkrt.engine.scoring import Score, by_context, check_pair, encode_pair, num_shared
from chunkrt.engine.session import Session
from chunkrt.engine.session_file import Conversation, SessionFile, model_digest
from chunkrt.engine_directory.manifest import open_weights, read_manifest
from chunkrt.engine_directory.verification import Verification
from chunkrt.engine_directory.weights import stored_weights
from chunkrt.errors import BusyError, ClosedError, ConfigError, ModelError, OutOfMemoryError, unknown_name
from chunkrt.files import Progress, no_progress
from chunkrt.graph.plan import Plan
from chunkrt.quant.scheme import Scheme
from chunkrt.runtime.affinity import find_cpus, running_on
from chunkrt.runtime.batcher import find_batcher
from chunkrt.runtime.request import Request
from chunkrt.runtime.scheduler import CLOSED, Scheduler
from chunkrt.runtime.state import State
from chunkrt.runtime.state_tensors import CacheDtype
from chunkrt.runtime.stream import take_part
from chunkrt.tokenizer import Tokenizer

if TYPE_CHECKING:
    from chunkrt.engine.ranks.leader import EngineMirror

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Current activity and memory of an engine.

    Attributes:
        sessions: number of open sessions.
        cache_bytes: bytes reserved for the caches of sessions.
        waiting_sessions: number of sessions that wait for cache memory.
        prefix_bytes: bytes of the prefix cache in memory.
        cached_tokens: number of tokens that the prefix cache has supplied to sessions so far.
        waiting_runs: number of prompts and single tokens that share chunks, or wait for a shared chunk.
        shared_chunks: number of computed chunks that several runs could share.
        shared_rows: number of tokens in these shared chunks.
        chunk_length: maximum number of tokens of a chunk.
        longest_task_s: seconds since the oldest task in progress began; a large value indicates a device that does not
            respond.
    """

    sessions: int
    cache_bytes: int
    waiting_sessions: int
    prefix_bytes: int
    cached_tokens: int
    waiting_runs: int
    shared_chunks: int
    shared_rows: int
    chunk_length: int
    longest_task_s: float


LEAST_AWAITED = 32
"""Minimum number of shared tokens at the beginning of two contexts for which one context waits until the other is in
the prefix cache.
"""


class _Beginnings:
    """Record of the beginnings of computed contexts, in steps of LEAST_AWAITED tokens."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def add(self, context: Sequence[int]) -> None:
        self._known.update(self._keys(context))

    def num_known(self, context: Sequence[int]) -> int:
        """Return the number of tokens at the beginning of a context that it shares with a recorded context."""
        keys = self._keys(context)
        return LEAST_AWAITED * sum(1 for _ in takewhile(self._known.__contains__, keys))

    def _keys(self, context: Sequence[int]) -> Iterator[int]:
        """Yield keys of the first step of a context, the first two steps, and so on. A collision of keys only adds or
        omits a wait.
        """
        key = 0
        for start in range(0, len(context) - LEAST_AWAITED + 1, LEAST_AWAITED):
            key = hash((key, *context[start : start + LEAST_AWAITED]))
            yield key


class Engine:
    """A loaded model: its plan, weights and executables. Any number of sessions may be opened on it."""

    def __init__(
        self,
        folder: Path,
        options: EngineOptions,
        *,
        progress: Progress = no_progress,
        communicator: Communicator | None = None,
        mirror: EngineMirror | None = None,
    ) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self.options = options = as_compiled(options, self.manifest) if runs_on_qnn(options) else options
        if self.manifest.ranks != (ranks := ranks_of(communicator)):
            raise ConfigError(f"{folder} was compiled for {self.manifest.ranks}, not for {ranks}; compile it again")
        with Verification(folder, self.manifest) as self._verification:
            self.plan: Plan = plan_to_run(folder, self.manifest, options)
            self.scheme: Scheme = self.manifest.scheme
            self.context_length = choose_context_length(self.plan, options)
            check_shift(self.context_length, options)
            self.plan = self.plan.within(self.context_length)
            weights = open_weights(folder)
            weights.check(
                entry for weight in stored_weights(self.plan, self.scheme).values() for entry in weight.entries
            )
            self.weights = weights.with_tables(self.plan)
            self.tokenizer: Tokenizer | None = Tokenizer.load(folder, self.plan.vocab_size)
            self.is_closed = self._is_verified = False
            self._process_id = os.getpid()
            self._lock = threading.Lock()
            cpus = find_cpus(options.affinity)
            with running_on(cpus):  # this starts the threads of the native pool
                self.npu_backend, self.cpu_backend = open_backends(self.manifest, folder, options)
            self._mirror = mirror
            """The engines of the other ranks, if this is rank 0 of several."""
            self.chunk_length = choose_chunk_length(
                options,
                self.context_length,
                has_npu=self.npu_backend is not self.cpu_backend,
                manifest=self.manifest,
            )
            self.dispatcher = Dispatcher(
                self.plan,
                self.scheme,
                registered_operators(),
                Switches.parse(options.ops),
                default=default_base(options.npu),
            )
            check_cache(options, self.plan, self.dispatcher, self.cpu_backend)
            self._cache_memory = CacheMemory(options.cache_memory, options.queue)
            if options.cache_memory is not None:
                check_cache_memory(options.cache_memory, self._make_state(State).num_bytes, self.context_length)
            sampler = self.dispatcher.sampler()
            assert sampler.function is not None
            self.make_sampler: Callable[[SamplingOptions], Sampler | PluginSampler] = (
                partial(PluginSampler, sampler.function, sampler.origin) if sampler.is_plugin else sampler.function
            )
            executors = ExecutorBuilder(
                plan=self.plan,
                placement=self.manifest.placement,
                options=options,
                chunk_length=self.chunk_length,
                weights=self.weights,
                dispatcher=self.dispatcher,
                npu_backend=self.npu_backend,
                cpu_backend=self.cpu_backend,
                link=None if communicator is None else LinkBackend(communicator),
                cpus=cpus,
                progress=progress,
            ).build()
            self.npu_backend = executors.npu_backend
            self._has_ranks = communicator is not None
            self.scheduler = Scheduler(
                executors.executors,
                find_batcher(options.batcher),
                on_all_ranks=None if mirror is None else mirror.compute,
                takes_turns=communicator is not None and mirror is None,
            )
            self.prefix_cache = open_cache(
                self, executors.exactness, has_ranks=self._has_ranks, is_npu_lost=executors.is_npu_lost
            )

    @property
    def identity(self) -> Mapping[str, object]:
        """Properties that are equal for the engines of all ranks."""
        manifest = self.manifest
        return {
            "version": manifest.chunkrt,
            "checkpoint": manifest.checkpoint,
            "scheme": asdict(self.scheme),
            "placement": list(manifest.placement.items()),
            "subgraphs": [(subgraph.name, subgraph.device) for subgraph in self.plan.subgraphs],
            "context length": self.context_length,
            "chunk length": self.chunk_length,
            "caches": self.cache_dtype,
            "attention": self.options.attention_math,
            "executors": self.scheduler.executors.identity,
            "plug-ins": [str(plugin) for plugin in OPERATOR_PLUGINS.plugins if plugin.load_or_tell() is not None],
            "tokenizer": {name: manifest.files[name] for name in manifest.files if name.endswith(".json")},
        }

    def session(self, *, cache_salt: str | None = None) -> Session:
        """Open a new, empty session.

        Args:
            cache_salt: a string that separates users of the prefix cache. The session shares prefixes only with
                sessions that use the same salt. Sessions without a salt (None) share prefixes with each other.

        Raises:
            ClosedError: the engine is closed.
            BusyError: the memory for caches is exhausted (`EngineOptions.cache_memory`).
            ConfigError: the salt is not a string, or is empty.
        """
        salt = checked_salt(cache_salt)
        self.check_open()
        return Session(self, self._cache_memory.open(self.make_state), cache_salt=salt)

    async def asession(self, *, cache_salt: str | None = None) -> Session:
        """Open a session like `session`, but wait until memory for its caches is available, in order of arrival.

        Raise BusyError if the queue is full (`EngineOptions.queue`).
        """
        salt = checked_salt(cache_salt)
        self.check_open()
        return Session(self, await self._cache_memory.await_room(self.make_state), cache_salt=salt)

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        *,
        max_new_tokens: int = 256,
        sampling: SamplingOptions = GREEDY,
        stop: Sequence[str] = (),
        max_sessions: int = MOST_AT_ONCE,
        cache_salt: str | None = None,
    ) -> str | list[str]:
        """Answer prompts, many at a time.

        Args:
            prompts: one text, or a list of prompts, which are texts or lists of token ids as for `Session.prefill`.
            max_new_tokens, sampling, stop: see `Session.generate`.
            max_sessions: maximum number of prompts in progress; the memory for caches may lower it.
            cache_salt: see `Engine.session`.

        Returns:
            The answer, or for a list of prompts a list of answers in the same order.

        Raises:
            ChunkrtError: an error of `Session.prefill` or `Session.generate`. No answer is returned in this case.
        """
        several = [prompts] if isinstance(prompts, str) else listed("prompts", prompts)
        texts = [""] * len(several)
        pieces = self.stream(
            several,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=stop,
            max_sessions=max_sessions,
            cache_salt=cache_salt,
        )
        for index, piece in pieces:
            texts[index] += piece.text
        return texts[0] if isinstance(prompts, str) else texts

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_new_tokens: int = 256,
        sampling: SamplingOptions = GREEDY,
        stop: Sequence[str] = (),
        template_options: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
    ) -> str:
        """Return the answer to a chat.

        Args:
            messages: mappings with "role" and "content", for example [{"role": "user", "content": "Hello"}].
            max_new_tokens, sampling, stop: see `Session.generate`.
            template_options: additional variables of the chat template, for example {"enable_thinking": False}.
            cache_salt: see `Engine.session`.

        Raises:
            ConfigError: the messages or options are malformed.
            ModelError: the model has no chat template, or its template rejects them.
        """
        tokens = self.require_tokenizer().encode_chat(messages, template_options=template_options)
        pieces = self.stream(
            [tokens], max_new_tokens=max_new_tokens, sampling=sampling, stop=stop, cache_salt=cache_salt
        )
        return "".join(piece.text for _, piece in pieces)

    def stream(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        max_new_tokens: int = 256,
        sampling: SamplingOptions = GREEDY,
        stop: Sequence[str] = (),
        max_sessions: int = MOST_AT_ONCE,
        cache_salt: str | None = None,
    ) -> Iterator[tuple[int, Piece]]:
        """Answer prompts like `generate`, and yield each piece as soon as it is generated, with the index of its
        prompt.
        """
        if isinstance(prompts, str):
            raise ConfigError(
                "prompts is a single text, expected a list; pass a list of texts, or pass the text to generate"
            )
        several = listed("prompts", prompts)

        def answer(session: Session, index: int) -> Iterator[Piece]:
            return session.answer(several[index], max_new_tokens=max_new_tokens, sampling=sampling, stop=stop)

        yield from self._in_sessions(len(several), answer, max_sessions, cache_salt)

    def score(
        self,
        pairs: Sequence[tuple[str, str] | tuple[Sequence[int], Sequence[int]]],
        *,
        max_sessions: int = MOST_AT_ONCE,
        cache_salt: str | None = None,
    ) -> list[Score]:
        """Compute the log-probabilities of continuations after their contexts, many at a time.

        Args:
            pairs: pairs of a context and its continuation, both as texts or both as token ids. Texts are tokenised as
                in lm-evaluation-harness. If several pairs have the same context, it is run once.
            max_sessions: maximum number of contexts in progress; the memory for caches may lower it.
            cache_salt: see `Engine.session`.

        Returns:
            A list with the result of `Session.score` for each pair, in the same order.

        Raises:
            ConfigError: a context or continuation is empty, or both together exceed the context length.
            BackendError: a subgraph failed.
        """
        found = dict(self.scores(pairs, max_sessions=max_sessions, cache_salt=cache_salt))
        return [found[index] for index in range(len(found))]

    def scores(
        self,
        pairs: Sequence[tuple[str, str] | tuple[Sequence[int], Sequence[int]]],
        *,
        max_sessions: int = MOST_AT_ONCE,
        cache_salt: str | None = None,
    ) -> Iterator[tuple[int, Score]]:
        """Score pairs like `score`, and yield each score as soon as it is computed, with the index of its pair."""
        tokens = [self._encode_pair(pair) for pair in listed("pairs", pairs)]
        for pair in tokens:
            check_pair(*pair, self.plan.vocab_size, self.context_length)
        groups = by_context(tokens)
        contexts = [tokens[group[0]][0] for group in groups]
        left = [iter(group) for group in groups]
        beginning: set[int] = set()
        """Groups of pairs whose context is in progress."""
        ran = _Beginnings()

        def scoring(session: Session, index: int) -> Iterator[Score]:
            for pair in groups[index]:
                yield session.score(*tokens[pair])

        def may_begin(index: int) -> bool:
            """Return False if a context in progress has the same beginning, because the prefix cache will contain the
            shared tokens afterwards. Tokens that the cache already contains do not count.
            """
            context = contexts[index]
            least = max(len(context) // 2, ran.num_known(context) + LEAST_AWAITED)
            if self.prefix_cache is not None and any(
                num_shared(context, contexts[other]) >= least for other in beginning - {index}
            ):
                return False
            beginning.add(index)
            return True

        for index, score in self._in_sessions(len(groups), scoring, max_sessions, cache_salt, may_begin):
            if index in beginning:
                beginning.discard(index)
                ran.add(contexts[index])
            yield next(left[index]), score

    def embed(
        self,
        texts: str | Sequence[str | Sequence[int]],
        *,
        pooling: Pooling | None = None,
        max_sessions: int = MOST_AT_ONCE,
        cache_salt: str | None = None,
    ) -> Float32:
        """Compute the embeddings of texts from their hidden states after the last norm, many at a time.

        Args:
            texts: one text, or a list of texts or lists of token ids. The special tokens that the model expects are
                added to texts; token ids are used unchanged.
            pooling: "last" for the hidden state of the last token, "mean" for the mean of all hidden states, None for
                the choice in the model's files. Embeddings of a model that was not trained for embeddings are not
                reliable.
            max_sessions: maximum number of texts in progress; the memory for caches may lower it.
            cache_salt: see `Engine.session`.

        Returns:
            float32 [N, H], or [H] for one text. Every embedding has length 1.

        Raises:
            ConfigError: a text is empty or exceeds the context length, the scheme rotates hidden states, or `pooling`
                is None and the model's files do not name one.
            BackendError: a subgraph failed.
        """
        if pooling is None and self.tokenizer is not None:
            pooling = self.tokenizer.settings.pooling
        if pooling is None:
            raise ConfigError("the model's files do not name a pooling for embeddings; pass pooling='last' or 'mean'")
        if not isinstance(pooling, str):
            raise ConfigError(f"pooling is {pooling!r:.80}, expected one of: {', '.join(get_args(Pooling))}")
        if pooling not in get_args(Pooling):
            raise unknown_name("pooling", pooling, get_args(Pooling))
        several = [texts] if isinstance(texts, str) else listed("texts", texts)
        if not several:
            raise ConfigError("texts is empty; pass at least one text")

        def embedding(session: Session, index: int) -> Iterator[Float32]:
            yield session.embedding(several[index], pooling)

        rows = dict(self._in_sessions(len(several), embedding, max_sessions, cache_salt))
        return rows[0] if isinstance(texts, str) else np.stack([rows[index] for index in range(len(several))])

    def _in_sessions(
        self,
        number: int,
        work: Callable[[Session, int], Iterator[Result]],
        most: int,
        cache_salt: str | None,
        may_begin: Callable[[int], bool] = lambda index: True,
    ) -> Iterator[tuple[int, Result]]:
        """Do work in sessions; see `in_sessions`. A part begins as soon as `may_begin` allows it."""
        if require_whole("max_sessions", most) < 1:
            raise ConfigError(f"max_sessions is {most}, expected at least 1")
        salt = checked_salt(cache_salt)

        def open_session(index: int, waits: bool) -> Session | None:
            if not may_begin(index):
                return None
            if waits:
                return Session(self, self._cache_memory.wait(self.make_state), cache_salt=salt)
            with suppress(BusyError):
                return self.session(cache_salt=cache_salt)
            return None

        self.check_ready()
        most = 1 if self.scheduler.takes_turns else most
        return in_sessions(number, open_session, work, most, self.scheduler.sharing)

    def load_session(self, path: str | os.PathLike[str], *, cache_salt: str | None = None) -> Session:
        """Open a session with the contents of a file that `Session.save` wrote. For `cache_salt`, see `session`.

        Raises:
            ClosedError, BusyError: see `session`.
            ConfigError: the engine is one of several ranks.
            ModelError: the file is missing, damaged, or does not fit; see `Session.load`.
        """
        session = self.session(cache_salt=cache_salt)
        try:
            session.load(path)
        except BaseException:
            session.close()
            raise
        return session

    def session_file(self, path: str | os.PathLike[str], conversation: Conversation | None = None) -> SessionFile:
        """Return a file for reading or writing a session. Raise ConfigError if the engine is one of several ranks."""
        if self._has_ranks:
            raise ConfigError(
                "each rank holds only a share of a session, so it cannot be saved or loaded; load without ranks"
            )
        return SessionFile(
            require_path("path", path),
            model=model_digest(self.manifest, self.scheme, self.options.attention_math),
            vocab_size=self.plan.vocab_size,
            context_length=self.context_length,
            context_keep=self.options.context_keep,
            conversation=conversation,
        )

    def fork_state(self, state: State) -> State:
        """Copy a state for `Session.fork`. Raise BusyError if the memory for caches is exhausted."""
        self.check_open()
        return self._cache_memory.open(state.fork)

    def stats(self) -> EngineStats:
        """Return the engine's current activity and memory."""
        self.check_open()
        scheduler, memory = self.scheduler, self._cache_memory
        return EngineStats(
            sessions=memory.num_states,
            cache_bytes=memory.num_bytes,
            waiting_sessions=memory.num_waiting,
            prefix_bytes=0 if self.prefix_cache is None else self.prefix_cache.num_bytes,
            cached_tokens=0 if self.prefix_cache is None else self.prefix_cache.num_cached,
            waiting_runs=scheduler.num_waiting,
            shared_chunks=scheduler.num_chunks,
            shared_rows=scheduler.num_rows,
            chunk_length=self.chunk_length,
            longest_task_s=scheduler.executors.longest_task_s(),
        )

    def make_state(self) -> State:
        """Return an empty state. Raise ClosedError if the engine is closed, OutOfMemoryError if the memory is not
        sufficient.
        """
        self.check_open()
        return self._make_state(State if self._mirror is None else self._mirror.make_state)

    def _make_state(self, make: Callable[..., State]) -> State:
        try:
            return make(self.plan, self.context_length, self.cache_dtype, chunk_length=self.chunk_length)
        except MemoryError as error:
            raise OutOfMemoryError(
                f"there is too little memory for a context of {self.context_length} ({error}); choose a shorter one "
                "(`context_length`)"
            ) from error

    @property
    def cache_dtype(self) -> CacheDtype:
        """Data type of keys and values."""
        return self.options.cache_dtype or default_cache_dtype(self.options, self.scheme, self.cpu_backend)

    def run(self, request: Request) -> Request:
        """Compute the tokens of a request; see `Scheduler.run`. Sequences call this method."""
        if not isinstance(request, Request):
            raise ConfigError(f"request is {request!r}, expected a Request; use a session to create one")
        self.check_ready()
        return self.scheduler.run(request)

    def take_part(self, executor: str, requests: Sequence[Request], number: int) -> None:
        """Compute the same work as the leading rank; see `runtime.stream.take_part`."""
        take_part(self.scheduler.executors, executor, requests, number)

    def check_ready(self) -> None:
        """Raise ClosedError if the engine is closed, or ModelError if its files have changed since they were
        written."""
        self.check_open()
        if not self._is_verified:
            self._verification.wait()
            self._is_verified = True

    def require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            ModelError: the checkpoint contains no tokenizer.
        """
        if self.tokenizer is None:
            raise ModelError(
                f"{self.manifest.model} has no tokenizer; put its tokenizer.json next to its weights (or, in "
                "Python, pass token ids in place of text)"
            )
        return self.tokenizer

    def close(self) -> None:
        """Release the executables. Sessions cannot be used afterwards.

        Runs in other threads complete the chunks that have begun, and then raise ClosedError. Repeated calls are
        allowed. In a forked process the method has no effect.
        """
        if os.getpid() != self._process_id:
            return
        with self._lock:
            if not self.is_closed:
                self.is_closed = True
                self._cache_memory.look_again()  # each waiting sequence ends its wait, and wakes the next one
                self.scheduler.close()
                if self.prefix_cache is not None:
                    self.prefix_cache.close()
                self._verification.stop()
                if self._mirror is not None:
                    self._mirror.close()

    def __repr__(self) -> str:
        """Return the model's name with its scheme, backend and lengths."""
        how = f"scheme {self.scheme.name}, on {self.npu_backend.name}, chunks of {self.chunk_length}"
        return f"Engine({self.manifest.model!r}, {how}, context of {self.context_length}{', closed' * self.is_closed})"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_open(self) -> None:
        """Raise ClosedError if the engine is closed. Also raise it in a forked process, where neither the engine's
        threads nor its NPU exist.
        """
        if os.getpid() != self._process_id:
            raise ClosedError(
                "the engine belongs to the process that this one was forked from; load the model here, or start "
                "processes with 'spawn'"
            )
        if self.is_closed:
            raise ClosedError(CLOSED)

    def _encode_pair(self, pair: tuple[str | Sequence[int], str | Sequence[int]]) -> tuple[list[int], list[int]]:
        if isinstance(pair, str) or len(parts := listed("a pair", pair)) != 2:
            raise ConfigError(f"a pair is {pair!r}, expected a context and its continuation")
        context, continuation = parts
        if isinstance(context, str) and isinstance(continuation, str):
            return encode_pair(self.require_tokenizer(), context, continuation)
        return as_token_ids(context), as_token_ids(continuation)
