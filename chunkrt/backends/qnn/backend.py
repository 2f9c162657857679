"""The qnn backend, which runs static subgraphs on Qualcomm's Hexagon NPU or on its emulator."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

from chunkrt.backends.base import Executable, Support
from chunkrt.backends.qnn.contexts import FORMAT, ContextFolder
from chunkrt.backends.qnn.executable import Context, ContextSlot, Forms, OpenContext, QnnExecutable, WindowedExecutable
from chunkrt.backends.qnn.htp_options import HtpOptions
from chunkrt.backends.qnn.htp_support import distinct_graphs, graph_rows, npu_support
from chunkrt.backends.qnn.library import PACKAGE, open_htp, open_session
from chunkrt.backends.qnn.session_buffers import (
    SHARED_MEMORY_OPTION,
    Buffer,
    BufferForm,
    ordinary_buffer,
    shared_buffer,
)
from chunkrt.backends.qnn.socs import Soc
from chunkrt.backends.qnn.timed_calls import DEVICE_LIMIT_S, EMULATOR_LIMIT_S
from chunkrt.engine_directory.store import WeightStore
from chunkrt.errors import CompileError, cause_of
from chunkrt.graph.plan import Plan, Subgraph, Tensor
from chunkrt.graph.static_attention import without_sliding
from chunkrt.quant.scheme import Scheme

Result = TypeVar("Result")

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CompiledFor:
    """The targets of an engine directory that was compiled for NPUs.

    Attributes:
        folder: the directory.
        targets: descriptions of its SoCs and chunk lengths.
        libraries: the versions of onnxruntime-qnn that compiled its contexts.
        changes: description of options that differ from those of the compilation; empty if none do.
        recompiles: True if missing contexts are compiled, False if they are an error.
    """

    folder: Path
    targets: Sequence[str]
    libraries: Sequence[str]
    changes: str = ""
    recompiles: bool = False


class QnnBackend:
    """Backend that compiles each static subgraph for an SoC and for one chunk length or several, and stores the results
    on disk.

    Args:
        soc: the SoC to compile for, and to run on or to emulate.
        contexts: a folder for compiled contexts, shared by all models; missing contexts are compiled into it.
        compiled: a folder that is searched first and never written: the contexts of an engine directory.
        origin: the targets of the contexts in `compiled`; None if all contexts may be compiled without notice.
        options: settings of the NPU.
        limit_s: seconds after which a call counts as lost; by default that of devices or of the emulator.
        shorter_lengths: numbers of rows for which each subgraph is compiled in addition to the chunk length, as far as
            they are shorter. A call runs the smallest graph that holds its rows.

    Raises:
        BackendUnavailableError: onnxruntime-qnn is not installed or does not load.
        ConfigError: onnxruntime-qnn does not know one of the options.
    """

    name = "qnn"
    concurrency: int | None = 2
    num_computing = 1
    cache_dtypes: tuple[str, ...] = ()

    def __init__(
        self,
        soc: Soc,
        *,
        contexts: Path,
        compiled: Path | None = None,
        origin: CompiledFor | None = None,
        options: HtpOptions | None = None,
        limit_s: float | None = None,
        shorter_lengths: Collection[int] = (),
    ) -> None:
        self.soc = soc
        self.htp = open_htp()
        self._contexts = ContextFolder(contexts)
        self._compiled = ContextFolder(compiled) if compiled else None
        self._origin = origin
        self._options = options or HtpOptions()
        self._options.check_known()
        self._shorter_lengths = shorter_lengths
        self._limit_s = limit_s or (EMULATOR_LIMIT_S if self.htp.is_emulated else DEVICE_LIMIT_S)
        self.is_emulated = self.htp.is_emulated
        self.shares_memory = not self.htp.is_emulated
        """True if buffers are in memory that CPU and NPU share."""
        self._slots: WeakSet[ContextSlot] = WeakSet()
        self.num_compiled = 0
        """Number of contexts that were compiled because they were not on disk."""

    def supports(self, subgraph: Subgraph, plan: Plan, scheme: Scheme) -> Support:
        """Accept static subgraphs under static schemes."""
        return npu_support(subgraph, plan, scheme)

    def compile(
        self, subgraph: Subgraph, plan: Plan, chunk_length: int, scheme: Scheme, weights: WeightStore
    ) -> Executable:
        """Open the contexts of a subgraph on the NPU, compiling them first if they are not on disk.

        Raises:
            PartitionError: see `supports`.
            CompileError: Qualcomm's compiler failed; a package that compilation needs is not installed; a grid exceeds
                float16.
            DeviceLostError: the NPU refuses the context, or lacks memory for its inputs and outputs.
        """

        def opener(length: int) -> OpenContext:
            wrapper = self.prepare(subgraph, plan, length, scheme, weights)

            def open_context(inputs: Forms, outputs: Forms, num_places: int) -> Context:
                return self._open_context(subgraph.name, wrapper, inputs, outputs, num_places)

            return open_context

        lengths = self.graph_lengths(chunk_length, scheme)
        graphs = {graph_rows(length, scheme): opener(length) for length in lengths}
        executable = (
            WindowedExecutable(subgraph, plan, graphs, weights)
            if subgraph.state
            else QnnExecutable(subgraph, plan, chunk_length, graphs)
        )
        self._slots.update(executable.slots)
        return executable

    def graph_lengths(self, chunk_length: int, scheme: Scheme) -> tuple[int, ...]:
        """See `SeveralGraphsBackend`. Of lengths whose graphs have the same number of rows, the longest counts."""
        lengths = {*self._shorter_lengths, chunk_length}
        return distinct_graphs([length for length in lengths if length <= chunk_length], scheme)

    def restore(self) -> None:
        """Close all contexts, open them again from their files, and run each once. Requires that no call is made in the
        meantime.

        Raises:
            DeviceLostError: the NPU refuses a context, fails or does not respond.
        """
        slots = list(self._slots)
        for slot in slots:
            slot.close()
        for slot in slots:
            slot.reopen()

    def _open_context(self, name: str, wrapper: Path, inputs: Forms, outputs: Forms, num_places: int) -> Context:
        """Open a context with buffers in memory that CPU and NPU share, or in ordinary memory if the emulator computes,
        or if sharing failed once.
        """
        options = self._options.as_provider_options()

        def opened(session_options: Mapping[str, str], allocate: Callable[[Any, BufferForm], Buffer]) -> Context:
            session = self._call(lambda: open_session(self.htp, self.soc, wrapper, options=session_options))
            return Context(
                name,
                session,
                inputs,
                outputs,
                self._call,
                num_places=num_places,
                allocate=lambda form: allocate(session, form),
            )

        def in_ordinary_memory() -> Context:
            return opened(options, lambda session, form: ordinary_buffer(form))

        def in_shared_memory() -> Context:
            context = opened(
                {**options, SHARED_MEMORY_OPTION: "1"},
                lambda session, form: shared_buffer(session, self.htp.device, form),
            )
            context.probe()
            return context

        if not self.shares_memory:
            return in_ordinary_memory()
        try:
            return in_shared_memory()
        except Exception as error:  # ONNX Runtime raises many unrelated types
            refusal = str(error)
        context = in_ordinary_memory()
        context.probe()  # if this fails too, the NPU fails, and not the sharing
        self.shares_memory = False
        log.warning(
            "CPU and NPU share no memory (%s: %s); the driver copies all inputs and outputs of each run", name, refusal
        )
        return context

    def _call(self, function: Callable[[], Result]) -> Result:
        return self.htp.calls.call(function, self._limit_s)

    def prepare(
        self,
        subgraph: Subgraph,
        plan: Plan,
        chunk_length: int,
        scheme: Scheme,
        weights: WeightStore,
        *,
        key: str | None = None,
    ) -> Path:
        """Return the context of a subgraph on disk, compiling it if necessary. Raises as `compile`.

        Args:
            key: the result of `key`, if it was computed before.
        """
        self.supports(subgraph, plan, scheme).require(self.name, subgraph)
        key = key or self.key(subgraph, plan, chunk_length, scheme, weights)
        folders = [folder for folder in (self._compiled, self._contexts) if folder]
        for folder in folders:
            if wrapper := folder.find(key):
                return wrapper
        try:
            if self._compiled and (wrapper := self._compiled.assemble(key, self._contexts)):
                return wrapper
        except OSError as error:
            raise self._unwritable(subgraph, error) from error
        if self._origin and not self.num_compiled and not any(folder.has(key) for folder in folders):
            self._report_mismatch(self._origin, subgraph, chunk_length)
        try:
            from chunkrt.backends.qnn.model import npu_model
        except ImportError as error:
            where = f"{self._compiled.path} contains" if self._compiled else "there is"
            vtcm = f", {self._options.vtcm_mb} MiB of VTCM" if self._options.vtcm_mb else ""
            raise CompileError(
                f"{where} no usable context of {subgraph.name} for {self.soc.name}, chunks of {chunk_length}{vtcm} and "
                f"onnxruntime-qnn {self.htp.version}, and compiling one needs onnx-ir; {self._other_library()}pip "
                "install onnx-ir, or recompile the model"
            ) from error
        model = npu_model(plan, subgraph, chunk_length, scheme, weights)

        def write(wrapper: Path) -> None:
            options = self._options.as_provider_options(compiling=True)
            open_session(self.htp, self.soc, model, options=options, write_context=wrapper)
            self.num_compiled += 1

        try:
            return self._contexts.make(key, write)
        except OSError as error:
            raise self._unwritable(subgraph, error) from error
        except Exception as error:  # an exception of ONNX Runtime
            raise CompileError(f"the NPU's compiler refuses {subgraph.name} for {self.soc.name}: {error}") from error

    def has(self, key: str) -> bool:
        """Return True if a context exists, also as a difference, even if it is damaged."""
        return any(folder.has(key) for folder in (self._compiled, self._contexts) if folder)

    def _unwritable(self, subgraph: Subgraph, error: OSError) -> CompileError:
        return CompileError(
            f"cannot write the context of {subgraph.name} to {self._contexts.path}: {cause_of(error)}; set "
            "CHUNKRT_HOME to move it"
        )

    def _report_mismatch(self, origin: CompiledFor, subgraph: Subgraph, chunk_length: int) -> None:
        """Log that contexts are missing and will be compiled. Raise CompileError if they must not be compiled."""
        changes = f" with {origin.changes}" if origin.changes else ""
        told = (
            f"{origin.folder} was compiled for {'; '.join(origin.targets)} by onnxruntime-qnn "
            f"{', '.join(origin.libraries)}, and lacks the context of {subgraph.name} for {self.soc.name}, chunks of "
            f"{chunk_length} and {self.htp.version}{changes}"
        )
        if not origin.recompiles:
            raise CompileError(
                f"{told}; {self._other_library()}choose a compiled target, or compile here with `recompile=True`"
            )
        log.warning("%s; missing contexts are compiled into %s", told, self._contexts.path)

    def _other_library(self) -> str:
        """Return a remedy if another version of the library compiled the directory's contexts, or an empty string."""
        others = [
            library for library in (self._origin.libraries if self._origin else ()) if library != self.htp.version
        ]
        return f"pip install {PACKAGE}=={others[0]}, which compiled the existing contexts, or " if others else ""

    def key(self, subgraph: Subgraph, plan: Plan, chunk_length: int, scheme: Scheme, weights: WeightStore) -> str:
        """Return the name of a context: a readable prefix, then a hash of all inputs of its compilation.

        Chunk lengths whose graphs have the same number of rows share a context.
        """
        rows = graph_rows(chunk_length, scheme)
        names = {name for node in subgraph.nodes for name in (*node.inputs, *node.outputs) if name}
        compiled_from: dict[str, Any] = {
            "format": FORMAT,
            "library": self.htp.version,
            "target": (self.soc.soc_model, self.soc.htp_arch),
            "vtcm_mb": self._options.vtcm_mb,
            "subgraph": asdict(without_sliding(subgraph)),
            "tensors": {name: _as_compiled(plan.tensors[name]) for name in sorted(names)},
            "rows": rows,
            "linears": {name: _as_stored(name, scheme) for name in subgraph.weights},
        }
        if compiled_in := self._options.compiled_in:
            compiled_from["options"] = compiled_in
        digest = hashlib.sha256(json.dumps(compiled_from, sort_keys=True).encode())
        for name in (name for name in subgraph.weights if not plan.tensors[name].rotary):
            for suffix, array in weights.parts(name):
                digest.update(f"{name}{suffix} {array.dtype} {array.shape}".encode())
                digest.update(array.data)
        return f"{self.soc.name}-{scheme.name}-r{rows}-{subgraph.name}-{digest.hexdigest()[:16]}"


def _as_compiled(tensor: Tensor) -> dict[str, Any]:
    """Return the properties of a tensor that affect a context. The number of rows of a rotary table is omitted, because
    its rows are passed with every chunk.
    """
    return asdict(replace(tensor, shape=tensor.shape[1:]) if tensor.rotary else tensor)


def _as_stored(weight: str, scheme: Scheme) -> tuple[object, ...]:
    """Return a scheme's settings for a weight that may belong to a linear."""
    bits = scheme.weight_bits_of(weight), scheme.activation_bits_of(weight)
    return *bits, scheme.has_column_grids(weight), scheme.has_float_output(weight)
