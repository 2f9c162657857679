"""Replacement of a foreign graph's nodes by others that write values under the same names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from chunkrt.onnx.importing.reading import sort_nodes


def replaced(
    proto: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], initializers: Sequence[onnx.TensorProto], path: Path
) -> onnx.ModelProto:
    """Return a model with additional nodes and constants, without the replaced nodes and without nodes that are no
    longer read.

    Raises:
        ModelError: the nodes have no execution order.
    """
    made = {*(tensor.name for tensor in initializers), *(name for node in nodes for name in node.output)}
    everything = [*(node for node in proto.graph.node if not made.intersection(node.output)), *nodes]
    writers = {name: index for index, node in enumerate(everything) for name in node.output if name}
    pending, needed, read = [v.name for v in proto.graph.output], set[int](), set[str]()
    while pending:
        name = pending.pop()
        read.add(name)
        if name in writers and writers[name] not in needed:
            needed.add(writers[name])
            pending += [n for n in everything[writers[name]].input if n]
    result = onnx.ModelProto(ir_version=proto.ir_version, producer_name=proto.producer_name)
    result.opset_import.extend(proto.opset_import)
    result.functions.extend(proto.functions)
    result.metadata_props.extend(proto.metadata_props)
    result.graph.name = proto.graph.name
    result.graph.input.extend(proto.graph.input)
    result.graph.output.extend(proto.graph.output)
    result.graph.node.extend(everything[index] for index in sorted(needed))
    result.graph.initializer.extend(t for t in (*proto.graph.initializer, *initializers) if t.name in read)
    sort_nodes(result.graph, path)
    return result
