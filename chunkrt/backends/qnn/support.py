"""What the NPU takes, told before anything is compiled.

The table is what Qualcomm's compiler accepted and computed exactly, for v69 to v81; see docs/npu.md.
"""

from __future__ import annotations

from chunkrt.backends.base import Support
from chunkrt.backends.registry import qualified
from chunkrt.graph.plan import Node, Plan, Subgraph
from chunkrt.quant.scheme import BLOCK_LENGTH, SCHEMES, Scheme

OPERATORS = ("Add", "MatMul", "Mul", "RMSNormalization", "Sigmoid", "Split")
"""Of standard ONNX; all but MatMul in float16."""

LINEARS = {(8, 8), (16, 8), (16, 4)}
"""Bits of activations and weights that its matrix unit multiplies; 4-bit weights in blocks."""

_STATIC = ", ".join(name for name, scheme in SCHEMES.items() if scheme.is_static)


def npu_support(subgraph: Subgraph, plan: Plan, scheme: Scheme) -> Support:
    """Whether the NPU can run a subgraph under a scheme; if not, the first node in its way."""
    for node in subgraph.nodes:
        if reason := _refusal(node, plan, scheme):
            return Support(ok=False, node=node.name, reason=reason)
    return Support(ok=True)


def _refusal(node: Node, plan: Plan, scheme: Scheme) -> str:
    if node.domain or node.op not in OPERATORS:
        known = ", ".join(OPERATORS)
        return f"the NPU has no {qualified(node.domain, node.op)}; place it on the CPU (the NPU has: {known})"
    for name in (n for n in (*node.inputs, *node.outputs) if n):
        if (dtype := plan.tensors[name].dtype) != "float32":
            return f"{node.op} has the {dtype} operand {name!r}, the NPU takes float values; place it on the CPU"
    if node.op in ("Split", "RMSNormalization"):
        rank = len(plan.tensors[node.inputs[0]].shape)
        if (axis := node.attributes.get("axis")) not in (-1, rank - 1):
            return f"{node.op} over axis {axis} of {rank}: on the NPU it goes over the last; place it on the CPU"
    return _linear_refusal(node, plan, scheme) if node.op == "MatMul" else ""


def _linear_refusal(node: Node, plan: Plan, scheme: Scheme) -> str:
    weight = plan.tensors[node.inputs[1]]
    if weight.kind != "weight":
        return f"MatMul by {weight.name!r}, which is computed: the NPU multiplies by weights; place it on the CPU"
    if not scheme.is_static:
        what = "measured row by row" if scheme.activations else "float32"
        return f"MatMul whose activations are {what}: the NPU needs calibrated grids; use a static scheme: {_STATIC}"
    activation_bits, weight_bits = scheme.activation_bits_of(weight.name), scheme.weight_bits_of(weight.name)
    types = f"MatMul of u{activation_bits} by s{weight_bits}"
    if (activation_bits, weight_bits) not in LINEARS:
        return f"{types}: the NPU has no such product; use a static scheme: {_STATIC}"
    depth = weight.shape[0]
    if weight_bits == 4 and int(depth) % BLOCK_LENGTH:
        return (
            f"{types} of depth {depth}: 4-bit weights come in blocks of {BLOCK_LENGTH}, which do not divide it; "
            "use the scheme w8a16, or place it on the CPU"
        )
    return ""
