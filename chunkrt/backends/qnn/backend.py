"""The qnn backend, which runs static subgraphs on Qualcomm's Hexagon NPU or on its emulator."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from chunkrt.backends.base import Executable, Support
from chunkrt.backends.qnn.contexts import FORMAT, ContextFolder
from chunkrt.backends.qnn.executable import QnnExecutable, WindowedExecutable
from chunkrt.backends.qnn.htp_options import HtpOptions
from chunkrt.backends.qnn.htp_support import graph_rows, npu_support
from chunkrt.backends.qnn.library import PACKAGE, open_htp, open_session
from chunkrt.backends.qnn.socs import Soc
from chunkrt.engine_directory.store import WeightStore
from chunkrt.errors import CompileError, DeviceLostError, cause_of
from chunkrt.graph.plan import Plan, Subgraph, Tensor
from chunkrt.quant.scheme import Scheme

log = logging.getLogger(__name__)


class QnnBackend:
    """Backend that compiles each static subgraph once for a chunk length and an SoC, and stores the results on disk.

    Args:
        soc: the SoC to compile for, and to run on or to emulate.
        contexts: a folder for compiled contexts, shared by all models; missing contexts are compiled into it.
        compiled: a folder that is searched first and never written: the contexts of an engine directory.
        compiled_by: the versions of onnxruntime-qnn that compiled the contexts in `compiled`.
        compiled_for: descriptions of the targets of the contexts in `compiled`.
        options: settings of the NPU.

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
        compiled_by: Collection[str] = (),
        compiled_for: Sequence[str] = (),
        options: HtpOptions | None = None,
    ) -> None:
        self.soc = soc
        self.htp = open_htp()
        self._contexts = ContextFolder(contexts)
        self._compiled = ContextFolder(compiled) if compiled else None
        self._compiled_by, self._compiled_for = compiled_by, compiled_for
        self._options = options or HtpOptions()
        self._options.check_known()
        self.num_compiled = 0
        """Number of contexts that were compiled because they were not on disk."""

    def supports(self, subgraph: Subgraph, plan: Plan, scheme: Scheme) -> Support:
        """Accept static subgraphs under static schemes."""
        return npu_support(subgraph, plan, scheme)

    def compile(
        self, subgraph: Subgraph, plan: Plan, chunk_length: int, scheme: Scheme, weights: WeightStore
    ) -> Executable:
        """Open a context on the NPU, compiling it first if it is not on disk.

        Raises:
            PartitionError: see `supports`.
            CompileError: Qualcomm's compiler failed; a package that compilation needs is not installed; a grid exceeds
                float16.
            DeviceLostError: the NPU refuses the context, or lacks memory for its inputs and outputs.
        """
        wrapper = self.prepare(subgraph, plan, chunk_length, scheme, weights)
        try:
            session = open_session(self.htp, self.soc, wrapper, options=self._options.as_provider_options())
            if subgraph.state:
                return WindowedExecutable(subgraph, plan, chunk_length, session, self.htp, weights)
            return QnnExecutable(subgraph, plan, chunk_length, session, self.htp)
        except Exception as error:  # ONNX Runtime raises many unrelated types
            raise DeviceLostError(f"the NPU refuses the context of {subgraph.name}: {error}") from error

    def prepare(self, subgraph: Subgraph, plan: Plan, chunk_length: int, scheme: Scheme, weights: WeightStore) -> Path:
        """Return the context of a subgraph on disk, compiling it if necessary. Raises as `compile`."""
        self.supports(subgraph, plan, scheme).require(self.name, subgraph)
        key = self.key(subgraph, plan, chunk_length, scheme, weights)
        for folder in (f for f in (self._compiled, self._contexts) if f):
            if wrapper := folder.find(key):
                return wrapper
        try:
            from chunkrt.backends.qnn.model import npu_model
        except ImportError as error:
            where = f"{self._compiled.path} contains" if self._compiled else "there is"
            vtcm = f", {self._options.vtcm_mb} MiB of VTCM" if self._options.vtcm_mb else ""
            others = sorted(set(self._compiled_by) - {self.htp.version})
            remedy = f"pip install {PACKAGE}=={others[0]}, which compiled the existing contexts, or " if others else ""
            raise CompileError(
                f"{where} no usable context of {subgraph.name} for {self.soc.name}, chunks of {chunk_length}{vtcm} and "
                f"onnxruntime-qnn {self.htp.version}, and compiling one needs onnx-ir; {remedy}pip install onnx-ir, or "
                "recompile the model"
            ) from error
        model = npu_model(plan, subgraph, chunk_length, scheme, weights)

        if self._compiled_for and not self.num_compiled:
            log.warning(
                "%s was compiled for %s by onnxruntime-qnn %s, and lacks contexts for %s, chunks of %d and %s; missing "
                "contexts are compiled into %s",
                self._compiled.path.parent if self._compiled else "the model",
                "; ".join(self._compiled_for),
                ", ".join(sorted(self._compiled_by)),
                self.soc.name,
                chunk_length,
                self.htp.version,
                self._contexts.path,
            )

        def write(wrapper: Path) -> None:
            options = self._options.as_provider_options(compiling=True)
            open_session(self.htp, self.soc, model, options=options, write_context=wrapper)
            self.num_compiled += 1

        try:
            return self._contexts.make(key, write)
        except OSError as error:
            raise CompileError(
                f"cannot write the context of {subgraph.name} to {self._contexts.path}: {cause_of(error)}; set "
                "CHUNKRT_HOME to move it"
            ) from error
        except Exception as error:  # an exception of ONNX Runtime
            raise CompileError(f"the NPU's compiler refuses {subgraph.name} for {self.soc.name}: {error}") from error

    def key(self, subgraph: Subgraph, plan: Plan, chunk_length: int, scheme: Scheme, weights: WeightStore) -> str:
        """Return the name of a context: a readable prefix, then a hash of all inputs of its compilation.

        Chunk lengths whose graphs have the same number of rows share a context.
        """
        rows = graph_rows(chunk_length)
        names = {name for node in subgraph.nodes for name in (*node.inputs, *node.outputs) if name}
        compiled_from: dict[str, Any] = {
            "format": FORMAT,
            "library": self.htp.version,
            "target": (self.soc.soc_model, self.soc.htp_arch),
            "vtcm_mb": self._options.vtcm_mb,
            "subgraph": asdict(subgraph),
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
