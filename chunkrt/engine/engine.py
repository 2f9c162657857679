"""An engine: a loaded model, and the sessions on it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from chunkrt.backends import Backend
from chunkrt.backends.communicator import Communicator, ranks_of
from chunkrt.backends.dispatch import PLUGINS as OPERATOR_PLUGINS
from chunkrt.backends.dispatch import Dispatcher, default_base, registered_operators
from chunkrt.backends.link import LinkBackend
from chunkrt.backends.switches import Switches
from chunkrt.engine.cache_memory import CacheMemory
from chunkrt.engine.executors import ExecutorBuilder
from chunkrt.engine.lengths import choose_chunk_length, choose_context_length
from chunkrt.engine.many import OneByOne, Runs
from chunkrt.engine.many_prompts import ManyPrompts
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.roles import open_backends
from chunkrt.engine.sampling import PluginSampler, Sampler, SamplingOptions
from chunkrt.engine.session import Session
from chunkrt.engine_directory.manifest import open_weights, read_manifest, read_plan
from chunkrt.engine_directory.verification import Verification
from chunkrt.engine_directory.weights import stored_weights
from chunkrt.errors import ClosedError, ConfigError, ModelError, OutOfMemoryError
from chunkrt.files import Progress, no_progress
from chunkrt.graph.plan import Plan
from chunkrt.quant.scheme import Scheme
from chunkrt.runtime.affinity import find_cpus, running_on
from chunkrt.runtime.batcher import find_batcher
from chunkrt.runtime.conductor import Conductor
from chunkrt.runtime.run import Run, RunResult
from chunkrt.runtime.state import State
from chunkrt.runtime.state_tensors import CacheDtype
from chunkrt.tokenizer import Tokenizer

if TYPE_CHECKING:
    from asyncio import Future

    from chunkrt.engine.ranks.leader import EngineMirror


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """What an engine does and holds.

    sessions: that are open. cache_bytes: reserved for their caches. waiting_sessions: that wait for room in them.
    waiting_runs: prompts and tokens that share chunks now, or wait to. shared_chunks, shared_rows: the chunks that have
    been computed for those that could share them, and the tokens in them; chunk_length: the most that one holds.
    """

    sessions: int
    cache_bytes: int
    waiting_sessions: int
    waiting_runs: int
    shared_chunks: int
    shared_rows: int
    chunk_length: int


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
        self.options = options
        self.manifest = read_manifest(folder)
        if self.manifest.ranks != (ranks := ranks_of(communicator)):
            raise ConfigError(f"{folder} was compiled for {self.manifest.ranks}, not for {ranks}; compile it again")
        self._verification = Verification(folder, self.manifest)
        plan = read_plan(folder)
        self.plan: Plan = plan.with_raw_keys() if options.context_shift else plan
        self.scheme: Scheme = self.manifest.scheme
        self.context_length = choose_context_length(self.plan, options)
        _check_shift(self.context_length, options)
        self.weights = open_weights(folder)
        self.weights.check(
            entry for weight in stored_weights(self.plan, self.scheme).values() for entry in weight.entries
        )
        self.tokenizer: Tokenizer | None = Tokenizer.load(folder)
        self.is_closed = False
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        cpus = find_cpus(options.affinity)
        with running_on(cpus):  # the native pool starts its threads here
            self.npu_backend, self.cpu_backend = open_backends(self.manifest, folder, options)
        self._mirror = mirror
        """Where this is rank 0 of several, the engines of the others."""
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
        self._check_cache()
        self._cache_memory = CacheMemory(options.cache_memory, options.queue)
        self._check_cache_memory()
        sampler = self.dispatcher.sampler()
        assert sampler.function is not None
        self.make_sampler: Callable[[SamplingOptions], Sampler | PluginSampler] = (
            partial(PluginSampler, sampler.function, sampler.origin) if sampler.is_plugin else sampler.function
        )
        executors = ExecutorBuilder(
            plan=self.plan,
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
        self._conductor = Conductor(executors.lanes, find_batcher(options.batcher))

    @property
    def identity(self) -> Mapping[str, object]:
        """What is the same for the engines of all ranks."""
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
            "plug-ins": [str(plugin) for plugin in OPERATOR_PLUGINS.plugins if plugin.load_or_tell() is not None],
            "tokenizer": {name: manifest.files[name] for name in manifest.files if name.endswith(".json")},
        }

    def session(self) -> Session:
        """A new, empty session.

        Raises:
            ClosedError: the engine is closed.
            BusyError: the caches of other sessions take what there is for all (`EngineOptions.cache_memory`).
        """
        self._check_open()
        return Session(self, self._cache_memory.open(self.make_state))

    async def asession(self) -> Session:
        """As `session`, but waits for room in the caches, behind those that came before.

        Raises:
            ClosedError: the engine is closed.
            BusyError: as many wait as may (`EngineOptions.queue`).
        """
        self._check_open()
        return Session(self, await self._cache_memory.await_room(self.make_state))

    def fork_state(self, state: State) -> State:
        """A copy of a state; `Session.fork` calls it. Raises BusyError if there is no room for it in the caches."""
        self._check_open()
        return self._cache_memory.open(state.fork)

    def stats(self) -> EngineStats:
        """What the engine does and holds at this moment."""
        self._check_open()
        conductor, memory = self._conductor, self._cache_memory
        return EngineStats(
            sessions=memory.num_states,
            cache_bytes=memory.num_bytes,
            waiting_sessions=memory.num_waiting,
            waiting_runs=conductor.num_waiting,
            shared_chunks=conductor.num_chunks,
            shared_rows=conductor.num_rows,
            chunk_length=self.chunk_length,
        )

    def _open_waiting(self) -> Session:
        return Session(self, self._cache_memory.wait(self.make_state))

    @property
    def _runs(self) -> Runs:
        return OneByOne(self.run) if self._has_ranks else self._conductor

    def make_state(self) -> State:
        """An empty state. Raises ClosedError if the engine is closed, OutOfMemoryError if there is no room for it."""
        self._check_open()
        make = State if self._mirror is None else self._mirror.make_state
        try:
            return make(self.plan, self.context_length, self.cache_dtype, chunk_length=self.chunk_length)
        except MemoryError as error:
            raise OutOfMemoryError(
                f"there is too little memory for a context of {self.context_length} ({error}); take a shorter one "
                "(--context)"
            ) from error

    @property
    def cache_dtype(self) -> CacheDtype:
        """Of keys and values."""
        return self.options.cache_dtype or default_cache_dtype(self.scheme, self.cpu_backend)

    def run(self, run: Run) -> RunResult:
        """Run tokens through the decoder; sequences call this.

        Runs that are asked for at the same time share chunks (docs/serving.md); of several ranks each waits its turn.
        """
        if not isinstance(run, Run):
            raise ConfigError(f"run is {run!r}, expected a Run; sessions make them")
        self.check_ready()
        if self._mirror is not None:
            return self._mirror.run(self._conductor.run_alone, run)
        return self._conductor.run_alone(run) if self._has_ranks else self._conductor.run(run)

    async def arun(self, run: Run) -> RunResult:
        """As `run`, while the event loop goes on. A task that is cancelled ends the run at the next chunk."""
        import asyncio

        self._check_open()
        loop = asyncio.get_running_loop()
        if self._has_ranks:
            raise ConfigError("ranks take one run at a time; use prefill and generate in a thread beside the loop")
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
        """Raises ClosedError if the engine is closed, ModelError if its files are not what was written."""
        self._check_open()
        self._verification.wait()

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ModelError: the checkpoint came without one.
        """
        if self.tokenizer is None:
            raise ModelError(
                f"{self.manifest.model} has no tokenizer; put its tokenizer.json beside its weights (from Python, give "
                "token ids in place of text)"
            )
        return self.tokenizer

    def close(self) -> None:
        """Release the executables. Waits for a run in progress; sessions cannot be used afterwards.

        Closing twice is allowed, and does nothing in a forked process.
        """
        if os.getpid() != self._process_id:
            return
        with self._lock:
            if not self.is_closed:
                self.is_closed = True
                self._cache_memory.look_again()  # each that is told so goes, and tells the next
                self._conductor.close()
                self._verification.stop()
                if self._mirror is not None:
                    self._mirror.close()

    def __repr__(self) -> str:
        """What is loaded, and how it runs."""
        how = f"scheme {self.scheme.name}, on {self.npu_backend.name}, chunks of {self.chunk_length}"
        return f"Engine({self.manifest.model!r}, {how}, context of {self.context_length}{', closed' * self.is_closed})"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_cache_memory(self) -> None:
        """Raises ConfigError if no session would ever fit."""
        limit = self.options.cache_memory
        if limit is not None and (needed := self.make_state().num_bytes) > limit:
            raise ConfigError(
                f"cache_memory is {limit} bytes, but the caches of one session with a context of {self.context_length} "
                f"take {needed}; let them have more (--cache-memory), or take a shorter context (--context)"
            )

    def _check_cache(self) -> None:
        """Caches of int8 are laid out as the native attention has them. Raises ConfigError if another would run."""
        if self.options.cache_dtype != "int8":
            return
        for subgraph in (s for s in self.plan.subgraphs if s.state):
            for _, runner in self.dispatcher.runners(subgraph, self.cpu_backend.name):
                if runner.operator == "cached_attention" and runner.runs_on != "native":
                    raise ConfigError(
                        f"caches of int8 are the native attention's alone, and {runner.runs_on} runs cached_attention "
                        f"({runner.reason}); choose float32 or float16"
                    )

    def check_process(self) -> None:
        """Raises ClosedError in a process that was forked from the engine's: it has neither its threads nor its NPU."""
        if os.getpid() != self._process_id:
            raise ClosedError(
                "the engine belongs to the process that this one was forked from; load the model here, or start "
                "processes by 'spawn'"
            )

    def _check_open(self) -> None:
        self.check_process()
        if self.is_closed:
            raise ClosedError("the engine is closed; load the model again")


def _settle(done: Future[None]) -> None:
    """A future that a task may have cancelled."""
    if not done.done():
        done.set_result(None)


def default_cache_dtype(scheme: Scheme, backend: Backend) -> CacheDtype:
    """What the backend that attends takes first; float32 under "float"."""
    return "float32" if scheme.weight_bits is None else cast(CacheDtype, backend.cache_dtypes[0])


def _check_shift(context_length: int, options: EngineOptions) -> None:
    if options.context_shift and options.context_keep > context_length - 2:
        raise ConfigError(
            f"context_keep is {options.context_keep}, but of a context of {context_length} two tokens at least have to "
            "move; keep fewer"
        )
