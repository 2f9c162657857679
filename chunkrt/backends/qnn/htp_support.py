"""Operators and products that the NPU supports, checked before compilation.

The tables list the operators that Qualcomm's compiler accepts and computes correctly for v69 to v81. A product of 8-bit
activations is within one step of its output's grid of the exact integer sum. A product of 16-bit activations drops the
last 8 bits of the sum: the result is lower than the exact sum by at most 256 * input step * weight's scale, plus one
step of its output's grid. On v69 the result additionally deviates by up to 1/1000 of the grid's range.
"""

from __future__ import annotations

from collections.abc import Collection

from chunkrt.backends.base import Support
from chunkrt.backends.registry import qualified
from chunkrt.graph.plan import DOMAIN, Node, Plan, Subgraph
from chunkrt.graph.static_attention import HEAD_NORM_OP, PAST_SLOTS
from chunkrt.quant.scheme import BLOCK_LENGTH, STATIC_SCHEMES, Scheme

OPERATORS = ("Add", "Gelu", "LayerNormalization", "MatMul", "Mul", "RMSNormalization", "Relu", "Sigmoid", "Split")
"""Operators of standard ONNX; all except MatMul compute in float16. The NPU ignores Gelu's `approximate`: the exact
form and the tanh form differ by less than 0.0005, and the steps of float16 around 2 are 0.002."""

LINEARS = {(8, 8), (16, 8), (16, 4)}
"""Pairs of bits of activations and weights that the matrix unit multiplies; 4-bit weights are in blocks."""

MEAN_DROPPED = 255 / 2
"""Value of the lowest bit that is kept: a sum of 16-bit products loses its last 8 bits."""

FEW_ROWS = (2, 8)
"""Numbers of rows of the smallest graphs under schemes with 16-bit activations. Each row has the same bits as in a
graph of 32 rows. A row alone does not: the NPU computes graphs of one row differently."""

ROWS_MULTIPLE = 32
"""Divisor of the number of rows in all other graphs. The NPU silently returns wrong values for other numbers: for 16
rows of a gated feed-forward with 16-bit activations, and for the last 8-bit values if their number is not a multiple of
128."""

DEPTH_MULTIPLE_OF_8_BITS = 4
"""Divisor of the depth of linears with 8-bit activations: with ROWS_MULTIPLE rows, the number of values is then a
multiple of 128.
"""

_STATIC = ", ".join(STATIC_SCHEMES)


def graph_rows(chunk_length: int, scheme: Scheme) -> int:
    """Return the number of rows of the graph for a chunk length; the rows after those of the chunk are padding."""
    if scheme.activation_bits == 16:
        for rows in FEW_ROWS:
            if chunk_length <= rows:
                return rows
    return -(-chunk_length // ROWS_MULTIPLE) * ROWS_MULTIPLE


def distinct_graphs(lengths: Collection[int], scheme: Scheme) -> tuple[int, ...]:
    """Return the chunk lengths that have separate graphs, shortest first. Of lengths whose graphs have the same number
    of rows, the longest counts.
    """
    return tuple({graph_rows(length, scheme): length for length in sorted(lengths)}.values())


def npu_support(subgraph: Subgraph, plan: Plan, scheme: Scheme) -> Support:
    """Return whether the NPU can run a subgraph under a scheme, and the first unsupported node if it cannot."""
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
        return f"the NPU does not support {what}; place it on the CPU (the NPU supports: {', '.join(OPERATORS)})"
    for name, tensor in operands.items():
        if tensor.dtype != "float32":
            return f"{node.op} has the {tensor.dtype} operand {name!r}; the NPU takes float32; place it on the CPU"
    if node.op in ("LayerNormalization", "RMSNormalization", "Split"):
        rank = len(operands[node.inputs[0]].shape)
        if (axis := node.attributes.get("axis")) not in (-1, rank - 1):
            what = f"{node.op} of float32 over axis {axis} of {rank}"
            return f"{what}: the NPU supports the last axis only; place it on the CPU"
    return _linear_refusal(node, plan, scheme) if node.op == "MatMul" else ""


def _linear_refusal(node: Node, plan: Plan, scheme: Scheme) -> str:
    weight = plan.tensors[node.inputs[1]]
    if weight.kind != "weight":
        what = f"MatMul of float32 by {weight.name!r}, which is computed"
        return f"{what}: the NPU multiplies by weights only; place it on the CPU"
    if not scheme.is_static:
        what = "measured row by row" if scheme.activations else "float32"
        return f"MatMul whose activations are {what}: the NPU needs calibrated grids; use a static scheme: {_STATIC}"
    activation_bits, weight_bits = scheme.activation_bits_of(weight.name), scheme.weight_bits_of(weight.name)
    types = f"MatMul of u{activation_bits} by s{weight_bits}"
    if (activation_bits, weight_bits) not in LINEARS:
        return f"{types}: the NPU does not support this product; use a static scheme: {_STATIC}"
    if scheme.has_float_output(weight.name):
        return (
            f"{types} into float32: outputs of the NPU's matrix unit have as many bits as its inputs; recompile the "
            "model with outputs on grids (`outputs='grid'`), or place it on the CPU"
        )
    depth = weight.shape[0]
    if activation_bits == 8 and int(depth) % DEPTH_MULTIPLE_OF_8_BITS:
        return (
            f"{types} of depth {depth}: the NPU computes 8-bit values correctly only if {DEPTH_MULTIPLE_OF_8_BITS} "
            "divides "
            "the depth; use the scheme w8a16, or place it on the CPU"
        )
    if weight_bits == 4 and int(depth) % BLOCK_LENGTH:
        return (
            f"{types} of depth {depth}: 4-bit weights come in blocks of {BLOCK_LENGTH}, which do not divide it; "
            "use the scheme w8a16, or place it on the CPU"
        )
    return ""
