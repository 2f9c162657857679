"""Reading of an untrusted ONNX file, in which all sizes are checked before memory is allocated.

Initializers stay in their files, and are memory-mapped when they are read. Links are resolved here, once: ONNX Runtime
and onnx_ir get the path of the file itself, because they refuse links such as those in hubs' caches.

Every node is validated before it is analysed or run: a file of a few bytes can request an array of 10^9 elements, and a
node may lack operands that its operator needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from math import prod
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx import defs, helper, shape_inference

from chunkrt.errors import ModelError, UnsupportedModelError, cause_of
from chunkrt.onnx.importing.decoder_settings import named_file

MAX_ELEMENTS = 2**40
_EXTERNAL = 1
"""TensorProto.DataLocation.EXTERNAL."""


def read_proto(path: Path) -> onnx.ModelProto:
    """Read the graph of an ONNX file; weights stay in their files.

    Ensures: nodes are in execution order, every value has a unique name, and the data of every initializer is in this
    file or in a file next to it, whose absolute path becomes the location of the data.

    Raises:
        ModelError: the file is damaged or contradicts itself, or its data is missing or in another folder.
        UnsupportedModelError: the file contains a kind of tensor that no decoder needs.
    """
    try:
        proto = onnx.ModelProto()
        proto.ParseFromString(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {cause_of(error)}") from error
    except Exception as error:  # protobuf's DecodeError has no stable import path
        raise ModelError(f"{path} is truncated or not an ONNX model: {error}; fetch it again") from error
    if not proto.graph.node or not proto.graph.output:
        raise ModelError(f"{path} holds no ONNX graph; fetch it again, or name the .onnx file of the decoder")
    _check_names(proto.graph, path)
    for tensor in tensors_of(proto.graph):
        _check_tensor(tensor, path)
    if proto.graph.sparse_initializer:
        raise UnsupportedModelError(f"{path} has sparse initializers, which are not supported")
    sort_nodes(proto.graph, path)
    return proto


def to_graph(proto: onnx.ModelProto, path: Path) -> ir.Model:
    """Return a checked model as a graph that passes can change. Raises ModelError if onnx_ir finds further errors."""
    try:
        return ir.from_proto(proto)
    except Exception as error:  # onnx_ir raises many types of exceptions
        raise ModelError(f"{path} is damaged: {error}; fetch it again") from error


def _check_names(graph: onnx.GraphProto, path: Path) -> None:
    """Check that every name is written once, as ONNX requires (static single assignment)."""
    made = [name for node in graph.node for name in node.output if name]
    initializers = {tensor.name for tensor in graph.initializer}
    made += [*initializers, *(v.name for v in graph.input if v.name not in initializers)]
    for names in (made, [tensor.name for tensor in graph.initializer]):
        repeated = [name for name, count in Counter(names).items() if count > 1]
        if repeated:
            raise ModelError(f"{path} is damaged: {repeated[0]!r} is written twice")
    known = set(made) | {""}
    for node in graph.node:
        if missing := [name for name in node.input if name not in known]:
            raise ModelError(f"{path} is damaged: node {node.name!r} reads {missing[0]!r}, which no node writes")
    if missing := [v.name for v in graph.output if v.name not in known]:
        raise ModelError(f"{path} is damaged: no node writes its output {missing[0]!r}")


def tensors_of(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Return all tensors of a graph, and of the graphs that its nodes hold."""
    yield from graph.initializer
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            yield from tensors_of(inner)


def _check_tensor(tensor: onnx.TensorProto, path: Path) -> None:
    """Check that a tensor's data exists and that its size matches the tensor's shape."""
    name, dims = tensor.name, list(tensor.dims)
    if any(size < 0 for size in dims) or prod(dims) > MAX_ELEMENTS:
        raise ModelError(f"{path} is damaged: {name!r} has the impossible shape {dims}")
    try:
        dtype = ir.DataType(tensor.data_type)
        if dtype == ir.DataType.STRING:
            return
        needed = -(-prod(dims) * dtype.bitwidth // 8)
    except (ValueError, TypeError) as error:
        raise UnsupportedModelError(f"{path}: {name!r} has an unknown data type ({error})") from error
    if tensor.data_location == _EXTERNAL:
        _check_external(tensor, needed, path)
    elif tensor.HasField("raw_data"):
        if (found := len(tensor.raw_data)) != needed:
            raise ModelError(f"{path} is damaged: {name!r} {dims} has {found} bytes, expected {needed}")
    else:
        fields = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")
        found = max(len(getattr(tensor, field)) for field in fields)
        if found * 8 < prod(dims) * min(dtype.bitwidth, 8):
            raise ModelError(f"{path} is damaged: {name!r} {dims} has {found} values")


def _check_external(tensor: onnx.TensorProto, needed: int, path: Path) -> None:
    """Check that the data is in a regular file next to the model that is long enough, and make its location
    absolute.
    """
    name = tensor.name
    claims = {entry.key: entry.value for entry in tensor.external_data}
    location = claims.get("location", "")
    parts = Path(location.replace("\\", "/")).parts
    if not location or Path(location).is_absolute() or location.startswith(("/", "\\")) or ".." in parts:
        raise ModelError(f"{path}: the data of {name!r} has the location {location!r}, which is not next to the model")
    beside = path.parent / location
    try:
        file = beside.resolve(strict=True)
        if not file.is_relative_to(path.parent.resolve()) and not _is_cached(beside, path):
            raise ModelError(f"{path}: the data of {name!r} is at {location!r}, which is outside the model's folder")
        size = file.stat().st_size
        offset, length = int(claims.get("offset", 0)), int(claims.get("length", needed))
    except OSError as error:
        raise ModelError(f"{path}: its data file {location!r} cannot be read: {cause_of(error)}") from error
    except ValueError as error:
        raise ModelError(f"{path} is damaged: {name!r} has external data at {claims}") from error
    if not file.is_file():
        raise ModelError(f"{path}: its data file {location!r} is not a regular file")
    if length != needed or offset < 0 or offset + length > size:
        raise ModelError(
            f"{path}: {name!r} claims {length} bytes at {offset} of {location!r}, which has {size}; it needs {needed}"
        )
    next(entry for entry in tensor.external_data if entry.key == "location").value = str(file)


def _is_cached(beside: Path, path: Path) -> bool:
    """Accept links of a hub's snapshot: both files are links to blobs in one folder."""
    return path.is_symlink() and beside.is_symlink() and path.resolve().parent == beside.resolve().parent


def sort_nodes(graph: onnx.GraphProto, path: Path) -> None:
    """Sort the nodes into execution order; the exporter's order is kept if it is valid."""
    nodes = list(graph.node)
    made: set[str] = set()
    writers = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    in_order = True
    for node in nodes:
        in_order &= not any(name in writers and name not in made for name in node.input)
        made.update(node.output)
    if in_order:
        return
    reads = {index: {writers[n] for n in node.input if n in writers} for index, node in enumerate(nodes)}
    try:
        order = list(TopologicalSorter(reads).static_order())
    except CycleError as error:
        first = nodes[error.args[1][0]]
        raise ModelError(f"{path} is damaged: node {first.name!r} reads a value that depends on it") from error
    copies = [type(node).FromString(node.SerializeToString()) for node in (nodes[index] for index in order)]
    del graph.node[:]
    graph.node.extend(copies)


def find_model(path: Path) -> Path:
    """Return the decoder's file of a folder, or the file itself.

    Raises:
        ModelError: the folder contains no decoder, or several candidates.
    """
    if not path.is_dir():
        return path
    if named := named_file(path):
        return named
    files = sorted(path.glob("*.onnx"))
    for preferred in ("model.onnx", "decoder_model_merged.onnx", "decoder.onnx"):
        if (path / preferred) in files:
            return path / preferred
    if len(files) != 1:
        found = ", ".join(file.name for file in files[:3]) or "none"
        raise ModelError(f"{path} has {len(files)} ONNX files ({found}); name the decoder's file itself")
    return files[0]


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


MOST_ELEMENTS = 2**28
"""Largest number of elements of a value whose size does not depend on the number of tokens, unless a weight is
larger.
"""
STANDARD = {"ai.onnx": ""}
"""Two names of ONNX's default domain."""

SMALL = 1024
"""Largest number of elements of a constant that may determine the size of another value."""

_LEAST_OPERANDS = {
    "CausalConvWithState": 2,
    "DynamicQuantizeMatMul": 3,
    "FastGelu": 1,
    "GatherBlockQuantized": 3,
    "Gelu": 1,
    "GatedRMSNorm": 3,
    "GroupQueryAttention": 7,
    "LinearAttention": 3,
    "LinearAttentionGate": 3,
    "MRotaryEmbedding": 4,
    "MatMulNBits": 3,
    "MultiHeadAttention": 1,
    "RotaryEmbedding": 4,
    "SimplifiedLayerNormalization": 2,
    "SkipSimplifiedLayerNormalization": 3,
}
"""Smallest numbers of operands for operators without a schema in ONNX."""


def check_claims(proto: onnx.ModelProto, path: Path) -> None:
    """Check the operands of all nodes, and the sizes of all values.

    Raises:
        ModelError: a node has too few operands or results for its operator, or a value has an impossible size.
        UnsupportedModelError: the file states no version for a node's domain.
    """
    versions = {STANDARD.get(opset.domain, opset.domain): opset.version for opset in proto.opset_import}
    for node in proto.graph.node:
        domain = STANDARD.get(node.domain, node.domain)
        if domain not in versions:
            raise UnsupportedModelError(
                f"{path}: {_described(node)}, cannot be imported: the file imports no version of that domain"
            )
        _check_operands(node, versions[domain], path)
    _check_sizes(proto, path)


def _check_operands(node: onnx.NodeProto, version: int, path: Path) -> None:
    try:
        schema = defs.get_schema(node.op_type, version, node.domain)
    except defs.SchemaError:
        least, most = _LEAST_OPERANDS.get(node.op_type, 0), len(node.input)
    else:
        least, most = schema.min_input, schema.max_input
    found = len(node.input) - (0 if all(node.input[:least]) else 1)
    if not least <= found <= most or not any(node.output):
        raise ModelError(
            f"{path} is damaged: {_described(node)}, has the operands {list(node.input)!r:.200}, "
            f"expected at least {least}"
        )


def _described(node: onnx.NodeProto) -> str:
    return f"node {node.name!r}, an operator {node.op_type} of the domain {node.domain or 'ai.onnx'}"


def _check_sizes(proto: onnx.ModelProto, path: Path) -> None:
    """Return the sizes that ONNX's own shape inference finds without the weights' values."""
    light = onnx.ModelProto(ir_version=proto.ir_version)
    light.opset_import.extend(proto.opset_import)
    light.graph.name = "sizes"
    light.graph.node.extend(proto.graph.node)
    light.graph.output.extend(onnx.ValueInfoProto(name=value.name) for value in proto.graph.output)
    largest = MOST_ELEMENTS
    for tensor in proto.graph.initializer:
        size = prod(tensor.dims)
        largest = max(largest, size)
        if size <= SMALL and not tensor.external_data:
            light.graph.initializer.append(tensor)
        else:
            light.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    names = {tensor.name for tensor in proto.graph.initializer}
    light.graph.input.extend(value for value in proto.graph.input if value.name not in names)
    try:
        inferred = shape_inference.infer_shapes(light)
    except Exception as error:  # onnx raises many types of exceptions
        raise ModelError(f"{path} is damaged: {str(error).splitlines()[0]:.300}; fetch it again") from error
    for value in (*inferred.graph.value_info, *inferred.graph.output, *proto.graph.input):
        dims = value.type.tensor_type.shape.dim
        size = prod(d.dim_value for d in dims if d.HasField("dim_value"))
        if size > largest or any(d.dim_value < 0 for d in dims):
            shape = [d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in dims]
            raise ModelError(
                f"{path}: {value.name!r} would have the shape {shape!s:.200}, which is larger than in any decoder"
            )
