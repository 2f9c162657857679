"""Composition of a decoder's small operators into attention, norms and GELU: the first step of an import.

The result has the operators of ONNX Runtime GenAI's builder: GroupQueryAttention, SimplifiedLayerNormalization,
FastGelu, and MatMul with weights from DequantizeLinear. It runs on ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from chunkrt.errors import UnsupportedModelError
from chunkrt.onnx.importing.decomposed.attention_regions import AttentionFinder, DecomposedAttention
from chunkrt.onnx.importing.decomposed.norm_regions import Norm, find_gelus, find_norms
from chunkrt.onnx.importing.decomposed.rotary_regions import Rotation
from chunkrt.onnx.importing.evaluation import Evaluator
from chunkrt.onnx.importing.reading import replaced
from chunkrt.onnx.importing.regions import Regions
from chunkrt.onnx.importing.signature import Signature

CONTRIB = "com.microsoft"


def is_written_out(proto: onnx.ModelProto) -> bool:
    """Return whether a decoder contains attention or norms that are written as small operators."""
    return any(node.op_type in ("Softmax", "ReduceMean") for node in proto.graph.node)


def compose(evaluator: Evaluator, path: Path) -> onnx.ModelProto:
    """Return an equivalent decoder, with a single operator in place of each group of small operators.

    Ensures: inputs, outputs and initializers that are still read keep their names; the batch is 1. The result takes any
    number of tokens and has states, even if the decoder is a fixed window, or has none.

    Raises:
        UnsupportedModelError: a Softmax is not part of causal attention over past and present keys, or a fixed window
            returns other states than those of its last tokens.
        ModelError: ONNX Runtime cannot run a part of it.
    """
    proto, signature = evaluator.proto, evaluator.signature
    regions = Regions(evaluator)
    norms = find_norms(regions)
    finder = AttentionFinder(regions, norms, set(signature.states), path.name)
    softmaxes = [n.output[0] for n in proto.graph.node if n.op_type == "Softmax" and n.output[0] in regions.data]
    writer = _Writer(signature, regions)
    for softmax in softmaxes:
        writer.attention(finder.find(softmax))
    for norm in norms.values():
        writer.norm(norm)
    for source, result in find_gelus(regions):
        writer.node("FastGelu", [source], [result], domain=CONTRIB)
    writer.constants(regions.fixed)
    return writer.replaced(proto, path)


class _Writer:
    """Replacements for nodes, which write values under the same names."""

    def __init__(self, signature: Signature, regions: Regions) -> None:
        self._signature, self._regions = signature, regions
        self._states: list[tuple[onnx.ValueInfoProto, onnx.ValueInfoProto]] = []
        """States that the decoder lacks: their inputs and outputs."""
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._tables: dict[int, tuple[str, str]] = {}
        self._lengths: tuple[str, str] | None = None

    def node(self, op: str, inputs: list[str], outputs: list[str], *, domain: str = "", **attributes: Any) -> str:
        """Add a node, and return its first output."""
        name = f"composed/{op}_{len(self._nodes)}"
        outputs = outputs or [f"{name}/output"]
        self._nodes.append(helper.make_node(op, inputs, outputs, name=name, domain=domain, **attributes))
        return outputs[0]

    def norm(self, norm: Norm) -> None:
        """Add a norm of rows. Norms of heads are added with attention."""
        regions = self._regions
        if len(regions.shape(norm.result)) == 3:
            weight = norm.weight
            if len(regions.evaluator.constant(weight).shape) != 1:
                weight = self.node("Reshape", [weight, self._constant(np.array([-1]))], [])
            self._norm(norm.source, weight, norm.epsilon, [norm.result])

    def attention(self, found: DecomposedAttention) -> None:
        """Add the attention of one layer."""
        core, heads, kv_heads = found.core, found.num_heads, found.num_kv_heads
        query = self._normalised(found.query, found.query_norm, heads * found.head_dim, found.head_dim)
        key = self._normalised(found.key, found.key_norm, kv_heads * found.head_dim, found.head_dim)
        past, present = self._states_of(found)
        self.node(
            "GroupQueryAttention",
            [query, key, found.value, *past, *self._of_lengths(past[0]), *self._names(found.tables)],
            [core.result, *present],
            domain=CONTRIB,
            num_heads=heads,
            kv_num_heads=kv_heads,
            scale=core.scale,
            local_window_size=core.window or -1,
            do_rotary=1,
        )

    def constants(self, values: Mapping[str, np.ndarray]) -> None:
        """Add computed values to the model as constants."""
        self._initializers |= {name: numpy_helper.from_array(value, name) for name, value in values.items()}

    def replaced(self, proto: onnx.ModelProto, path: Path) -> onnx.ModelProto:
        """Return the model with the replacements."""
        free = onnx.ModelProto()
        free.CopyFrom(proto)
        free.graph.input.extend(past for past, _ in self._states)
        free.graph.output.extend(present for _, present in self._states)
        if self._regions.lengths.window is not None:
            self._free_lengths(free.graph)
        result = replaced(free, self._nodes, list(self._initializers.values()), path)
        if not any(opset.domain == CONTRIB for opset in result.opset_import):
            result.opset_import.append(helper.make_opsetid(CONTRIB, 1))
        return result

    def _states_of(self, found: DecomposedAttention) -> tuple[tuple[str, str], tuple[str, str]]:
        """Return the names of the past and present keys and values. A layer without states gets states."""
        core = found.core
        if found.past is None:
            names = []
            for kind in ("key", "value"):
                pair = tuple(f"{when}.{len(self._states) // 2}.{kind}" for when in ("past_key_values", "present"))
                dtype = helper.np_dtype_to_tensor_dtype(self._regions.dtype(core.keys))
                shape = [1, found.num_kv_heads, None, found.head_dim]
                past, present = (helper.make_tensor_value_info(name, dtype, shape) for name in pair)
                self._states.append((past, present))
                names.append(pair)
            (past_key, present_key), (past_value, present_value) = names
            return (past_key, past_value), (present_key, present_value)
        if self._regions.lengths.window is None:
            return found.past, (core.keys, core.values)
        new = [self._signature.states[name].present for name in found.past]
        for name, all_tokens, returned in zip(found.past, (core.keys, core.values), new, strict=True):
            self._require_last(all_tokens, returned, self._regions.shape(name)[2])
        return found.past, (new[0], new[1])

    def _require_last(self, all_tokens: str, present: str, num_kept: int) -> None:
        """Refuse a state whose new value is neither that of all tokens nor of the last ones."""
        values = self._regions.random(all_tokens, np.random.default_rng(0))
        found = self._regions.run(present, {all_tokens: values})
        if not np.array_equal(found, values) and not np.array_equal(found, values[:, :, -num_kept:]):
            raise UnsupportedModelError(f"the state {present!r} does not contain the window's last tokens")

    def _free_lengths(self, graph: onnx.GraphProto) -> None:
        """Make the lengths of all inputs and outputs free."""
        rows = (self._signature.tokens, self._signature.mask, self._signature.positions)
        for value in graph.input:
            if value.name in rows:
                value.type.tensor_type.shape.dim[-1].ClearField("dim_value")
            elif value.name in self._signature.states:
                value.type.tensor_type.shape.dim[2].ClearField("dim_value")
        for value in graph.output:
            value.type.tensor_type.ClearField("shape")

    def _normalised(self, rows: str, norm: Norm | None, columns: int, head_dim: int) -> str:
        if norm is None:
            return rows
        heads = self.node("Reshape", [rows, self._constant(np.array([0, -1, head_dim]))], [])
        normalised = self._norm(heads, norm.weight, norm.epsilon, [])
        return self.node("Reshape", [normalised, self._constant(np.array([0, -1, columns]))], [])

    def _norm(self, source: str, weight: str, epsilon: float, outputs: list[str]) -> str:
        return self.node(
            "SimplifiedLayerNormalization", [source, weight], outputs, axis=-1, epsilon=epsilon, stash_type=1
        )

    def _of_lengths(self, past: str) -> tuple[str, str]:
        """Add GroupQueryAttention's seqlens_k int32 [1] and total_sequence_length int32."""
        if self._lengths is None:
            sizes = [
                self.node("Gather", [self.node("Shape", [name], []), self._constant(np.array(axis))], [])
                for name, axis in ((past, 2), (self._signature.tokens, 1))
            ]
            total = self.node("Cast", [self.node("Add", sizes, [])], [], to=onnx.TensorProto.INT32)
            last = self.node("Sub", [total, self._constant(np.array([1], np.int32))], [])
            self._lengths = last, total
        return self._lengths

    def _names(self, tables: Rotation) -> tuple[str, str]:
        if id(tables) not in self._tables:
            names = tuple(self._constant(table, f"{kind}_{len(self._tables)}") for kind, table in vars(tables).items())
            self._tables[id(tables)] = names[0], names[1]
        return self._tables[id(tables)]

    def _constant(self, values: np.ndarray, name: str = "") -> str:
        name = f"composed/{name or len(self._initializers)}"
        self._initializers[name] = numpy_helper.from_array(values, name)
        return name
