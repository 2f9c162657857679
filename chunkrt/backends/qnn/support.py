"""What the NPU takes, told before anything is compiled.

The table is what Qualcomm's compiler accepts and computes for v69 to v81. Of the exact sum of integers, a product of
8-bit activations is within one step of its output's grid. One of 16 bits drops the last 8 bits of the sum: it is within
one step and 256 * input step * weight's scale, downwards; on v69 it is off by up to 1/1000 of the grid's reach besides.
"""

from __future__ import annotations

from chunkrt.backends.base import Support
from chunkrt.backends.registry import qualified
from chunkrt.graph.plan import DOMAIN, Node, Plan, Subgraph
from chunkrt.graph.static_attention import HEAD_NORM_OP, PAST_SLOTS
from chunkrt.quant.scheme import BLOCK_LENGTH, STATIC_SCHEMES, Scheme

OPERATORS = ("Add", "Gelu", "MatMul", "Mul", "RMSNormalization", "Sigmoid", "Split")
"""Of standard ONNX; all but MatMul in float16. It computes Gelu the same whatever `approximate` says: the exact one and
that by tanh differ by less than 0.0005, and the steps of float16 around 2 are 0.002."""

LINEARS = {(8, 8), (16, 8), (16, 4)}
"""Bits of activations and weights that its matrix unit multiplies; 4-bit weights in blocks."""

MEAN_DROPPED = 255 / 2
"""Of a sum of 16-bit products, whose last 8 bits are dropped."""

ROWS_MULTIPLE = 32
"""Rows of every compiled graph are a multiple of this. Others are computed wrongly, and nothing is said: 16 rows of a
gated feed-forward with 16-bit activations; and the last of 8-bit values of which there are no whole 128 bytes."""

DEPTH_MULTIPLE_OF_8_BITS = 4
"""With ROWS_MULTIPLE rows, what makes 8-bit values come in whole 128 bytes."""

_STATIC = ", ".join(STATIC_SCHEMES)


def graph_rows(chunk_length: int) -> int:
    """Rows of the graph that is compiled for chunks of a length; those beyond the chunk's are padding."""
    return -(-chunk_length // ROWS_MULTIPLE) * ROWS_MULTIPLE


def npu_support(subgraph: Subgraph, plan: Plan, scheme: Scheme) -> Support:
    """Whether the NPU can run a subgraph under a scheme; if not, the first node in its way."""
    for node in subgraph.nodes:
        if reason := _refusal(node, plan, scheme):
            return Support(ok=False, node=node.name, reason=reason)
    return Support(ok=True)


def _refusal(node: Node, plan: Plan, scheme: Scheme) -> str:
    operands = {name: plan.tensors[name] for name in (*node.inputs, *node.outputs) if name}
    if node.domain == DOMAIN and (node.op == HEAD_NORM_OP or PAST_SLOTS in node.attributes):
        return ""
    if node.domain or node.op not in OPERATORS:
        types = ", ".join(operands[name].dtype for name in node.inputs if name)
        what = f"{qualified(node.domain, node.op)} of {types}"
        return f"the NPU has no {what}; place it on the CPU (the NPU has: {', '.join(OPERATORS)})"
    for name, tensor in operands.items():
        if tensor.dtype != "float32":
            return f"{node.op} has the {tensor.dtype} operand {name!r}, the NPU takes float32; place it on the CPU"
    if node.op in ("Split", "RMSNormalization"):
        rank = len(operands[node.inputs[0]].shape)
        if (axis := node.attributes.get("axis")) not in (-1, rank - 1):
            what = f"{node.op} of float32 over axis {axis} of {rank}"
            return f"{what}: on the NPU it goes over the last; place it on the CPU"
    return _linear_refusal(node, plan, scheme) if node.op == "MatMul" else ""


def _linear_refusal(node: Node, plan: Plan, scheme: Scheme) -> str:
    weight = plan.tensors[node.inputs[1]]
    if weight.kind != "weight":
        what = f"MatMul of float32 by {weight.name!r}, which is computed"
        return f"{what}: the NPU multiplies by weights alone; place it on the CPU"
    if not scheme.is_static:
        what = "measured row by row" if scheme.activations else "float32"
        return f"MatMul whose activations are {what}: the NPU needs calibrated grids; use a static scheme: {_STATIC}"
    activation_bits, weight_bits = scheme.activation_bits_of(weight.name), scheme.weight_bits_of(weight.name)
    types = f"MatMul of u{activation_bits} by s{weight_bits}"
    if (activation_bits, weight_bits) not in LINEARS:
        return f"{types}: the NPU has no such product; use a static scheme: {_STATIC}"
    if scheme.has_float_output(weight.name):
        return (
            f"{types} into float32: what leaves the NPU's matrix unit has as many bits as what enters it; compile the "
            "model again with outputs on grids (--outputs grid), or place it on the CPU"
        )
    depth = weight.shape[0]
    if activation_bits == 8 and int(depth) % DEPTH_MULTIPLE_OF_8_BITS:
        return (
            f"{types} of depth {depth}: the NPU computes 8-bit values rightly where {DEPTH_MULTIPLE_OF_8_BITS} divides "
            "the depth; use the scheme w8a16, or place it on the CPU"
        )
    if weight_bits == 4 and int(depth) % BLOCK_LENGTH:
        return (
            f"{types} of depth {depth}: 4-bit weights come in blocks of {BLOCK_LENGTH}, which do not divide it; "
            "use the scheme w8a16, or place it on the CPU"
        )
    return ""
