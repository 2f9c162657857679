"""Compilation of NPU contexts in several processes.

Qualcomm's compiler uses one core, and calls from several threads of a process wait for each other. So each worker is a
process. Only one process at a time may write into the folder of all contexts, so a worker compiles into a folder of its
own, and then copies the context.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import cached_property
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from tempfile import mkdtemp
from threading import Thread

import psutil

from chunkrt.backends.qnn import QnnBackend, find_soc
from chunkrt.backends.qnn.contexts import ContextFolder
from chunkrt.engine.capability import plan_to_run
from chunkrt.engine.model_options import choose_context_length
from chunkrt.engine.npu_attention import npu_plans
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.peak_memory import peak_memory_bytes
from chunkrt.engine.roles import contexts_folder
from chunkrt.engine_directory.manifest import CONTEXTS, open_weights, read_manifest
from chunkrt.files import own_folder, remove_abandoned
from chunkrt.graph.plan import Plan, Subgraph
from chunkrt.runtime.policy import DEFAULT_POLICY

CONTEXTS_OF_A_WORKER = 8
"""Number of contexts of a small decoder's layers that take as long to compile as a process takes to start."""

MOST_WORKERS = 61
"""Largest number of processes of a pool on Windows."""

WORKER_BYTES, BYTES_PER_WEIGHT = 600 * 2**20, 8
"""Memory of a worker: a constant, and a part for each byte of the largest graph's weights. One graph of SmolLM2-135M's
layers, with 107 MB of weights, takes 1.2 GB."""

WORKERS_FOLDER = ".contexts-"
"""Beginning of the name of a folder in which workers compile."""

log = logging.getLogger(__name__)

Job = tuple[str, int, int, str]
"""A context to compile: its SoC, its chunk length, the reach of its plan, and the name of its subgraph."""


class Contexts:
    """The NPU's contexts of an engine directory, and the backends that compile them.

    Args:
        engine: the directory.
        options: those of the compilation, with the attention of the directory.
        into: folder for compiled contexts; by default that of all models.

    Attributes:
        plan: the plan for the longest histories with attention on the CPU.
        context_length: number of positions.

    Raises:
        ConfigError, PartitionError: see `plan_to_run` and `choose_context_length`.
    """

    def __init__(self, engine: Path, options: EngineOptions, into: Path | None = None) -> None:
        self.engine, self.options = engine, options
        self._into = contexts_folder() if into is None else into
        manifest = read_manifest(engine)
        plan = plan_to_run(engine, manifest, options)
        self.context_length = choose_context_length(plan, options)
        self.plan = plan.within(self.context_length)
        self.weights = open_weights(engine).with_tables(self.plan)
        self.scheme, self._placement = manifest.scheme, manifest.placement
        self._backends: dict[str, QnnBackend] = {}
        self._keys: dict[Job, str] = {}

    @cached_property
    def plans(self) -> dict[int, Plan]:
        """See `npu_plans`, also for the errors."""
        return npu_plans(self.plan, self._placement, self.options, self.context_length)

    def backend(self, soc: str) -> QnnBackend:
        """Return the backend of a SoC."""
        if soc not in self._backends:
            self._backends[soc] = QnnBackend(
                find_soc(soc), contexts=self._into, compiled=self.engine / CONTEXTS, options=self.options.htp
            )
        return self._backends[soc]

    def key(self, job: Job) -> str:
        """Return the key of a context. It is computed once, because it hashes the weights."""
        if job not in self._keys:
            soc, chunk_length, reach, name = job
            graph = self._graph(reach, name)
            self._keys[job] = self.backend(soc).key(*graph, chunk_length, self.scheme, self.weights)
        return self._keys[job]

    def prepare(self, job: Job, key: str | None = None) -> Path:
        """Return the folder of a context, compiling it if necessary. Raises as `QnnBackend.prepare`.

        Args:
            key: the context's key, if another process has computed it.
        """
        soc, chunk_length, reach, name = job
        graph, key = self._graph(reach, name), key or self.key(job)
        return self.backend(soc).prepare(*graph, chunk_length, self.scheme, self.weights, key=key).parent

    def missing(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs whose contexts do not exist, one for each context."""
        found: dict[str, Job] = {}
        for job in jobs:
            if not self.backend(job[0]).has(key := self.key(job)):
                found.setdefault(key, job)
        return list(found.values())

    def most_weight_bytes(self, jobs: Sequence[Job]) -> int:
        """Return the largest size of the weights of a context."""
        names = {graph: self._graph(*graph)[0].weights for graph in {(reach, name) for _, _, reach, name in jobs}}
        sizes = {name: self.plan.tensors[name].num_bytes() // 4 for of_one in names.values() for name in of_one}
        return max(sum(sizes[name] for name in of_one) for of_one in names.values())

    def _graph(self, reach: int, name: str) -> tuple[Subgraph, Plan]:
        plan = self.plans[reach]
        return next(subgraph for subgraph in plan.subgraphs if subgraph.name == name), plan


def compile_in_workers(contexts: Contexts, jobs: Sequence[Job], progress: Callable[[int, int], None]) -> int:
    """Compile missing contexts in several processes, if there are enough for each process, and enough memory.

    Contexts that a worker could not compile remain missing: the caller compiles them, and raises the error. Return the
    largest peak memory of a worker in bytes; 0 if there were none.

    Args:
        progress: function that is called with the number of compiled contexts, and the number of missing ones.
    """
    home = contexts_folder().parent
    remove_abandoned(home, WORKERS_FOLDER)
    missing = contexts.missing(jobs)
    if (workers := _num_workers(contexts, missing)) < 2:
        return 0
    most_bytes, num_done, has_failed = 0, 0, False
    others = set(active_children())
    options = replace(contexts.options, policy=DEFAULT_POLICY)  # an object may not be picklable
    with (
        own_folder(home, WORKERS_FOLDER) as folder,
        ProcessPoolExecutor(workers, get_context("spawn"), _start, (contexts.engine, options, folder)) as pool,
    ):
        try:
            futures = [pool.submit(_compile, job, contexts.key(job)) for job in missing]
            for future in as_completed(futures):
                if isinstance(error := future.exception(), BrokenProcessPool):
                    log.warning("a process that compiles contexts died; the others are compiled one after another")
                    break
                if error is None:
                    num_done, most_bytes = num_done + 1, max(most_bytes, future.result())
                    progress(num_done, len(missing))
                elif not has_failed:
                    has_failed = True
                    log.warning("a context is compiled again, because a process could not compile it: %s", error)
        except BaseException:
            for process in set(active_children()) - others:
                process.terminate()
            pool.shutdown(cancel_futures=True)
            raise
    return most_bytes


def _num_workers(contexts: Contexts, missing: Sequence[Job]) -> int:
    if len(missing) < 2 * CONTEXTS_OF_A_WORKER:
        return 1
    each = WORKER_BYTES + BYTES_PER_WEIGHT * contexts.most_weight_bytes(missing)
    fitting = psutil.virtual_memory().available // 2 // each
    return min(MOST_WORKERS, contexts.options.num_threads, len(missing) // CONTEXTS_OF_A_WORKER, fitting)


_contexts: Contexts
_own: ContextFolder
"""The contexts and the folder of this worker process; set when the process starts."""


def _start(engine: Path, options: EngineOptions, folder: Path) -> None:
    global _contexts, _own
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends the workers
    logging.disable(logging.CRITICAL)  # the parent logs the same
    Thread(target=_end_with_parent, daemon=True).start()
    _own = ContextFolder(Path(mkdtemp(dir=folder)))
    _contexts = Contexts(engine, options, _own.path)


def _end_with_parent() -> None:
    """End this process when the parent was killed."""
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)


def _compile(job: Job, key: str) -> int:
    """Compile a context, and return the peak memory of this process in bytes."""
    made = _contexts.prepare(job, key)
    if made.parent == _own.path:  # another process may have compiled it meanwhile
        ContextFolder(contexts_folder()).copy_from(_own, made.name)
        shutil.rmtree(made, ignore_errors=True)  # a mapped file stays on Windows until the process ends
    return peak_memory_bytes()
