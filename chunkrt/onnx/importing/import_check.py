"""Verification of an import: one run of the original on ONNX Runtime, compared with the imported decoder.

Some exports round activations to int8 before each product. chunkrt leaves rounding to its schemes, so the import is
compared with the same graph and weights without rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from chunkrt.backends.onnx.onnxrt import OnnxRuntimeExecutable
from chunkrt.engine_directory.store import WeightStore
from chunkrt.errors import ModelError, UnsupportedModelError
from chunkrt.graph.plan import Plan, resolve
from chunkrt.onnx.importing.draft import CONTRIB
from chunkrt.onnx.importing.evaluation import open_session, reason_of
from chunkrt.onnx.importing.exported import export_settings
from chunkrt.onnx.importing.onnx_source import OnnxSource
from chunkrt.onnx.importing.preparing import is_prepared
from chunkrt.onnx.importing.signature import Probe, Signature, feeds, find_signature, fixed_window, inputs_of
from chunkrt.quant.scheme import SCHEMES

ROUNDING = {
    ("", "DynamicQuantizeLinear"),
    ("", "MatMulInteger"),
    (CONTRIB, "DynamicQuantizeMatMul"),
    (CONTRIB, "MatMulNBits"),
}
"""Operators that round activations, or may round them."""


def is_exact(proto: onnx.ModelProto) -> bool:
    """Return whether a model does not round activations."""
    return not any((node.domain, node.op_type) in ROUNDING for node in proto.graph.node)


def without_rounding(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model whose products take float activations; weights have the values of their integers.

    Ensures: DynamicQuantizeLinear returns its input with a scale of 1 and a zero point of 0; MatMulInteger multiplies
    floats; MatMulNBits computes in float32.
    """
    exact = onnx.ModelProto()
    exact.CopyFrom(proto)
    nodes = [made for node in exact.graph.node for made in _exact(node)]
    del exact.graph.node[:]
    exact.graph.node.extend(nodes)
    return exact


def _exact(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    if (node.domain, node.op_type) == (CONTRIB, "MatMulNBits"):
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 1
    if (node.domain, node.op_type) == ("", "DynamicQuantizeLinear"):
        values, scale, zero = node.output
        return [
            helper.make_node("Identity", [node.input[0]], [values]),
            _constant(scale, np.float32(1)),
            _constant(zero, np.float32(0)),
        ]
    if (node.domain, node.op_type) == ("", "MatMulInteger"):
        weight, nodes = _float_weight(node, node.input[1], node.input[3] if len(node.input) > 3 else "")
        return [*nodes, helper.make_node("MatMul", [node.input[0], weight], node.output)]
    if (node.domain, node.op_type) == (CONTRIB, "DynamicQuantizeMatMul"):
        x, matrix, scale, zero, bias = (*node.input, "", "")[:5]
        weight, nodes = _float_weight(node, matrix, zero)
        result = f"{node.output[0]}.product" if bias else node.output[0]
        nodes.append(helper.make_node("Mul", [weight, scale], [f"{weight}.scaled"]))
        nodes.append(helper.make_node("MatMul", [x, f"{weight}.scaled"], [result]))
        return [*nodes, helper.make_node("Add", [result, bias], node.output)] if bias else nodes
    return [node]


def _float_weight(node: onnx.NodeProto, weight: str, zero: str) -> tuple[str, list[onnx.NodeProto]]:
    """Subtract the zero point from integers, as floats; the difference is named after the node's result."""
    name = f"{node.output[0]}.weight"
    nodes = [helper.make_node("Cast", [weight], [name], to=onnx.TensorProto.FLOAT)]
    if zero:
        nodes.append(helper.make_node("Cast", [zero], [f"{name}.zero"], to=onnx.TensorProto.FLOAT))
        nodes.append(helper.make_node("Sub", [name, f"{name}.zero"], [f"{name}.shifted"]))
        name = f"{name}.shifted"
    return name, nodes


def _constant(name: str, value: np.float32) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(value)))


NUM_TOKENS = 33
BEYOND_WINDOW, LARGEST_WINDOW = 9, 1024
"""Number of tokens by which a run exceeds a window, so that the window moves, and the largest window to which this
applies.
"""

TOLERANCE, FLOAT16_TOLERANCE = 1e-4, 2e-2
"""Tolerances relative to the largest logit. An original that computes in float16 differs from float32 by that much."""

HALVES = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)

Load = Callable[[str], NDArray[np.float32]]
log = logging.getLogger(__name__)


def verify(source: OnnxSource, plan: Plan, load: Load) -> float:
    """Compare an imported decoder with its original on random tokens. This works only once, because it releases the
    original.

    Args:
        source: from `import_decoder`.
        plan: of the import, without shadows.
        load: returns a weight's values, by its plan name.

    Returns:
        The largest difference of two logits, relative to the largest logit.

    Raises:
        ModelError: the difference exceeds the tolerance, or ONNX Runtime cannot run the original.
    """
    file, proto, source.original = source.file, source.original, None
    assert proto is not None, "it was verified before"
    window = plan.window or 0
    wanted = max(NUM_TOKENS, window + BEYOND_WINDOW) if window <= LARGEST_WINDOW else NUM_TOKENS
    exported = export_settings(proto)
    fixed = None if exported else fixed_window(inputs_of(proto), find_signature(proto, file.name), file.name)
    if fixed is not None:  # as many whole windows as hold the tokens, at least one
        wanted = max(fixed.length, min(wanted, plan.context_length) // fixed.length * fixed.length)
    num_tokens = min(wanted, plan.context_length)
    if fixed is not None and num_tokens < fixed.length:
        raise UnsupportedModelError(
            f"{file.name} is a window of {fixed.length} tokens, but its context has {plan.context_length}; export a "
            "shorter window"
        )
    tokens = np.random.default_rng(0).integers(0, plan.vocab_size, num_tokens)
    if exported.get("form") == "window":
        tokens = tokens[: int(exported["sequence"])]
        expected = _by_windows(file, tokens)
    else:
        expected = original_logits(file, proto, tokens, plan)
    context = int(exported.get("context") or num_tokens)
    found = imported_logits(plan, load, tokens, context)[-len(expected) :]  # some exports give the last logits only
    difference = float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-30))
    tolerance = FLOAT16_TOLERANCE if _has_halves(proto) else TOLERANCE
    if not (isfinite(difference) and difference <= tolerance):
        raise ModelError(
            f"{file}: the imported decoder differs from the original on ONNX Runtime by {difference:.2g} of the "
            f"largest logit, over {len(tokens)} tokens; expected at most {tolerance:g}; please report this model"
        )
    log.info("%s: the import agrees with the original to %.2g of the largest logit", file, difference)
    return difference


def original_logits(file: Path, proto: onnx.ModelProto, tokens: NDArray[np.int64], plan: Plan) -> NDArray[np.float32]:
    """Compute the original's logits [T, V] of a prompt.

    Activations are not rounded to integers, even if the original does so: see `without_rounding`.

    Args:
        plan: the import's plan, whose states, in the same order, have the widths that the original may leave open.

    Raises:
        ModelError: ONNX Runtime cannot run it.
    """
    signature, known = find_signature(proto, file.name), inputs_of(proto)
    window = fixed_window(known, signature, file.name)
    widths = {}
    if signature.states:
        pairs = zip(signature.states, plan.state_tensors, strict=True)
        widths = {name: int(tensor.shape[-1]) for name, tensor in pairs}
    inputs = feeds(signature, known, window or Probe(0, len(tokens)), widths)
    try:
        session = original_session(file, proto)
        if window is not None:
            return _in_windows(session, signature, inputs, window, tokens)
        inputs[signature.tokens] = tokens[None].astype(inputs[signature.tokens].dtype)
        (logits,) = session.run([signature.logits], inputs)
    except Exception as error:  # onnxruntime raises a dozen unrelated types
        raise ModelError(f"ONNX Runtime cannot run {file} to compare with: {reason_of(error)}") from error
    return _rows(logits)


def _in_windows(
    session: Any,
    signature: Signature,
    inputs: dict[str, NDArray[np.generic]],
    window: Probe,
    tokens: NDArray[np.int64],
) -> NDArray[np.float32]:
    """Compute the logits of whole windows, one after another; the mask hides the slots that are still empty.

    Args:
        inputs: arrays of the inputs' types and sizes, for one run.
    """
    logits = []
    for start in range(0, len(tokens) - window.length + 1, window.length):
        end = start + window.length
        inputs[signature.tokens][:] = tokens[None, start:end]
        inputs[signature.positions][:] = np.arange(start, end)
        inputs[signature.mask][:] = np.arange(window.past + window.length) >= window.past - start
        states = signature.states.values()
        found, *presents = session.run([signature.logits, *(state.present for state in states)], inputs)
        logits.append(_rows(found))
        for state, present in zip(states, presents, strict=True):
            inputs[state.past] = present[:, :, present.shape[2] - window.past :]
    return np.concatenate(logits)


def _rows(logits: NDArray[Any]) -> NDArray[np.float32]:
    """Return logits as [T, V] in float32."""
    flat: NDArray[np.float32] = logits.reshape(-1, logits.shape[-1]).astype(np.float32)
    return flat


def original_session(file: Path, proto: onnx.ModelProto) -> Any:
    """Open an ONNX Runtime session of a model that does not round activations. The file itself is opened if it rounds
    no activations and contains its weights.
    """
    if (
        is_exact(proto)
        and not is_prepared(proto)
        and not any(tensor.external_data for tensor in proto.graph.initializer)
    ):
        return open_session(file)
    return open_session(without_rounding(proto))


def _has_halves(proto: onnx.ModelProto) -> bool:
    """Return whether a model has weights in float16 or bfloat16, and therefore computes in these types."""
    return any(tensor.data_type in HALVES for tensor in proto.graph.initializer)


def _by_windows(file: Path, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    """Compute the logits of an exported fixed window, run as intended."""
    from chunkrt.onnx.window_session import OnnxSession

    return np.asarray(OnnxSession(file).run(tokens.tolist()), np.float32)


def imported_logits(plan: Plan, load: Load, tokens: NDArray[np.int64], context: int) -> NDArray[np.float32]:
    """Compute an imported decoder's logits [T, V] of a prompt, in float; memory holds one subgraph's weights at a time.

    Args:
        context: number of tokens that selects between rotary tables.
    """
    length = len(tokens)
    values: dict[str, NDArray[np.generic]] = {
        "input_ids": tokens.astype(np.int64),
        "logit_rows": np.arange(length),
        "position": np.zeros(1, np.int64),
        "rope_position": np.full(1, plan.rope_offset(context)),
    }
    sizes = {"T": length, "R": length, **plan.slots(length, length)}
    for subgraph in plan.subgraphs:
        arrays = {name: np.ascontiguousarray(load(name)) for name in subgraph.weights}
        executable = OnnxRuntimeExecutable((subgraph,), plan, SCHEMES["float"], WeightStore(arrays, {}))
        states = {n: np.zeros(resolve(plan.tensors[n].shape, sizes), np.float32) for n in subgraph.state}
        outputs = {n: np.empty(resolve(plan.tensors[n].shape, sizes), np.float32) for n in subgraph.outputs}
        executable.run({n: values[n] for n in (*subgraph.inputs, *subgraph.shared_state)} | states, outputs)
        values |= outputs | states
    logits: NDArray[np.float32] = values[plan.output].astype(np.float32, copy=False)
    return logits
