"""Cutting linears out of their subgraphs, so that a second processor can compute beside them what their grids leave.

    x -> MatMul -> y      becomes      x -> MatMul ----------------> y.main --+
                                       x -> chunkrt::ShadowLinear -> y.shadow -+-> Add -> y

MatMul and ShadowLinear are then subgraphs of their own: they wait for the same subgraph, and for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from chunkrt.graph.plan import DOMAIN, MAIN_SUFFIX, SHADOW_OP
from chunkrt.graph.tracing import ALONE_KEY, DEVICE_KEY

SHADOW_SUFFIX = ".shadow"


def cut_shadowed(model: ir.Model, is_shadowed: Callable[[str], bool]) -> None:
    """A pass, in place: put a shadow beside every linear whose weight's name is chosen.

    Requires: a traced decoder. Ensures: the outputs of linears keep their names and, but for rounding, their values;
    the two halves of a linear are marked to become subgraphs of their own, the second on the CPU.
    """
    graph = model.graph
    for node in list(graph):
        weight = node.inputs[1] if node.op_type == "MatMul" else None
        if weight is not None and weight.name in graph.initializers and is_shadowed(weight.name or ""):
            _cut(graph, node)


def _cut(graph: ir.Graph, linear: ir.Node) -> None:
    whole = linear.outputs[0]
    name = whole.name or ""
    shadow = ir.Node(
        DOMAIN, SHADOW_OP, linear.inputs, num_outputs=1, name=name + SHADOW_SUFFIX, metadata_props={DEVICE_KEY: "cpu"}
    )
    add = ir.Node("", "Add", [whole, shadow.outputs[0]], num_outputs=1, name=f"{name}.sum")
    add.metadata_props.update({k: v for k, v in linear.metadata_props.items() if k == DEVICE_KEY})
    for result, suffix in ((shadow.outputs[0], SHADOW_SUFFIX), (add.outputs[0], "")):
        result.type, result.shape = whole.type, whole.shape
        result.name = name + suffix
    for user, index in tuple(whole.uses()):
        if user is not add:
            user.replace_input_with(index, add.outputs[0])
    whole.name = name + MAIN_SUFFIX
    for index, output in enumerate(graph.outputs):
        if output is whole:
            graph.outputs[index] = add.outputs[0]
    graph.insert_after(linear, [shadow, add])
    for half in (linear, shadow):
        half.metadata_props[ALONE_KEY] = half.name or ""
