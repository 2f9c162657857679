"""An engine: a loaded model with its sessions."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from chunkrt.backends.dispatch import PLUGINS as OPERATOR_PLUGINS
from chunkrt.backends.dispatch import Dispatcher, default_base, registered_operators
from chunkrt.backends.link import Communicator, LinkBackend, ranks_of
from chunkrt.backends.switches import Switches
from chunkrt.engine.arguments import checked_salt, require_path
from chunkrt.engine.cache_memory import CacheMemory
from chunkrt.engine.capability import plan_to_run
from chunkrt.engine.checks import check_cache, check_cache_memory, check_shift, default_cache_dtype
from chunkrt.engine.executors import ExecutorBuilder
from chunkrt.engine.lengths import choose_chunk_length, choose_context_length
from chunkrt.engine.many import Runs
from chunkrt.engine.many_prompts import ManyPrompts
from chunkrt.engine.npu_attention import as_compiled
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.prefix_cache.opening import open_cache
from chunkrt.engine.roles import open_backends, runs_on_qnn
from chunkrt.engine.sampling import PluginSampler, Sampler, SamplingOptions
from chunkrt.engine.session import Session
from chunkrt.engine.session_file import Conversation, SessionFile, model_digest
from chunkrt.engine.stats import EngineStats
from chunkrt.engine_directory.manifest import open_weights, read_manifest
from chunkrt.engine_directory.verification import Verification
from chunkrt.engine_directory.weights import stored_weights
from chunkrt.errors import ClosedError, ConfigError, ModelError, OutOfMemoryError
from chunkrt.files import Progress, no_progress
from chunkrt.graph.plan import Plan
from chunkrt.quant.scheme import Scheme
from chunkrt.runtime.affinity import find_cpus, running_on
from chunkrt.runtime.batcher import find_batcher
from chunkrt.runtime.conductor import CLOSED, Conductor
from chunkrt.runtime.run import Run, RunResult
from chunkrt.runtime.state import State
from chunkrt.runtime.state_tensors import CacheDtype
from chunkrt.runtime.workers import GivesWay
from chunkrt.tokenizer import Tokenizer

if TYPE_CHECKING:
    from asyncio import Future

    from chunkrt.engine.ranks.leader import EngineMirror


class Engine(ManyPrompts):
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
            self.is_closed = False
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
            self._conductor = Conductor(
                executors.lanes,
                find_batcher(options.batcher),
                followers=mirror,
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
            "executors": self._conductor.lanes.identity,
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
        conductor, memory = self._conductor, self._cache_memory
        return EngineStats(
            sessions=memory.num_states,
            cache_bytes=memory.num_bytes,
            waiting_sessions=memory.num_waiting,
            prefix_bytes=0 if self.prefix_cache is None else self.prefix_cache.num_bytes,
            cached_tokens=0 if self.prefix_cache is None else self.prefix_cache.num_cached,
            waiting_runs=conductor.num_waiting,
            shared_chunks=conductor.num_chunks,
            shared_rows=conductor.num_rows,
            chunk_length=self.chunk_length,
            longest_task_s=conductor.lanes.longest_task_s(),
        )

    def _open_waiting(self, cache_salt: str | None) -> Session:
        return Session(self, self._cache_memory.wait(self.make_state), cache_salt=checked_salt(cache_salt))

    @property
    def _runs(self) -> Runs:
        return self._conductor

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

    def run(self, run: Run) -> RunResult:
        """Run tokens through the decoder. Sequences call this method.

        Concurrent runs share chunks (docs/serving.md).
        """
        if not isinstance(run, Run):
            raise ConfigError(f"run is {run!r}, expected a Run; use a session to create one")
        self.check_ready()
        return self._conductor.run(run)

    def take_part(self, lane: str, runs: Sequence[tuple[Run, int]], number: int, gives_way: GivesWay) -> None:
        """Compute the same work as the leading rank; see `Lanes.take_part`."""
        self._conductor.lanes.take_part(lane, runs, number, gives_way)

    async def arun(self, run: Run) -> RunResult:
        """Run tokens like `run` without blocking the event loop. If the task is cancelled, the run ends at the next
        chunk.
        """
        import asyncio

        self.check_open()
        loop = asyncio.get_running_loop()
        if self._conductor.takes_turns:
            raise ConfigError(
                "ranks without a leader cannot compute runs asynchronously; use prefill and generate, "
                "or start the ranks with mpiexec"
            )
        if not self._verification.is_done:
            await loop.run_in_executor(None, self._verification.wait)
        self._verification.wait()
        done = loop.create_future()
        ticket = self._conductor.ticket(run, partial(loop.call_soon_threadsafe, _settle, done))
        try:
            self._conductor.begin(ticket)
            await done
        except BaseException:
            self._conductor.abandon(ticket)
            raise
        return ticket.result()

    def check_ready(self) -> None:
        """Raise ClosedError if the engine is closed, or ModelError if its files have changed since they were
        written."""
        self.check_open()
        self._verification.wait()

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
                self._conductor.close()
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


def _settle(done: Future[None]) -> None:
    """Complete a future unless its task has been cancelled."""
    if not done.done():
        done.set_result(None)
