"""Removal of nodes that return their input unchanged, before any other analysis of a foreign decoder.

Exporters leave such nodes in the graph: PyTorch's TorchScript exporter writes a Concat of one input where a cache of
Transformers was empty. Such nodes may be between a state and the node that appends to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from chunkrt.onnx.importing.evaluation import Evaluator
from chunkrt.onnx.importing.reading import replaced

JOINING = ("Concat", "Max", "Mean", "Min", "Sum")
"""Operators that return their input if they have only one input."""

SHAPING = ("Expand", "Flatten", "Reshape", "Tile")
"""Operators that return their input if the result has the same shape."""

BY_SHAPE = (*SHAPING, "Cast", "Slice")
"""Operators that are identities for some shapes and types."""

Seen = list[dict[str, NDArray[Any]]]


def without_identities(evaluator: Evaluator, path: Path, *, runs: bool) -> onnx.ModelProto:
    """Return the decoder without identities among the values that depend on tokens or states.

    Args:
        runs: whether the decoder is run at the probes, to determine shapes and types. Without runs, a node is kept if
            it depends on unknown shapes or types whether the node is an identity.

    Ensures: inputs and outputs keep their names. If there is no identity, the model is returned unchanged.

    Raises:
        ModelError: ONNX Runtime cannot run a part of it.
    """
    proto = evaluator.proto
    candidates = [node for node in proto.graph.node if _may_be_identity(node, evaluator)]
    if not runs:
        candidates = [node for node in candidates if node.op_type not in BY_SHAPE]
    names = [name for n in candidates if n.op_type in BY_SHAPE for name in (n.input[0], n.output[0])]
    seen = evaluator.runs(sorted(set(names)), evaluator.lengths.near) if names else []
    found = [node for node in candidates if _is_identity(node, evaluator, seen)]
    if not found:
        return proto
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    kept = {v.name for v in (*proto.graph.input, *proto.graph.output, *proto.graph.initializer)}
    kept.update(_read_inside(proto.graph.node))
    dropped = {node.output[0] for node in found}
    names_of: dict[str, str] = {}
    for node in found:
        source, target = (_final(names_of, name) for name in (node.input[0], node.output[0]))
        if target not in kept:
            names_of[target] = source
        elif source not in kept:
            names_of[source] = target
        else:
            dropped.discard(node.output[0])  # from an input of the model straight to an output
    del result.graph.node[:]
    for node in proto.graph.node:
        if node.output and node.output[0] in dropped:
            continue
        copied = result.graph.node.add()
        copied.CopyFrom(node)
        for values in (copied.input, copied.output):
            values[:] = [_final(names_of, name) for name in values]
    return replaced(result, [], [], path)


def _read_inside(nodes: Iterable[onnx.NodeProto]) -> Iterator[str]:
    """Return the names that graphs inside nodes read; these names must not change."""
    for attribute in (attribute for node in nodes for attribute in node.attribute):
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            yield from (name for node in graph.node for name in node.input)
            yield from (value.name for value in graph.output)
            yield from _read_inside(graph.node)


def _final(names: dict[str, str], name: str) -> str:
    while name in names:
        name = names[name]
    return name


def _may_be_identity(node: onnx.NodeProto, evaluator: Evaluator) -> bool:
    """Return whether a node can be an identity by its operator and inputs; shapes and types may rule it out."""
    inputs = [name for name in node.input if name]
    if node.domain not in ("", "ai.onnx") or not inputs or inputs[0] != node.input[0] or not node.output[0]:
        return False
    if any(node.output[1:]) or evaluator.is_positional(inputs[0]):
        return False
    others = inputs[1:]
    if node.op_type in ("Identity", *JOINING):
        return not others
    if node.op_type == "Dropout":
        mode = node.input[2] if len(node.input) > 2 else ""
        return not mode or (mode in evaluator.constants and not evaluator.constant(mode).any())
    if node.op_type == "Transpose":
        order = next((list(a.ints) for a in node.attribute if a.name == "perm"), None)
        return order is not None and order == sorted(order)
    return node.op_type in BY_SHAPE and evaluator.constants.issuperset(others)


def _is_identity(node: onnx.NodeProto, evaluator: Evaluator, seen: Seen) -> bool:
    if node.op_type not in BY_SHAPE:
        return True
    source, target = node.input[0], node.output[0]
    if node.op_type == "Cast":
        return all(values[source].dtype == values[target].dtype for values in seen)
    if any(values[source].shape != values[target].shape for values in seen):
        return False
    return node.op_type != "Slice" or _takes_all(node, evaluator, [values[source].shape for values in seen])


def _takes_all(node: onnx.NodeProto, evaluator: Evaluator, shapes: list[tuple[int, ...]]) -> bool:
    """Return whether a Slice takes the complete axes at any length, not only at the probes' lengths."""
    given = {i: evaluator.constant(name).reshape(-1) for i, name in enumerate(node.input) if i and name}
    by_name = {a.name: np.array(a.ints) for a in node.attribute}  # opsets before 10
    starts, ends = given.get(1, by_name.get("starts")), given.get(2, by_name.get("ends"))
    if starts is None or ends is None:
        return False
    axes = given.get(3, by_name.get("axes", np.arange(len(starts))))
    is_forward = bool((given.get(4, np.ones(1)) == 1).all())
    largest = np.iinfo(np.int32).max
    sizes = [{shape[axis] for shape in shapes} for axis in axes]
    is_whole = all(
        end >= largest or (len(each) == 1 and end >= max(each)) for end, each in zip(ends, sizes, strict=True)
    )
    return is_forward and not starts.any() and is_whole
