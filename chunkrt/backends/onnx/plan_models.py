"""Export of the plan to ONNX: one model for a subgraph, or for the complete decoder.

The NPU's compiler and ONNX Runtime, which serves as the oracle, take these models. `chunkrt plan --save-onnx` writes
them to files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from chunkrt.backends.onnx.functions import CAPPED, CAPPED_WITH_SINKS, DUAL_CHUNKS, SHARED, WITH_SINKS, expansions
from chunkrt.graph.linear_attention import LINEAR_ATTENTION_OP
from chunkrt.graph.operators import EXPERT_GROUPS
from chunkrt.graph.ops import IR_VERSION, OPSET, attribute
from chunkrt.graph.plan import (
    ATTENTION_OPS,
    DOMAIN,
    EXPERTS_OP,
    Attribute,
    Node,
    Plan,
    Subgraph,
    Tensor,
    reads_shared_cache,
)

PAST = "past"
"""Symbol for the length of a cache input; the cache output is longer by the new rows. In these models the cache of a
layer with a window also holds all positions and is not a ring.
"""

PRESENT_SUFFIX = ".present"
"""Suffix of a cache's name as an output."""

_CONV_BIAS = 4
"""Index of the convolution's bias among the inputs of LinearAttention."""
_EXPERT_BIASES = {4: "selection_bias", 5: "gate_up_bias", 6: "down_bias"}
"""Inputs of routed experts that a plan may omit, by their index."""
_EXPERTS: Mapping[str, Attribute] = {
    "use_sigmoid": 0,
    "norm_epsilon": 0.0,
    "swiglu_alpha": 1.0,
    "swiglu_limit": 0.0,
    "uses_gelu": 0,
    **dict.fromkeys(EXPERT_GROUPS, 1),
}
"""Attributes of routed experts that a plan may omit, but a call of a function may not."""

_DTYPES = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16, "int64": ir.DataType.INT64}


def to_onnx(plan: Plan, subgraphs: Sequence[Subgraph], *, name: str) -> ir.Model:
    """Build one ONNX model from consecutive subgraphs.

    Ensures: inputs are the values that the subgraphs read from outside, then the caches [kv_heads, past, D] and other
    state; a cache that an earlier subgraph fills contains the new rows already. Outputs are the values that are read
    outside, then the caches with the new rows appended, and the new state. Weights are initializers without values; see
    `backends/onnx/scheme_models.py`. The model contains the functions that define operators of chunkrt's domain.
    """
    values: dict[str, ir.Value] = {}

    def value(tensor_name: str) -> ir.Value:
        if tensor_name not in values:
            values[tensor_name] = _value(plan.tensors[tensor_name])
        return values[tensor_name]

    state_outputs: list[ir.Value] = []
    filled: dict[str, ir.Value] = {}
    nodes = []
    for node in (node for subgraph in subgraphs for node in subgraph.nodes):
        outputs = [value(n) for n in node.outputs]
        inputs = [filled.get(n) or value(n) if n else None for n in node.inputs]
        if node.domain and not reads_shared_cache(node):
            states = [n for n in node.inputs if _is_state(plan, n)]
            present = [_present(plan.tensors[n]) for n in states]
            state_outputs += present
            outputs += present
            filled |= zip(states, present, strict=True)
        if node.op == LINEAR_ATTENTION_OP and inputs[_CONV_BIAS] is None:
            nodes.append(_zero(f"{node.name}.conv_bias"))
            inputs[_CONV_BIAS] = nodes[-1].outputs[0]
        if node.op == EXPERTS_OP:
            inputs += [None] * (max(_EXPERT_BIASES) + 1 - len(inputs))
            for index, bias in _EXPERT_BIASES.items():
                if inputs[index] is None:
                    nodes.append(_zero(f"{node.name}.{bias}"))
                    inputs[index] = nodes[-1].outputs[0]
        nodes.append(_node(node, inputs, outputs))

    made = {n for subgraph in subgraphs for n in subgraph.outputs}
    later = plan.subgraphs[plan.subgraphs.index(subgraphs[-1]) + 1 :]
    wanted = {plan.output, *(n for subgraph in later for n in subgraph.inputs)}
    read = dict.fromkeys(n for s in subgraphs for n in (*s.inputs, *s.all_state) if n not in made)
    graph = ir.Graph(
        [value(n) for n in sorted(read, key=lambda n: _is_state(plan, n))],
        [*(value(n) for s in subgraphs for n in s.outputs if n in wanted), *state_outputs],
        nodes=nodes,
        opset_imports={"": OPSET, DOMAIN: 1, **{node.domain: 1 for node in nodes if node.domain}},
        name=name,
    )
    for weight in dict.fromkeys(n for subgraph in subgraphs for n in subgraph.weights):
        graph.initializers[weight] = value(weight)
    used = dict.fromkeys((node.op, overload(node), node.domain) for s in subgraphs for node in s.nodes if node.domain)
    return ir.Model(graph, ir_version=IR_VERSION, producer_name="chunkrt", functions=expansions(used))


def overload(node: Node) -> str:
    """Return the overload of the function that defines a node's operator: its kind of attention, or empty. Attention
    over the caches of another node is SHARED; with a soft cap or sinks there is no function for it, and none for dual
    chunk attention.
    """
    if node.domain != DOMAIN:
        return ""
    if node.op in ATTENTION_OPS:
        if "rope_period" in node.attributes:
            return DUAL_CHUNKS
        has_cap, has_sinks = bool(node.attributes.get("soft_cap")), any(node.inputs[7:8])
        kind = {(True, False): CAPPED, (False, True): WITH_SINKS, (True, True): CAPPED_WITH_SINKS}.get(
            (has_cap, has_sinks), ""
        )
        return f"{SHARED}{kind and '_'}{kind}" if reads_shared_cache(node) else kind
    return str(node.attributes["attn_type"]) if node.op == LINEAR_ATTENTION_OP else ""


def _is_state(plan: Plan, name: str) -> bool:
    return bool(name) and plan.tensors[name].kind == "state"


def _value(tensor: Tensor) -> ir.Value:
    shape = [PAST if dimension in ("P", "W") else dimension for dimension in tensor.shape]
    return ir.Value(name=tensor.name, type=ir.TensorType(_DTYPES[tensor.dtype]), shape=ir.Shape(shape))


def _present(cache: Tensor) -> ir.Value:
    shape = [f"{PAST} + T" if dimension in ("P", "W") else dimension for dimension in cache.shape]
    name = cache.name + PRESENT_SUFFIX
    return ir.Value(name=name, type=ir.TensorType(_DTYPES[cache.dtype]), shape=ir.Shape(shape))


def _node(node: Node, inputs: Sequence[ir.Value | None], outputs: Sequence[ir.Value]) -> ir.Node:
    stated = {**(_EXPERTS if node.op == EXPERTS_OP else {}), **node.attributes}
    attributes = [attribute(name, value) for name, value in stated.items() if name != "appends"]
    return ir.Node(node.domain, node.op, inputs, attributes, overload=overload(node), outputs=outputs, name=node.name)


def _zero(name: str) -> ir.Node:
    """Add a zero in place of an absent bias, and return its name, because a function cannot test whether an input is
    present.
    """
    output = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1]))
    return ir.Node("", "Constant", [], [ir.AttrFloat32s("value_floats", [0.0])], outputs=[output], name=name)
