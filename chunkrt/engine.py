"""The face of the package: `load` a model, get an `Engine`, open sessions on it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from chunkrt import catalogue
from chunkrt.backends import BACKENDS, Backend, Executable, make_backend
from chunkrt.engine_directory import cached_folder, is_engine_directory, open_weights, read_manifest, read_plan
from chunkrt.errors import BackendUnavailableError, ClosedError, ConfigError, ModelError, PartitionError, unknown_name
from chunkrt.graph.placement import ALL_ON_CPU, Placement, read_placement
from chunkrt.graph.plan import Plan, Subgraph
from chunkrt.quant.scheme import Scheme, find_scheme
from chunkrt.quant.weights import stored_entries
from chunkrt.runtime.executor import Executor, RunResult
from chunkrt.runtime.policy import find_policy
from chunkrt.runtime.schedule import Processor
from chunkrt.runtime.state import CacheDtype, State
from chunkrt.session import Session
from chunkrt.tokenizer import Tokenizer

NPU_CHOICES = ("auto", "qnn", *BACKENDS, "off")
DEFAULT_CHUNK_LENGTH = 32
MOST_THREADS = 256
DEFAULT_SCHEME = "w8a8-dynamic"
DEFAULT_POLICY = "in_order"
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine runs a model.

    npu: who plays the NPU: "auto" (an NPU if there is one, else "native"), "native", "onnxrt", "reference", "qnn", or
        "off": the whole decoder is one subgraph on the CPU.
    chunk_length: tokens of a chunk, 1 to the context length.
    scheme: how linears are quantised; by default what an engine directory was compiled with, else the catalogue's,
        else "w8a8-dynamic".
    policy: the order of tasks: "in_order" or "sequential".
    threads: the budget for workers and kernel threads together; by default the processor's cores.
    context_length: positions a session can hold; by default the model's.
    cache_dtype: of keys and values; by default float16 on the native backend, float32 elsewhere.
    placement: a TOML file that places modules; see `graph/placement.py`.
    """

    npu: str = "auto"
    chunk_length: int = DEFAULT_CHUNK_LENGTH
    scheme: str | None = None
    policy: str = DEFAULT_POLICY
    threads: int | None = None
    context_length: int | None = None
    cache_dtype: CacheDtype | None = None
    placement: Path | None = None

    def __post_init__(self) -> None:
        if self.npu not in NPU_CHOICES:
            raise unknown_name("NPU choice", self.npu, NPU_CHOICES)
        if self.npu == "qnn":
            raise BackendUnavailableError("this version of chunkrt has no qnn backend yet; use --npu auto")
        if self.npu == "off" and self.placement is not None:
            raise ConfigError("a placement and npu 'off' contradict each other; give one of them")
        for name in ("chunk_length", "threads", "context_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}, expected at least 1")
        if self.threads is not None and self.threads > MOST_THREADS:
            raise ConfigError(f"threads is {self.threads}, expected at most {MOST_THREADS}")
        find_policy(self.policy)
        if self.scheme is not None:
            find_scheme(self.scheme)

    @property
    def num_threads(self) -> int:
        """The thread budget."""
        return self.threads or available_cores()


Progress = Callable[[str, int, int], None]
"""Told (what is being done, how much is done, how much there is)."""


def load(model: str | Path, *, progress: Progress | None = None, **options: object) -> Engine:
    """Load a model, compiling it first if that was not done before.

    Args:
        model: a catalogue name, a GGUF file, a Hugging Face folder, or an engine directory.
        progress: told about downloads and compilation.
        options: the fields of `EngineOptions`.

    Raises:
        ConfigError: an unknown option or model name, or a value out of range.
        ModelError: the checkpoint is missing, damaged or unsupported.
        BackendError: a backend is not available or cannot compile the model.
    """
    known = EngineOptions.__dataclass_fields__
    for name in options:
        if name not in known:
            raise unknown_name("option", name, known)
    chosen = EngineOptions(**options)  # type: ignore[arg-type]
    folder = engine_folder(str(model), chosen, progress or (lambda what, done, total: None))
    return Engine(folder, chosen)


def engine_folder(model: str, options: EngineOptions, progress: Progress) -> Path:
    """The engine directory of a model: itself, or compiled into the cache, pulled before that if need be.

    Raises:
        ConfigError, ModelError: as `load`.
    """
    path = Path(model)
    if is_engine_directory(path):
        check_compiled(path, options)
        return path
    checkpoint, default_scheme = find_checkpoint(model, progress)
    scheme = find_scheme(options.scheme or default_scheme)
    placement = options_placement(options)
    folder = cached_folder(catalogue.home() / "engines", checkpoint, scheme=scheme.name, placement=placement)
    if not is_engine_directory(folder):
        from chunkrt.compiler import compile_checkpoint

        compile_checkpoint(
            checkpoint,
            scheme,
            placement,
            folder,
            model=model,
            progress=lambda done, total: progress("compiling", done, total),
        )
    return folder


def check_compiled(folder: Path, options: EngineOptions) -> None:
    """Refuse options that a compiled model cannot follow any more.

    Raises:
        ConfigError: another scheme, a placement, or npu "off".
        ModelError: the folder is not an engine directory of this format.
    """
    manifest = read_manifest(folder)
    if options.scheme not in (None, manifest.scheme):
        raise ConfigError(f"{folder} was compiled under {manifest.scheme!r}, not {options.scheme!r}; compile it again")
    if options.placement is not None or options.npu == "off":
        raise ConfigError(f"{folder} is compiled, its placement is fixed; give the checkpoint to place it anew")


def find_checkpoint(model: str, progress: Progress) -> tuple[Path, str]:
    """A model's checkpoint on disk and its default scheme; a catalogue entry is pulled if it is not there.

    Raises:
        ConfigError: neither a file nor a name of the catalogue.
    """
    if Path(model).exists():
        return Path(model), DEFAULT_SCHEME
    if Path(model).name != model or model.endswith(".gguf"):
        raise ModelError(f"there is no file or folder {model}")
    entry = catalogue.find(model)
    path = catalogue.pull(entry, lambda done, total: progress(f"downloading {model}", done, total))
    return path, entry.scheme


class Engine:
    """A loaded model: its plan, weights and executables. Any number of sessions may be opened on it."""

    def __init__(self, folder: Path, options: EngineOptions) -> None:
        self.folder = folder
        self.options = options
        self.manifest = read_manifest(folder)
        self.plan: Plan = read_plan(folder)
        self.scheme: Scheme = find_scheme(self.manifest.scheme)
        self.context_length = _context_length(self.plan, options)
        self.chunk_length = _chunk_length(self.context_length, options)
        self.weights = open_weights(folder)
        self.weights.check(entry for parts in stored_entries(self.plan, self.scheme).values() for entry in parts)
        self.tokenizer: Tokenizer | None = Tokenizer.load(folder)
        self.is_closed = False
        self._lock = threading.Lock()
        name = "native" if options.npu in ("auto", "off") else options.npu
        self.npu_backend = self.cpu_backend = make_backend(name, threads=options.num_threads)
        self._executor = self._build()

    def session(self) -> Session:
        """A new, empty session.

        Raises:
            ClosedError: the engine is closed.
        """
        self._check_open()
        dtype = self.options.cache_dtype or default_cache_dtype(self.scheme, self.cpu_backend)
        return Session(self, State(self.plan, self.context_length, dtype))

    def run(
        self,
        token_ids: NDArray[np.int64],
        state: State,
        *,
        logits: Literal["last", "all", "none"],
        cancel: threading.Event | None = None,
    ) -> RunResult:
        """Run tokens through the decoder; sessions call this. One run at a time, others wait their turn."""
        with self._lock:
            self._check_open()
            return self._executor.run(token_ids, state, logits=logits, cancel=cancel)

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ModelError: the checkpoint came without one.
        """
        if self.tokenizer is None:
            raise ModelError(f"{self.manifest.model} has no tokenizer; give token ids in place of text")
        return self.tokenizer

    def close(self) -> None:
        """Release the executables. Waits for a run in progress; sessions cannot be used afterwards.

        Closing twice is allowed.
        """
        with self._lock:
            if not self.is_closed:
                self.is_closed = True
                del self._executor

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self) -> Executor:
        backends = {"npu": self.npu_backend, "cpu": self.cpu_backend}
        executables = {s.name: self._compile(s, backends[s.device]) for s in self.plan.subgraphs}
        processors = make_processors(self.npu_backend, self.options.num_threads)
        return Executor(
            self.plan,
            executables,
            chunk_length=self.chunk_length,
            processors=processors,
            policy=find_policy(self.options.policy),
            chunks_in_flight=1 + sum(p.workers for p in processors),
        )

    def _compile(self, subgraph: Subgraph, backend: Backend) -> Executable:
        if not (support := backend.supports(subgraph, self.plan, self.scheme)):
            raise PartitionError(
                f"{backend.name} cannot run subgraph {subgraph.name} under scheme {self.scheme.name}"
                f"{f' (node {support.node})' if support.node else ''}: {support.reason}"
            )
        return backend.compile(subgraph, self.plan, self.chunk_length, self.scheme, self.weights)

    def _check_open(self) -> None:
        if self.is_closed:
            raise ClosedError("the engine is closed; load the model again")


def default_cache_dtype(scheme: Scheme, backend: Backend) -> CacheDtype:
    """float16 where the native kernels round keys as they append them; float32 under "float" and elsewhere.

    A backend that attends to a chunk's own keys before they are rounded would depend on the chunk length.
    """
    return "float16" if scheme.weight_bits is not None and backend.name == "native" else "float32"


def make_processors(npu_backend: Backend, threads: int) -> tuple[Processor, ...]:
    """Who runs tasks: an NPU beside the CPU's threads, or, without one, the CPU's threads for both roles."""
    if npu_backend.concurrency is None:
        return (Processor(name="cpu", devices=frozenset(("npu", "cpu")), workers=threads),)
    return (
        Processor(name="npu", devices=frozenset(("npu",)), workers=npu_backend.concurrency),
        Processor(name="cpu", devices=frozenset(("cpu",)), workers=threads),
    )


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def options_placement(options: EngineOptions) -> Placement:
    """Where the options place modules. Raises ConfigError if the placement file is wrong."""
    if options.npu == "off":
        return ALL_ON_CPU
    return read_placement(options.placement) if options.placement else {}


def _context_length(plan: Plan, options: EngineOptions) -> int:
    wanted = options.context_length or plan.context_length
    if wanted > plan.context_length:
        raise ConfigError(f"context_length is {wanted}, but the model takes at most {plan.context_length}")
    return wanted


def _chunk_length(context_length: int, options: EngineOptions) -> int:
    if options.chunk_length > context_length:
        raise ConfigError(
            f"chunk_length is {options.chunk_length}, longer than the context of {context_length}; choose a shorter one"
        )
    return options.chunk_length
