"""The operators of device `npu`: each as ONNX, for whoever runs ONNX (`qnn`, `onnxrt`).

Most are standard. Those of our own domain are functions over standard ONNX, which travel in the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chunkrt.backends.registry import NPU, operators, qualified
from chunkrt.graph.plan import Node

if TYPE_CHECKING:
    import onnx_ir as ir

STANDARD = (
    "add",
    "embedding",
    "gather_rows",
    "gelu",
    "gelu_mul",
    "linear",
    "logits",
    "matmul",
    "mul",
    "rms_norm",
    "sigmoid",
    "silu_mul",
    "softplus",
    "split",
    "tanh",
)
FUNCTIONS = ("cached_attention", "float_linear", "head_norm", "linear_attention", "routed_experts", "shadow_linear")


def standard(node: Node) -> None:
    """ONNX has the node's operator: it is handed over as it is."""


def expanded(node: Node) -> ir.Function:
    """The function over standard ONNX that defines the node's operator. Raises KeyError for an unknown one."""
    from chunkrt.backends.onnx.export import overload
    from chunkrt.backends.onnx.functions import expansion

    return expansion(node.op, overload(node))


def missing_expansion(node: Node) -> str:
    """Why ONNX has no function for a node, whose operator is of a kind that nobody wrote one for; empty if it has."""
    from chunkrt.backends.onnx.export import overload
    from chunkrt.backends.onnx.functions import has_expansion

    if has_expansion(node.domain, node.op, kind := overload(node)):
        return ""
    of_kind = f" of attn_type {kind!r}" if kind else ""
    return f"{qualified(node.domain, node.op)}{of_kind} is not standard ONNX and has no expansion into it"


for _name in STANDARD:
    operators.register(_name, NPU)(standard)
for _name in FUNCTIONS:
    operators.register(_name, NPU, refuses=missing_expansion)(expanded)
