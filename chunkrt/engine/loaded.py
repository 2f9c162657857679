"""A loaded model: the plan, weights, backends, scheduler and admission that the sessions of an engine share."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from chunkrt.backends.base import AttentionMath
from chunkrt.backends.dispatch import PLUGINS as OPERATOR_PLUGINS
from chunkrt.backends.dispatch import Dispatcher, default_base, registered_operators
from chunkrt.backends.fallback import NpuState
from chunkrt.backends.link import Communicator, LinkBackend, ranks_of
from chunkrt.backends.low_rank import LoadedAdapter
from chunkrt.backends.switches import Switches
from chunkrt.engine.adapters import EngineAdapters
from chunkrt.engine.admission import Admission
from chunkrt.engine.arguments import require_path
from chunkrt.engine.capability import plan_to_run
from chunkrt.engine.executors import ExecutorBuilder
from chunkrt.engine.model_options import (
    check_cache,
    check_cache_memory,
    check_shift,
    choose_attention_math,
    choose_chunk_length,
    choose_context_length,
    default_cache_dtype,
)
from chunkrt.engine.npu_attention import as_compiled, attends_on_npu
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.prefix_cache.opening import open_cache
from chunkrt.engine.roles import open_backends, runs_on_qnn
from chunkrt.engine.sampling import PluginSampler, Sampler, SamplingOptions
from chunkrt.engine.session_file import Conversation, SessionFile, model_digest
from chunkrt.engine_directory.adapter_targets import FILE as TARGETS
from chunkrt.engine_directory.adapter_targets import read_folding, read_targets
from chunkrt.engine_directory.manifest import PLAN, open_weights, read_manifest
from chunkrt.engine_directory.store import INPUT_STEP_SUFFIX
from chunkrt.engine_directory.verification import Verification
from chunkrt.engine_directory.weights import stored_weights
from chunkrt.errors import ClosedError, ConfigError, ModelError, OutOfMemoryError
from chunkrt.files import Progress, no_progress
from chunkrt.graph.plan import Plan, linear_weights
from chunkrt.quant.scheme import Scheme
from chunkrt.runtime.affinity import find_cpus, running_on
from chunkrt.runtime.batcher import find_batcher
from chunkrt.runtime.request import Request
from chunkrt.runtime.scheduler import CLOSED, Scheduler
from chunkrt.runtime.state import State
from chunkrt.runtime.state_tensors import CacheDtype, SpareTensors
from chunkrt.runtime.stream import take_part
from chunkrt.tokenizer import Tokenizer

if TYPE_CHECKING:
    from chunkrt.engine.ranks.leader import EngineMirror


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Current activity and memory of an engine.

    Attributes:
        sessions: number of open sessions.
        cache_bytes: bytes reserved for the caches of sessions.
        waiting_sessions: number of requests that wait for places for their sessions.
        prefix_bytes: bytes of the prefix cache in memory.
        cached_tokens: number of tokens that the prefix cache has supplied to sessions so far.
        waiting_runs: number of prompts and single tokens that share chunks, or wait for a shared chunk.
        shared_chunks: number of computed chunks that several runs could share.
        shared_rows: number of tokens in these shared chunks.
        chunk_length: maximum number of tokens of a chunk.
        longest_task_s: seconds since the oldest task in progress began; a large value indicates a device that does not
            respond.
        npu: state of the NPU; None without an NPU.
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
    npu: NpuState | None


class LoadedModel:
    """Everything that the sessions of an engine share. `Engine` is the interface for users; this class is the one for
    sessions, the server, the commands and the followers of several ranks.
    """

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
            targets = read_targets(folder) if options.adapters else None
            self.adapters = EngineAdapters(folder, targets, read_folding(folder), mirror)
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
            self._lock = threading.RLock()  # a signal handler may close the engine while its thread closes it
            self.dispatcher = Dispatcher(
                self.plan,
                self.scheme,
                registered_operators(),
                Switches.parse(options.ops),
                default=default_base(options.npu),
            )
            self.attention_math: AttentionMath = choose_attention_math(
                options,
                self.plan,
                self.scheme,
                self.dispatcher,
                is_on_npu=runs_on_qnn(options) and attends_on_npu(self.plan, self.manifest.placement, options),
                has_ranks=communicator is not None,
            )
            cpus = find_cpus(options.affinity)
            with running_on(cpus):  # this starts the threads of the native pool
                self.npu_backend, self.cpu_backend = open_backends(self.manifest, folder, options, self.attention_math)
            self._mirror = mirror
            """The engines of the other ranks, if this is rank 0 of several."""
            self.chunk_length = choose_chunk_length(
                options,
                self.context_length,
                has_npu=self.npu_backend is not self.cpu_backend,
                manifest=self.manifest,
            )
            check_cache(options, self.plan, self.dispatcher, self.cpu_backend, self.attention_math)
            self._spare = SpareTensors()
            state_bytes = 0
            if options.cache_memory is not None:
                state_bytes = self._make_state(State).num_bytes
                check_cache_memory(options.cache_memory, state_bytes, self.context_length)
            self.admission = Admission(options.cache_memory, state_bytes, options.queue)
            sampler = self.dispatcher.sampler()
            assert sampler.form is not None
            make = sampler.form.function
            self.make_sampler: Callable[[SamplingOptions], Sampler | PluginSampler] = (
                partial(PluginSampler, make, sampler.origin) if sampler.is_plugin else make
            )
            executors, self.npu_backend, self._npu_health = ExecutorBuilder(
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
            self._has_ranks = communicator is not None
            self.scheduler = Scheduler(
                executors,
                find_batcher(options.batcher),
                on_all_ranks=None if mirror is None else mirror.compute,
                takes_turns=communicator is not None and mirror is None,
            )
            self.prefix_cache = open_cache(self, has_ranks=self._has_ranks, npu_health=self._npu_health)

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
            "attention": self.attention_math,
            "grids": self._grids_digest(),
            "executors": self.scheduler.executors.identity,
            "plug-ins": [str(plugin) for plugin in OPERATOR_PLUGINS.plugins if plugin.load_or_tell() is not None],
            "tokenizer": {
                name: manifest.files[name]
                for name in manifest.files
                if name.endswith(".json") and name not in (PLAN, TARGETS)  # these differ on each rank
            },
        }

    def _grids_digest(self) -> str:
        """Return a digest of the grids of the linears' inputs, which are the same on all ranks; empty without grids."""
        if not self.scheme.is_static:
            return ""
        steps = [self.weights.array(name + INPUT_STEP_SUFFIX) for name in sorted(linear_weights(self.plan))]
        return hashlib.sha256(np.concatenate(steps).tobytes()).hexdigest()

    def make_state(self) -> State:
        """Return an empty state. Raise ClosedError if the engine is closed, OutOfMemoryError if the memory is not
        sufficient.
        """
        self.check_open()
        return self._make_state(State if self._mirror is None else self._mirror.make_state)

    def _make_state(self, make: Callable[..., State]) -> State:
        try:
            return make(
                self.plan, self.context_length, self.cache_dtype, chunk_length=self.chunk_length, spare=self._spare
            )
        except MemoryError as error:
            raise OutOfMemoryError(
                f"there is too little memory for a context of {self.context_length} ({error}); choose a shorter one "
                "(`context_length`)"
            ) from error

    def read_adapter(self, path: Path, name: str, scale: float, digest: str) -> LoadedAdapter:
        """Return an adapter that rank 0 has loaded. Raise ModelError if the files of this rank differ from those of
        rank 0; the other errors are those of `Engine.load_adapter`.
        """
        adapter = self.adapters.read(path, name, scale)
        if adapter.digest != digest:
            raise ModelError(f"the adapter {path} differs from that of rank 0; put the same files on every machine")
        return adapter

    @property
    def cache_dtype(self) -> CacheDtype:
        """Data type of keys and values."""
        return self.options.cache_dtype or default_cache_dtype(
            self.options, self.scheme, self.cpu_backend, self.attention_math
        )

    def fork_state(self, state: State) -> State:
        """Copy a state for `Session.fork`. Raise BusyError if no place is free."""
        self.check_open()
        return self.admission.fork(state)

    def session_file(
        self, path: str | os.PathLike[str], state: State, conversation: Conversation | None = None
    ) -> SessionFile:
        """Return a file for reading or writing a session. Raise ConfigError if the engine is one of several ranks.

        Args:
            state: the state of the session, which has an adapter or none.
        """
        if self._has_ranks:
            raise ConfigError(
                "each rank holds only a share of a session, so it cannot be saved or loaded; load without ranks"
            )
        return SessionFile(
            require_path("path", path),
            model=model_digest(self.manifest, self.scheme, self.attention_math, state.adapter),
            vocab_size=self.plan.vocab_size,
            context_length=self.context_length,
            context_keep=self.options.context_keep,
            conversation=conversation,
        )

    def stats(self) -> EngineStats:
        """Return the engine's current activity and memory."""
        self.check_open()
        scheduler, admission = self.scheduler, self.admission
        return EngineStats(
            sessions=admission.num_states,
            cache_bytes=admission.num_bytes,
            waiting_sessions=admission.num_waiting,
            prefix_bytes=0 if self.prefix_cache is None else self.prefix_cache.num_bytes,
            cached_tokens=0 if self.prefix_cache is None else self.prefix_cache.num_cached,
            waiting_runs=scheduler.num_waiting,
            shared_chunks=scheduler.num_chunks,
            shared_rows=scheduler.num_rows,
            chunk_length=self.chunk_length,
            longest_task_s=scheduler.executors.longest_task_s(),
            npu=None if self._npu_health is None else self._npu_health.state,
        )

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
                self.admission.close()
                self.scheduler.close()
                self._spare.close()
                if self.prefix_cache is not None:
                    self.prefix_cache.close()
                self._verification.stop()
                if self._npu_health is not None:
                    self._npu_health.close()
                if self._mirror is not None:
                    self._mirror.close()

    def check_open(self) -> None:
        """Raise ClosedError if the engine is closed, or see `check_process`."""
        self.check_process()
        if self.is_closed:
            raise ClosedError(CLOSED)

    def check_process(self) -> None:
        """Raise ClosedError in a forked process, where neither the engine's threads nor its NPU exist."""
        if os.getpid() != self._process_id:
            raise ClosedError(
                "the engine belongs to the process that this one was forked from; load the model here, or start "
                "processes with 'spawn'"
            )
