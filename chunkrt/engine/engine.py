"""The face of the package: `load` a model, get an `Engine`, open sessions on it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from chunkrt.backends import Backend
from chunkrt.backends.communicator import Communicator, ranks_of
from chunkrt.backends.dispatch import PLUGINS as OPERATOR_PLUGINS
from chunkrt.backends.dispatch import Dispatcher, check_switches, default_base, registered_operators
from chunkrt.backends.link import LinkBackend
from chunkrt.backends.switches import Switches
from chunkrt.engine.executors import ExecutorBuilder
from chunkrt.engine.lengths import choose_chunk_length, choose_context_length
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.resolve import engine_folder
from chunkrt.engine.roles import check_runs, open_backends
from chunkrt.engine.sampling import PluginSampler, Sampler, SamplingOptions
from chunkrt.engine.session import Session
from chunkrt.engine_directory.manifest import open_weights, read_manifest, read_plan
from chunkrt.engine_directory.verification import Verification
from chunkrt.engine_directory.weights import stored_weights
from chunkrt.errors import (
    ClosedError,
    ConfigError,
    ModelError,
    OutOfMemoryError,
    unknown_name,
)
from chunkrt.files import Progress
from chunkrt.graph.plan import Plan
from chunkrt.quant.scheme import Scheme
from chunkrt.runtime.affinity import available_cpus, find_cpus, running_on
from chunkrt.runtime.ranks.launch import connect
from chunkrt.runtime.run import Run, RunResult
from chunkrt.runtime.state import State
from chunkrt.runtime.state_tensors import CacheDtype
from chunkrt.tokenizer import Tokenizer

if TYPE_CHECKING:
    from chunkrt.engine.ranks.leader import EngineMirror
    from chunkrt.runtime.ranks.mpi import MpiCommunicator


def load(
    model: str | Path,
    *,
    progress: Progress | None = None,
    communicator: Communicator | None = None,
    **options: object,
) -> Engine:
    """Load a model, compiling it first if that was not done before.

    Where mpiexec launched several of this process, they share the model (docs/parallel.md). Rank 0 goes on with an
    engine; in all others this does not return, but does as rank 0 does until that ends, and raises SystemExit.

    Args:
        model: a catalogue name, a GGUF file, a Hugging Face folder, or an engine directory.
        progress: told about downloads, calibration and compilation.
        communicator: reaches the other ranks, if this process is one of several that share the model; see
            `chunkrt/runtime/ranks/`. All of them load it, with the same chunk length, and make the same runs. By
            default what mpiexec launched together.
        options: the fields of `EngineOptions`.

    Raises:
        ConfigError: an unknown option or model name, a value out of range, or CPUs that are not to be had.
        ModelError: the checkpoint is missing, damaged or unsupported.
        BackendError: a backend is not available or cannot compile the model.
        PartitionError: a backend does not run what was placed on it.
        DeviceLostError: another rank has ended.
        OutOfMemoryError: there is too little memory.
    """
    try:
        return _load(model, progress or _ignore, communicator, options)
    except MemoryError as error:
        if isinstance(error, OutOfMemoryError):
            raise
        raise OutOfMemoryError(
            f"there is too little memory to load {model} ({error or 'no more can be had'}); close other programs, or "
            "choose a smaller model or a shorter context"
        ) from error


def _load(
    model: str | Path, tell: Progress, communicator: Communicator | None, options: Mapping[str, object]
) -> Engine:
    """As `load`."""
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(f"model is {model!r}, expected a name or a path")
    known = EngineOptions.__dataclass_fields__
    for name in options:
        if name not in known:
            raise unknown_name("option", name, known)
    chosen = EngineOptions(**options)  # type: ignore[arg-type]
    find_cpus(chosen.affinity)  # what is wrong with them is told before a model is compiled
    check_switches(Switches.parse(chosen.ops), registered_operators())
    if communicator is None and (launch := connect([str(model), repr(chosen)])) is not None:
        if launch.rank > 0:
            sys.exit(follow(launch))
        from chunkrt.engine.ranks.leader import leader

        mirror = leader(launch).open(str(model), chosen)
        engine = _load_part(str(model), chosen, launch, tell, mirror)
        mirror.check(engine.identity)
        return engine
    folder = engine_folder(str(model), chosen, tell, ranks_of(communicator), check=check_runs)
    return Engine(folder, chosen, progress=tell, communicator=communicator)


def _ignore(what: str, done: int, total: int) -> None:
    """Nobody wants to know."""


def follow(launch: MpiCommunicator) -> int:
    """Do as rank 0 does until it ends; for all other ranks that mpiexec launched. Returns the exit status."""
    from chunkrt.engine.ranks.follower import Follower

    return Follower(launch, _load_part).serve()


def _load_part(
    model: str,
    options: EngineOptions,
    launch: MpiCommunicator,
    progress: Progress = _ignore,
    mirror: EngineMirror | None = None,
) -> Engine:
    """Load this rank's part of a model; the ranks of a machine share its processor."""
    folder = engine_folder(model, options, progress, ranks_of(launch), check=check_runs)
    if options.threads is None:
        options = replace(options, threads=launch.share_of(find_cpus(options.affinity) or available_cpus()))
    return Engine(folder, options, progress=progress, communicator=launch, mirror=mirror)


class Engine:
    """A loaded model: its plan, weights and executables. Any number of sessions may be opened on it."""

    def __init__(
        self,
        folder: Path,
        options: EngineOptions,
        *,
        progress: Progress = _ignore,
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
        self._executor, self._decoder = executors.prompts, executors.tokens

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
            "caches": self._cache_dtype,
            "plug-ins": [str(plugin) for plugin in OPERATOR_PLUGINS.plugins if plugin.load_or_tell() is not None],
            "tokenizer": {name: manifest.files[name] for name in manifest.files if name.endswith(".json")},
        }

    def session(self) -> Session:
        """A new, empty session.

        Raises:
            ClosedError: the engine is closed.
        """
        return Session(self, self.make_state())

    def make_state(self) -> State:
        """An empty state. Raises ClosedError if the engine is closed, OutOfMemoryError if there is no room for it."""
        self._check_open()
        make = State if self._mirror is None else self._mirror.make_state
        try:
            return make(self.plan, self.context_length, self._cache_dtype, chunk_length=self.chunk_length)
        except MemoryError as error:
            raise OutOfMemoryError(
                f"there is too little memory for a context of {self.context_length} ({error}); take a shorter one "
                "(--context)"
            ) from error

    @property
    def _cache_dtype(self) -> CacheDtype:
        return self.options.cache_dtype or default_cache_dtype(self.scheme, self.cpu_backend)

    def run(self, run: Run) -> RunResult:
        """Run tokens through the decoder; sequences call this. One run at a time, others wait their turn."""
        if not isinstance(run, Run):
            raise ConfigError(f"run is {run!r}, expected a Run; sessions make them")
        self.check_process()
        self._verification.wait()
        with self._lock:
            self._check_open()
            executor = self._decoder if run.token_ids.size == 1 else self._executor
            return executor.run(run) if self._mirror is None else self._mirror.run(executor.run, run)

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
                del self._executor, self._decoder
                self._verification.stop()
                if self._mirror is not None:
                    self._mirror.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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


def default_cache_dtype(scheme: Scheme, backend: Backend) -> CacheDtype:
    """What the backend that attends takes first; float32 under "float"."""
    return "float32" if scheme.weight_bits is None else cast(CacheDtype, backend.cache_dtypes[0])


def _check_shift(context_length: int, options: EngineOptions) -> None:
    if options.context_shift and options.context_keep > context_length - 2:
        raise ConfigError(
            f"context_keep is {options.context_keep}, but of a context of {context_length} two tokens at least have to "
            "move; keep fewer"
        )
