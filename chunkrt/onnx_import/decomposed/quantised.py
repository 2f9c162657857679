"""Products of quantised activations become MatMul of floats with a weight that DequantizeLinear makes.

How activations are quantised is for chunkrt's scheme to say; of a file's own choice only the weights are taken:

| form | what is written |
| --- | --- |
| dynamic | DynamicQuantizeLinear, MatMulInteger, Cast, and Mul with the product of both scales |
| fused | com.microsoft::DynamicQuantizeMatMul |
| static | QuantizeLinear and DequantizeLinear around a product |
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import helper

from chunkrt.errors import UnsupportedModelError
from chunkrt.onnx_import.rewriting import replaced

CONTRIB = "com.microsoft"
QUANTISED = frozenset(("DynamicQuantizeLinear", "MatMulInteger", "DynamicQuantizeMatMul", "QuantizeLinear"))


def is_quantised(proto: onnx.ModelProto) -> bool:
    """Whether a decoder says how its activations are quantised."""
    return any(node.op_type in QUANTISED for node in proto.graph.node)


def without_quantised_activations(proto: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """The same decoder with activations of floats; values keep their names.

    Raises:
        UnsupportedModelError: an operator for quantised activations is used in another way.
    """
    return _Dequantiser(proto, path).run()


class _Dequantiser:
    def __init__(self, proto: onnx.ModelProto, path: Path) -> None:
        self._proto, self._path = proto, path
        self._writers = {name: node for node in proto.graph.node for name in node.output if name}
        self._readers: dict[str, list[onnx.NodeProto]] = {}
        for node in proto.graph.node:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)
        self._new: list[onnx.NodeProto] = []

    def run(self) -> onnx.ModelProto:
        for node in self._proto.graph.node:
            if node.op_type == "MatMulInteger":
                self._integer(node)
            elif (node.domain, node.op_type) == (CONTRIB, "DynamicQuantizeMatMul"):
                data, weight, scale, zero, bias = [*node.input, "", "", ""][:5]
                self._product(node, data, (weight, scale, zero), node.output[0], bias)
            elif node.op_type == "QuantizeLinear":
                self._pair(node)
        return replaced(self._proto, self._new, [], self._path)

    def _integer(self, node: onnx.NodeProto) -> None:
        quantised, weight, *zeros = node.input
        source = self._writers.get(quantised)
        cast = self._only_reader(node.output[0], "Cast")
        scaled = self._only_reader(cast.output[0], "Mul") if cast else None
        if source is None or source.op_type != "DynamicQuantizeLinear" or cast is None or scaled is None:
            raise self._unsupported(node, "it is no product of a DynamicQuantizeLinear that is scaled back to floats")
        scales = self._writers.get(next(name for name in scaled.input if name != cast.output[0]))
        if scales is None or scales.op_type != "Mul" or source.output[1] not in scales.input:
            raise self._unsupported(node, "its result is not scaled by the product of both scales")
        if zeros and zeros[0] != source.output[2]:
            raise self._unsupported(node, "its zero point is not that of its left operand")
        scale = next(name for name in scales.input if name != source.output[1])
        operands = weight, scale, zeros[1] if len(zeros) > 1 else ""
        self._product(node, source.input[0], operands, scaled.output[0], "")

    def _product(
        self, node: onnx.NodeProto, data: str, weight: tuple[str, str, str], result: str, bias: str
    ) -> None:
        """result = data @ dequantised weight (+ bias)."""
        name = f"{node.name or result}/dequantised"
        inputs = [operand for operand in weight if operand]
        self._new.append(helper.make_node("DequantizeLinear", inputs, [name], name=name, axis=1))
        product = f"{name}/product" if bias else result
        self._new.append(helper.make_node("MatMul", [data, name], [product], name=node.name))
        if bias:
            self._new.append(helper.make_node("Add", [product, bias], [result], name=f"{name}/bias"))

    def _pair(self, node: onnx.NodeProto) -> None:
        """QuantizeLinear of a value that is computed, and what makes floats of it again."""
        for reader in self._readers.get(node.output[0], []):
            if reader.op_type != "DequantizeLinear" or list(reader.input[1:]) != list(node.input[1:]):
                raise self._unsupported(node, f"its result is read by {reader.op_type} {reader.name!r}")
            self._new.append(helper.make_node("Identity", [node.input[0]], list(reader.output), name=reader.name))

    def _only_reader(self, name: str, op: str) -> onnx.NodeProto | None:
        readers = self._readers.get(name, [])
        return readers[0] if len(readers) == 1 and readers[0].op_type == op else None

    def _unsupported(self, node: onnx.NodeProto, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self._path.name}: node {node.name!r}, an operator {node.op_type} of the domain "
            f"{node.domain or 'ai.onnx'}, cannot be imported: {reason}"
        )
