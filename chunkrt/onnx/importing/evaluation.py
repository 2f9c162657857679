"""Evaluation of parts of a foreign graph on ONNX Runtime, which determines their meaning without guessing.

Masks, positions and sizes depend only on the numbers of past and new tokens, so a few probes reveal their values. The
import can thus interpret any arithmetic of an exporter, or refuse it because of its values.

In a skeleton, a decoder without its weights, every value has its original shape, at almost no cost. The sizes of masks
and positions are often read from the shapes of values that depend on tokens. The contents of these values do not
matter, so products with constant matrices, and the look-up of tokens, need no matrix.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from chunkrt.errors import ModelError
from chunkrt.onnx.importing.reading import tensors_of
from chunkrt.onnx.importing.signature import Probe, Signature, feeds, inputs_of

SIZES = ("Shape", "Size")
"""Operators that read only the shape of a value."""

PROBES = (Probe(0, 1), Probe(0, 6), Probe(5, 1), Probe(5, 3), Probe(19, 7))
"""Probes: a first chunk, a single token, and a later chunk, with sizes that no tensor has by chance."""

LONGEST_PROMPT = 1024
"""Number of tokens of the longest prompt at which complete positions, lengths and masks are checked."""

LONGEST_WHOLE = 4096
"""Largest context of a decoder without states: its masks have the square of this size."""

MOST_TOKENS, MOST_STATES = 256, 2**30
"""Limits of a run that determines sizes far from the start: the number of tokens, and the bytes of its states."""


def decimal(number: float) -> float:
    """Return the decimal number that a float32 approximates."""
    return float(f"{number:.7g}")


def far_probes(context: int) -> tuple[Probe, Probe]:
    """Return the probes of the longest prompt, and of the context's last token alone."""
    return Probe(0, min(context, LONGEST_PROMPT)), Probe(context - 1, 1)


@dataclass(frozen=True)
class Lengths:
    """The numbers of past and new tokens with which a decoder can be run.

    window: the only numbers, if the decoder is a fixed window.
    has_past: False if the decoder has no states, so that there are no past tokens.
    """

    window: Probe | None = None
    has_past: bool = True

    def longest(self, context: int) -> int:
        """Return the number of positions up to which a decoder of a context can be checked."""
        if self.window is not None:
            return min(context, self.window.past + self.window.length)
        return context if self.has_past else min(context, LONGEST_WHOLE)

    @property
    def near(self) -> tuple[Probe, ...]:
        """Probes of few tokens."""
        if self.window is not None:
            return (self.window,)
        return PROBES if self.has_past else tuple(Probe(0, probe.past + probe.length) for probe in PROBES)

    def far(self, context: int) -> tuple[Probe, ...]:
        """Probes up to the end of the context."""
        if self.window is not None:
            return (self.window,)
        return far_probes(context) if self.has_past else (Probe(0, context),)

    def crossing(self, window: int, context: int) -> tuple[Probe, ...]:
        """Probes of a length at which a window of keys begins to move."""
        if self.window is not None:
            return ()
        past = max(window - 3, 1)
        probe = Probe(past, 7) if self.has_past else Probe(0, past + 7)
        return (probe,) if probe.past + probe.length <= context else ()


class Evaluator:
    """Evaluator of a foreign model, which can compute any of its values.

    Args:
        proto: the model, whose external data are in their files, as from `read_proto`.
        context: the assumed number of positions; sizes are checked near its end.
        lengths: the numbers of tokens with which the model is run.
    """

    def __init__(
        self, proto: onnx.ModelProto, signature: Signature, context: int, lengths: Lengths | None = None
    ) -> None:
        self.proto, self.signature, self.context = proto, signature, context
        self.lengths = lengths or Lengths()
        self._writers = {name: node for node in proto.graph.node for name in node.output if name}
        self._initializers: dict[str, onnx.TensorProto] = {tensor.name: tensor for tensor in proto.graph.initializer}

    @cached_property
    def _inputs(self) -> dict[str, ir.Value]:
        return inputs_of(self.proto)

    def is_positional(self, name: str) -> bool:
        """Return whether a value of the original model depends on sizes, masks and positions alone, and neither on
        tokens nor on cached values.
        """
        return name in self._known and name not in self._data

    def probe(self, name: str, probes: Sequence[Probe]) -> list[NDArray[Any]]:
        """Return a positional value at each probe.

        Raises:
            ModelError: ONNX Runtime cannot compute it.
        """
        return [values[name] for values in self.runs([name], probes)]

    def run(self, names: Sequence[str], probe: Probe) -> dict[str, NDArray[Any]]:
        """Return values at one probe. If a value depends on tokens or states, only its shape and type are meaningful.

        Raises:
            ModelError: ONNX Runtime cannot compute them.
        """
        return self.runs(names, [probe])[0]

    def runs(self, names: Sequence[str], probes: Sequence[Probe]) -> list[dict[str, NDArray[Any]]]:
        """Return the results of `run` at several probes, at little more cost than one run."""
        return self._run(names, probes, self._sizes) if names else [{} for _ in probes]

    def constant(self, name: str) -> NDArray[Any]:
        """Return the value of a constant, which depends on no input. Raises ModelError as `probe` does."""
        if (tensor := self._tensor(name)) is not None:
            return ir.serde.deserialize_tensor(tensor).numpy()
        graph = _part([name], self.proto.graph.node, self._initializers, set())
        return _run(self._open(graph), [name], {})[0]

    def _tensor(self, name: str) -> onnx.TensorProto | None:
        """Return the array of an initializer or a Constant."""
        if name in self._initializers:
            return self._initializers[name]
        node = self._writers[name]
        is_constant = node.op_type == "Constant"
        held: list[onnx.TensorProto] = [a.t for a in node.attribute if is_constant and a.name == "value"]
        return held[0] if held else None

    @cached_property
    def _known(self) -> set[str]:
        return {*self._writers, *self._initializers, *(v.name for v in self.proto.graph.input)}

    @cached_property
    def _data(self) -> set[str]:
        """Names of values that depend on the contents of tokens or states, and not only on their shapes."""
        data = {self.signature.tokens, *self.signature.states}
        for node in self.proto.graph.node:
            if node.op_type not in SIZES and (data.intersection(node.input) or _has_subgraph(node)):
                data.update(name for name in node.output if name)
        return data

    @cached_property
    def constants(self) -> set[str]:
        """Names of values that depend on no input."""
        known = set(self._initializers)
        for node in self.proto.graph.node:
            if known.issuperset(n for n in node.input if n) and not _has_subgraph(node):
                known.update(name for name in node.output if name)
        return known

    @cached_property
    def _skeleton(self) -> Skeleton:
        return skeleton(self.proto, self._data)

    @cached_property
    def _sizes(self) -> dict[str, NDArray[np.int64]]:
        """Maps results of Shape and Size for values that depend on tokens or states to a matrix m: the result is
        [1, past, length] @ m.

        Large contexts can thus be checked without running the model over them. Results without this form are omitted.
        """
        names = [n.output[0] for n in self.proto.graph.node if n.op_type in SIZES and self._data.intersection(n.input)]
        if not names or self.lengths.window is not None:
            return {}
        far, of_far = self._far_sizes(names)
        probes = (*self.lengths.near, *far)
        terms = np.array([(1, probe.past, probe.length) for probe in probes])
        runs = [*self._run(names, self.lengths.near, {}), *of_far]
        sizes = {}
        for name in names:
            found = np.stack([run[name].reshape(-1) for run in runs])
            factors = np.rint(np.linalg.pinv(terms) @ found).astype(np.int64)
            if np.array_equal(terms @ factors, found):
                sizes[name] = factors
        return sizes

    def _far_sizes(self, names: Sequence[str]) -> tuple[list[Probe], list[dict[str, NDArray[Any]]]]:
        """Return probes of a longer prompt and of the context's last token.

        An earlier token takes the place of the last one if the states would exceed `MOST_STATES`, or if the model
        cannot run at
        the last position: a context length that is only a default may exceed the model's.
        """
        part = _part(names, *self._skeleton, set())
        read = {name for node in part.node for name in node.input}.intersection(self.signature.states)
        states = {name: value for name, value in self._inputs.items() if name in read}
        near, farther = (
            sum(v.nbytes for v in feeds(self.signature, states, Probe(past, 1)).values()) for past in (0, 1)
        )
        tried = self.context
        if farther > near:
            tried = min(tried, (MOST_STATES - near) // (farther - near))
        least = max(probe.past + probe.length for probe in PROBES)
        while tried > least:
            probes = [Probe(0, min(tried, MOST_TOKENS)), *([Probe(tried - 1, 1)] if self.lengths.has_past else [])]
            try:
                return probes, self._run(names, probes, {})
            except ModelError:
                tried //= 2
        return [], []

    def _run(
        self, names: Sequence[str], probes: Sequence[Probe], sizes: Mapping[str, NDArray[np.int64]]
    ) -> list[dict[str, NDArray[Any]]]:
        nodes, initializers = self._skeleton
        made = [name for name in names if name not in sizes]
        graph = _part(made, nodes, initializers, sizes.keys())
        read = {name for node in graph.node for name in node.input}.union(made)
        inputs = {name: value for name, value in self._inputs.items() if name in read}
        shapes = {n: [] if self._writers[n].op_type == "Size" else [sizes[n].shape[1]] for n in sizes}
        graph.input.extend(v for v in self.proto.graph.input if v.name in inputs and v.name not in initializers)
        for name in sizes.keys() & read:
            graph.input.append(helper.make_tensor_value_info(name, onnx.TensorProto.INT64, shapes[name]))
        session = self._open(graph) if made else None
        results = []
        for probe in probes:
            said = {n: ([1, probe.past, probe.length] @ sizes[n]).reshape(shapes[n]) for n in shapes}
            given = feeds(self.signature, inputs, probe) | {name: said[name] for name in sizes.keys() & read}
            values = dict(zip(made, _run(session, made, given), strict=True)) if made else {}
            results.append({name: values[name] if name in values else said[name] for name in names})
        return results

    def _open(self, graph: onnx.GraphProto) -> Any:
        model = onnx.ModelProto(ir_version=self.proto.ir_version, graph=graph)
        model.opset_import.extend(self.proto.opset_import)
        if not any(opset.domain == "" for opset in model.opset_import):
            model.opset_import.append(helper.make_opsetid("", 18))
        model.functions.extend(self.proto.functions)
        try:
            return open_session(model)
        except Exception as error:  # onnxruntime raises a dozen unrelated types
            made = graph.output[0].name
            raise ModelError(f"ONNX Runtime cannot compute {made!r} of this model: {reason_of(error)}") from error


def _part(
    names: Sequence[str],
    nodes: Sequence[onnx.NodeProto],
    initializers: Mapping[str, onnx.TensorProto],
    given: Collection[str],
) -> onnx.GraphProto:
    """Return the nodes that compute some values, in order, and the initializers that these nodes read."""
    writers = {name: index for index, node in enumerate(nodes) for name in node.output if name and name not in given}
    needed: set[int] = set()
    read = set(names)
    pending = list(names)
    while pending:
        index = writers.get(pending.pop())
        if index is not None and index not in needed:
            needed.add(index)
            pending += [n for n in nodes[index].input if n and n not in read]
            read.update(nodes[index].input)
    graph = onnx.GraphProto(name="part")
    graph.node.extend(nodes[index] for index in sorted(needed))
    graph.initializer.extend(tensor for name, tensor in initializers.items() if name in read)
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return graph


def _has_subgraph(node: onnx.NodeProto) -> bool:
    """Return whether a node contains graphs, which may read any value."""
    return any(a.HasField("g") or a.graphs for a in node.attribute)


def _run(session: Any, names: Sequence[str], given: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    try:
        return list(session.run(list(names), dict(given)))
    except Exception as error:  # onnxruntime raises a dozen unrelated types
        raise ModelError(f"ONNX Runtime cannot compute {names[0]!r} of this model: {reason_of(error)}") from error


def reason_of(error: Exception) -> str:
    """Return another library's error message, in one line."""
    return " ".join(str(error).split())[:300]


def open_session(
    model: onnx.ModelProto | Path, options: Any = None, providers: Sequence[str] = ("CPUExecutionProvider",)
) -> Any:
    """Open an inference session of a file, or of a model whose external data are in their files, as from `read_proto`.

    ONNX Runtime refuses absolute locations of data. They are made relative to the root of the file system, in place, so
    the model must be the caller's own copy.
    """
    import onnxruntime as ort

    if options is None:
        options = ort.SessionOptions()
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")  # activations in float32
    options.log_severity_level = 4  # failures raise exceptions
    if isinstance(model, Path):
        return ort.InferenceSession(str(model), options, providers=list(providers))
    entries = (entry for tensor in tensors_of(model.graph) for entry in tensor.external_data)
    root = ""
    for location in (entry for entry in entries if entry.key == "location"):
        root = Path(location.value).anchor
        location.value = Path(location.value).relative_to(root).as_posix()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", root)
    return ort.InferenceSession(model.SerializeToString(), options, providers=list(providers))


CONTRIB = "com.microsoft"
PRODUCTS = (("", "MatMul"), ("", "MatMulInteger"), (CONTRIB, "MatMulNBits"))
UNDER = ("Identity", "Transpose", "DequantizeLinear")
"""Operators that may stand between an initializer and a matrix."""


class Skeleton(NamedTuple):
    """Nodes in the decoder's order, and initializers: the decoder's, and replacements of matrices."""

    nodes: list[onnx.NodeProto]
    initializers: dict[str, onnx.TensorProto]


class Matrix(NamedTuple):
    """A constant's first two sizes, and its type in ONNX."""

    rows: int
    columns: int
    data_type: int


def skeleton(proto: onnx.ModelProto, data: Collection[str]) -> Skeleton:
    """Return the nodes of a decoder with replacements for products and look-ups.

    Args:
        data: values that depend on tokens or states; only their shapes are needed.

    Ensures: values keep their names, types and shapes; values outside `data` are unchanged.
    """
    initializers = {tensor.name: tensor for tensor in proto.graph.initializer}
    writers = {name: node for node in proto.graph.node for name in node.output if name}
    nodes: list[onnx.NodeProto] = []
    for node in proto.graph.node:
        kind = node.domain, node.op_type
        if kind in PRODUCTS and node.input[0] in data:
            rank = 3 if node.op_type == "MatMulNBits" else 2
            made = _product(node, _matrix(node.input[1], writers, initializers, rank), initializers)
        elif kind == ("", "Gather") and node.input[1] in data and not any(a.i for a in node.attribute):
            made = _lookup(node, _matrix(node.input[0], writers, initializers), initializers)
        else:
            made = []
        nodes += made or [node]
    return Skeleton(nodes, initializers)


def _product(
    node: onnx.NodeProto, matrix: Matrix | None, initializers: dict[str, onnx.TensorProto]
) -> list[onnx.NodeProto]:
    """Replace a product: repeat its left operand's first column for each column of the matrix; empty if that is
    unknown."""
    if matrix is None:
        return []
    columns = matrix.rows if node.op_type == "MatMulNBits" else matrix.columns
    first = f"skeleton/{columns}"
    initializers[first] = numpy_helper.from_array(np.zeros(columns, np.int64), first)
    if node.op_type != "MatMulInteger":
        return [helper.make_node("Gather", [node.input[0], first], node.output, axis=-1)]
    narrow = f"{node.output[0]}/skeleton"
    return [
        helper.make_node("Gather", [node.input[0], first], [narrow], axis=-1),
        helper.make_node("Cast", [narrow], node.output, to=onnx.TensorProto.INT32),
    ]


def _lookup(
    node: onnx.NodeProto, matrix: Matrix | None, initializers: dict[str, onnx.TensorProto]
) -> list[onnx.NodeProto]:
    """Replace a look-up: a row of zeros for every token; empty if the table is unknown."""
    if matrix is None or (bits := ir.DataType(matrix.data_type).bitwidth) < 8:
        return []
    first, row = f"{node.output[0]}/first", f"{node.output[0]}/row"
    zeros = bytes(matrix.columns * bits // 8)
    initializers[row] = helper.make_tensor(row, matrix.data_type, [1, matrix.columns], zeros, raw=True)
    return [
        helper.make_node("Sub", [node.input[1], node.input[1]], [first]),
        helper.make_node("Gather", [row, first], node.output),
    ]


def _matrix(
    name: str, writers: Mapping[str, onnx.NodeProto], initializers: Mapping[str, onnx.TensorProto], rank: int = 2
) -> Matrix | None:
    """Return the known sizes of a constant: an initializer, or a transposed or dequantised one."""
    is_transposed, data_type = False, 0
    while name not in initializers:
        node = writers.get(name)
        if node is None or node.domain not in ("", CONTRIB) or node.op_type not in UNDER or not node.input:
            return None
        if node.op_type == "Transpose":
            is_transposed = not is_transposed
            if [list(a.ints) for a in node.attribute] not in ([], [[1, 0]]):
                return None
        if node.op_type == "DequantizeLinear" and not data_type:
            if len(node.input) < 2 or node.input[1] not in initializers:
                return None
            data_type = initializers[node.input[1]].data_type
        name = node.input[0]
    tensor = initializers[name]
    sizes = list(tensor.dims)[::-1] if is_transposed else list(tensor.dims)
    if len(sizes) != rank or 0 in sizes:
        return None
    return Matrix(sizes[0], sizes[1], data_type or tensor.data_type)
