"""The operators of device `npu` as ONNX, for the backends that run ONNX (`qnn`, `onnxrt`).

Most operators are standard ONNX. Operators of chunkrt's own domain are functions in standard ONNX, which the model
contains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chunkrt.backends.registry import NPU, operators, qualified
from chunkrt.errors import ModelError
from chunkrt.graph.linear_attention import LINEAR_ATTENTION_OP
from chunkrt.graph.plan import Node

if TYPE_CHECKING:
    import onnx_ir as ir

STANDARD = (
    "add",
    "concat",
    "embedding",
    "gather_rows",
    "gelu",
    "gelu_mul",
    "layer_norm",
    "linear",
    "logits",
    "matmul",
    "mul",
    "relu",
    "rms_norm",
    "sigmoid",
    "silu_mul",
    "softplus",
    "split",
    "tanh",
    "thresholded_relu",
)
FUNCTIONS = (
    "add_positions",
    "cached_attention",
    "gather_share",
    "float_linear",
    "head_norm",
    "linear_attention",
    "quick_gelu",
    "routed_experts",
    "selective_scan",
    "shadow_linear",
    "xielu",
)


def standard(node: Node) -> None:
    """Accept a node whose operator is standard ONNX; the node is exported unchanged."""


def expanded(node: Node) -> ir.Function:
    """Return the function over standard ONNX that defines the node's operator. Raises KeyError for an unknown one."""
    from chunkrt.backends.onnx.functions import expansion
    from chunkrt.backends.onnx.plan_models import overload

    return expansion(node.op, overload(node), node.domain)


def missing_expansion(node: Node) -> str:
    """Return a message if no valid ONNX function defines a node's operator or kind; empty if one does."""
    from chunkrt.backends.onnx.functions import expansion, has_expansion
    from chunkrt.backends.onnx.plan_models import overload

    if has_expansion(node.domain, node.op, kind := overload(node)):
        try:
            expansion(node.op, kind, node.domain)
        except ModelError as error:
            return str(error)
        return ""
    name = "attn_type" if node.op == LINEAR_ATTENTION_OP else "the kind"
    of_kind = f" of {name} {kind!r}" if kind else ""
    return f"{qualified(node.domain, node.op)}{of_kind} is not standard ONNX and has no expansion into standard ONNX"


for _name in STANDARD:
    operators.register(_name, NPU)(standard)
for _name in FUNCTIONS:
    operators.register(_name, NPU, refuses=missing_expansion)(expanded)
