"""Checks of exports: a decoder's values must fit float16 before it is written in float16, and ONNX Runtime must compute
written integer weights with their own values.

ONNX Runtime's CPU provider computes float16 by casts to float32, which hides overflows. Therefore the first check
evaluates the nodes one after another with ONNX's own reference, and rounds each value to float16.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnx_ir.analysis import analyze_implicit_usage

from chunkrt.errors import QuantizationError, UnsupportedModelError
from chunkrt.graph.partition import Planned
from chunkrt.onnx.exporting.emitter import LARGEST_FLOAT16
from chunkrt.onnx.exporting.export_settings import Settings, WindowSettings
from chunkrt.onnx.exporting.forms import tied_weights, window_model
from chunkrt.onnx.exporting.integer_weights import with_rounded_weights
from chunkrt.onnx.window_session import OnnxSession

NUM_ROWS = 16
"""Number of tokens in the window that is run. The cost hardly depends on it, because reading all weights takes most of
the time.
"""

TOLERANCE, FLOAT16_TOLERANCE = 1e-4, 2e-2
"""Tolerances relative to the largest logit for exports that compute in float32 and in float16."""

Array = NDArray[Any]

log = logging.getLogger(__name__)


def check_float16(
    planned: Planned, settings: Settings, progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Run a short window of tokens spread over the vocabulary, after the token that begins texts.

    The window runs the linears, norms and residual stream that all forms of export share. Memory holds one weight at a
    time. For types other than float16 the check is skipped.

    Args:
        progress: called with (nodes evaluated, total).

    Raises:
        QuantizationError: a value or a weight exceeds float16; the message states its name and magnitude.
    """
    if settings.dtype != "fp16":
        return
    rows = min(NUM_ROWS, planned.plan.context_length)
    short = WindowSettings(window=rows, sequence=rows, context=rows, dtype=settings.dtype, opset=settings.opset)
    try:
        model = window_model(with_rounded_weights(planned, settings, tied_weights(planned)), short)
    except UnsupportedModelError as error:
        log.warning("skipping the check that values fit float16: %s", error)
        return
    evaluate(model, window_feeds(model, spread_tokens(planned, rows)), progress)


def spread_tokens(planned: Planned, count: int) -> NDArray[np.int64]:
    """Return tokens spread over the vocabulary, after the token that begins texts."""
    tokens = np.linspace(0, planned.plan.vocab_size - 1, count, dtype=np.int64)
    bos = planned.source.config.get("bos_token_id")
    if isinstance(bos, int) and 0 <= bos < planned.plan.vocab_size:
        tokens[0] = bos
    return tokens


def window_feeds(model: ir.Model, tokens: NDArray[np.int64]) -> dict[str, Array]:
    """Return the inputs of a window that the first tokens fill."""
    feeds = {
        str(value.name): np.zeros(value.shape.numpy(), value.dtype.numpy())
        for value in model.graph.inputs
        if value.shape is not None and value.dtype is not None
    }
    is_token = np.arange(feeds["attention_mask"].size)[::-1] < len(tokens)
    return feeds | {"input_ids": tokens[None], "attention_mask": is_token[None].astype(np.int64)}


def evaluate(model: ir.Model, feeds: Mapping[str, Array], progress: Callable[[int, int], None]) -> dict[str, Array]:
    """Return a model's outputs by name; other values are dropped after their last use. Raises as `check_float16`."""
    values, nodes, opsets = dict(feeds), list(model.graph), dict(model.graph.opset_imports)
    captured = _captured(model)
    readers = Counter(value.name for node in nodes for value in {*node.inputs, *captured[node]} if value is not None)
    readers.update(value.name for value in model.graph.outputs)
    for done, node in enumerate(nodes):
        progress(done, len(nodes))
        inputs = [None if value is None else _read(value, values) for value in node.inputs]
        beside = {str(value.name): _read(value, values) for value in captured[node]}
        with np.errstate(all="ignore"):
            for value, output in zip(node.outputs, _evaluate(node, inputs, opsets, beside), strict=True):
                if output.dtype == np.float16 and not np.isfinite(output).all():
                    _refuse(str(value.name), node, inputs, opsets, beside)
                values[str(value.name)] = output
        for name in {value.name for value in (*node.inputs, *captured[node]) if value is not None}:
            readers[name] -= 1
            if not readers[name]:
                values.pop(str(name), None)
    progress(len(nodes), len(nodes))
    return {str(value.name): values[str(value.name)] for value in model.graph.outputs}


def _captured(model: ir.Model) -> dict[ir.Node, set[ir.Value]]:
    """Return for each node the graph's values that its bodies read."""
    usage = analyze_implicit_usage(model.graph)
    captured: dict[ir.Node, set[ir.Value]] = {}
    for node in model.graph:
        bodies = [
            attribute.as_graph() for attribute in node.attributes.values() if attribute.type == ir.AttributeType.GRAPH
        ]
        of_graph = (value for body in bodies for value in usage[body])
        captured[node] = {value for value in of_graph if value.graph is model.graph}
    return captured


def _read(value: ir.Value, values: Mapping[str, Array]) -> Array:
    return values[str(value.name)] if value.const_value is None else value.const_value.numpy()


def _evaluate(
    node: ir.Node, inputs: Sequence[Array | None], opsets: dict[str, int], beside: Mapping[str, Array]
) -> list[Array]:
    """Evaluate a node, whose bodies read the values `beside` it. Products of matrices are summed in float32, as in
    hardware; NumPy has no fast float16 products.
    """
    if node.op_type == "MatMul":
        left, right = inputs
        assert left is not None
        assert right is not None
        return [_product(left, right)]
    if node.op_type == "GatherElements":  # ONNX's reference supports positive axes only
        data, indices = inputs
        assert data is not None
        assert indices is not None
        return [np.take_along_axis(data, indices, node.attributes["axis"].as_int())]
    proto = ir.to_proto(node)
    given = {**dict(zip(proto.input, inputs, strict=True)), **beside}
    names = [name for name in given if name]
    graph = onnx.GraphProto(node=[proto], name="node")
    graph.input.extend(onnx.ValueInfoProto(name=name) for name in names)
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in proto.output)
    return cast(list[Array], ReferenceEvaluator(graph, opsets=opsets).run(None, {name: given[name] for name in names}))


def _product(left: Array, right: Array) -> Array:
    """Compute left @ right in the operands' type, one matrix of a batch at a time."""
    axes = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    lefts = np.broadcast_to(left, (*axes, *left.shape[-2:]))
    rights = np.broadcast_to(right, (*axes, *right.shape[-2:]))
    result = np.empty((*axes, left.shape[-2], right.shape[-1]), left.dtype)
    for index in np.ndindex(axes):
        result[index] = lefts[index].astype(np.float32, copy=False) @ rights[index].astype(np.float32, copy=False)
    return result


def _refuse(
    name: str, node: ir.Node, inputs: Sequence[Array | None], opsets: dict[str, int], beside: Mapping[str, Array]
) -> None:
    """Raise QuantizationError with the magnitude of the node's result in float32."""
    narrow = node.op_type == "Cast"
    wide = [None if x is None or x.dtype != np.float16 else x.astype(np.float32) for x in inputs]
    given = [x if y is None else y for x, y in zip(inputs, wide, strict=True)]
    results = given[:1] if narrow else _evaluate(node, given, opsets, beside)
    largest = max(float(np.abs(result).max()) for result in results if result is not None)
    if not np.isfinite(largest):
        raise QuantizationError(f"{name} is not finite in float32 either; the checkpoint is damaged")
    raise QuantizationError(
        f"{name} reaches {largest:g} on {NUM_ROWS} tokens, which exceeds float16's {LARGEST_FLOAT16:g}; use --dtype "
        "fp32"
    )


def check_integers(planned: Planned, settings: WindowSettings, paths: Sequence[Path]) -> None:
    """Compare written windows with integer weights, on ONNX Runtime, with the decoder whose float32 weights have the
    values of the integers. The decoder is evaluated by ONNX's own reference.

    Raises:
        QuantizationError: the logits differ, so activations or weights were rounded in another way. Some kernels round
            activations, but only with prepacked weights.
        ModelError: ONNX Runtime cannot load a file.
    """
    rows, length = min(NUM_ROWS, settings.sequence), settings.sequence  # the length selects the rotary table
    exact = WindowSettings(window=rows, sequence=length, context=length, dtype="fp32", opset=settings.opset)
    model = window_model(with_rounded_weights(planned, settings, tied_weights(planned)), exact)
    tokens = spread_tokens(planned, rows)
    expected = evaluate(model, window_feeds(model, tokens), lambda done, total: None)["logits"][0]
    tolerance = FLOAT16_TOLERANCE if settings.dtype == "fp16" else TOLERANCE
    for path in paths:
        session = OnnxSession(path, prepack=True)
        found = session.run(tokens.tolist()) if session.batch == 1 else session.run([tokens.tolist()] * session.batch)
        for logits in [found] if isinstance(found, np.ndarray) else found:
            difference = float(np.abs(logits - expected[-len(logits) :]).max() / max(np.abs(expected).max(), 1e-30))
            if not difference <= tolerance:
                raise QuantizationError(
                    f"{path} differs on ONNX Runtime from its {settings.weights} weights with float activations by "
                    f"{difference:.2g} of the largest logit, expected at most {tolerance:g}; use --weights float"
                )
        log.info("%s agrees with its %s weights to %.2g of the largest logit", path, settings.weights, difference)
