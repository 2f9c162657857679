"""The onnxrt backend: subgraphs as standard ONNX on ONNX Runtime's CPU provider.

ONNX Runtime shares no code with chunkrt's implementations, so this backend is the oracle for the other backends.
Weights are passed without a copy; ONNX Runtime makes its own float32 copy of quantised weights. Only the used part of a
cache is passed; the new rows of ONNX Runtime are then written into the cache. A ring is passed with its positions in
order.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from chunkrt.backends.base import Array, Executable, Support
from chunkrt.backends.onnx.lowering import missing_expansion
from chunkrt.engine_directory.store import WeightStore
from chunkrt.errors import BackendError, CompileError
from chunkrt.graph.plan import Plan, Subgraph
from chunkrt.quant.scheme import Scheme


class OnnxRuntimeBackend:
    """Backend that runs any plan on ONNX Runtime's CPU provider."""

    name = "onnxrt"
    concurrency: int | None = None
    cache_dtypes: tuple[str, ...] = ("float32", "float16")

    def supports(self, subgraph: Subgraph, plan: Plan, scheme: Scheme) -> Support:
        """Accept a subgraph if every operator is standard ONNX or has an expansion."""
        for node in subgraph.nodes:
            if node.domain and (reason := missing_expansion(node)):
                return Support(ok=False, node=node.name, reason=reason)
        return Support(ok=True)

    def compile(
        self, subgraph: Subgraph, plan: Plan, chunk_length: int, scheme: Scheme, weights: WeightStore
    ) -> Executable:
        """Create one inference session for the subgraph, for any number of rows.

        Raises:
            PartitionError: see `supports`.
            CompileError: ONNX Runtime refused the model; the exception's cause states the reason.
        """
        self.supports(subgraph, plan, scheme).require(self.name, subgraph)
        return OnnxRuntimeExecutable((subgraph,), plan, scheme, weights)


class OnnxRuntimeExecutable:
    """An inference session over consecutive subgraphs. Over all subgraphs of a plan it runs the unchunked decoder."""

    fixed_length: int | None = None

    def __init__(self, subgraphs: tuple[Subgraph, ...], plan: Plan, scheme: Scheme, weights: WeightStore) -> None:
        import onnx_ir as ir
        import onnxruntime as ort

        from chunkrt.backends.onnx.plan_models import to_onnx
        from chunkrt.backends.onnx.scheme_models import initializer_values, quantize_linears

        name = subgraphs[0].name if len(subgraphs) == 1 else "decoder"
        model = to_onnx(plan, subgraphs, name=name)
        quantize_linears(model, scheme)
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1  # the executor's workers run in parallel, so the session has one thread
        options.log_severity_level = 3
        # On many processors, ONNX Runtime's fused kernels for the QDQ form add pairs of products in saturating 16 bits.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        arrays = initializer_values(plan, scheme, weights, list(model.graph.initializers))
        self._handed = {n: a for n, a in arrays.items() if a.dtype.name != "int4"}  # initializers of NumPy's own dtypes
        for weight_name, value in model.graph.initializers.items():
            array = arrays[weight_name]
            if weight_name not in self._handed:
                value.const_value = ir.tensor(array, name=weight_name)
                continue
            value.const_value = ir.ExternalTensor(
                "weights",
                0,
                array.nbytes,
                ir.DataType.from_numpy(array.dtype),
                shape=ir.Shape(array.shape),
                name=weight_name,
            )
        handed = [ort.OrtValue.ortvalue_from_numpy(array) for array in self._handed.values()]
        options.add_external_initializers(list(self._handed), handed)
        try:
            text = ir.to_proto(model).SerializeToString()
            self._session = ort.InferenceSession(text, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime raises a dozen unrelated types
            raise CompileError(f"ONNX Runtime cannot compile subgraph {name}: {error}") from error
        self._name = name
        self._state = [n for subgraph in subgraphs for n in subgraph.state]
        self._shared = {n for subgraph in subgraphs for n in subgraph.shared_state} - set(self._state)
        self._symbol_of_rows = {n: plan.tensors[n].shape[0] for n in subgraphs[0].inputs}
        self._caches = {n for n in self._state if {"P", "W"} & set(plan.tensors[n].shape)}

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """See `Executable.run`."""
        from chunkrt.backends.onnx.plan_models import PRESENT_SUFFIX

        feeds = dict(inputs)
        start = int(inputs["position"][0]) if self._caches or self._shared else 0
        for name in self._state:
            feeds[name] = self._past(name, inputs[name], start)
        for name in self._shared:
            num_rows = next(len(inputs[n]) for n, rows in self._symbol_of_rows.items() if rows == "T")
            feeds[name] = np.ascontiguousarray(inputs[name][:, : start + num_rows], dtype=np.float32)
        try:
            results = self._session.run([*outputs, *(n + PRESENT_SUFFIX for n in self._state)], feeds)
        except Exception as error:
            raise BackendError(f"ONNX Runtime failed in subgraph {self._name}: {error}") from error
        for buffer, result in zip(outputs.values(), results, strict=False):
            buffer[...] = result
        for name, present in zip(self._state, results[len(outputs) :], strict=True):
            cache = inputs[name]
            if name in self._caches:
                positions = np.arange(max(start, present.shape[1] - cache.shape[1]), present.shape[1])
                cache[:, positions % cache.shape[1]] = present[:, positions]
            else:
                cache[...] = present

    def _past(self, name: str, state: Array, start: int) -> Array:
        """Return the state before row 0. Positions that a ring has lost are zero; no row sees them."""
        if name not in self._caches:
            return np.ascontiguousarray(state, dtype=np.float32)
        num_slots = state.shape[1]
        if start <= num_slots:
            return np.ascontiguousarray(state[:, :start], dtype=np.float32)
        past = np.zeros((state.shape[0], start, state.shape[2]), np.float32)
        kept = np.arange(start - num_slots, start)
        past[:, kept] = state[:, kept % num_slots]
        return past
