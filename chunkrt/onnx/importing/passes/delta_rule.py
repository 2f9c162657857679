"""Conversion of com.microsoft's LinearAttention to chunkrt's LinearAttention of the kind "gated_delta_rule".

Exporters write the part between the convolution and the recurrence (the activation, the order of queries, keys and
values, their normalisation and scale) in many ways. Instead of matching patterns, the pass runs all nodes from the
convolution's input to the result on random values, and requires the values of chunkrt's operator.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from chunkrt.backends.recurrences import linear_attention
from chunkrt.graph.plan import DOMAIN
from chunkrt.onnx.importing.constants import is_constant, numbers, row
from chunkrt.onnx.importing.draft import (
    CONTRIB,
    Draft,
    Weight,
    float_attribute,
    input_of,
    int_attribute,
    producer,
    width,
)
from chunkrt.onnx.importing.evaluation import decimal
from chunkrt.onnx.importing.passes.convolution import check_convolution, convolution_weights, is_transposition
from chunkrt.onnx.importing.projections import find_projection, merge

TOLERANCE, FLOAT16_TOLERANCE = 1e-4, 2e-2
"""Tolerance relative to the largest value, at the lengths of `regions.PROBE`."""

Array = NDArray[Any]


def raise_decays(draft: Draft) -> None:
    """Express LinearAttentionGate by standard operators.

    Requires: nothing. Ensures: LinearAttentionGate is Mul(Softplus(Add(a, w)), w) and Sigmoid(b).
    """
    for node in list(draft.graph):
        if (node.domain, node.op_type) != (CONTRIB, "LinearAttentionGate"):
            continue
        names = [None if v is None else row(draft, v) for v in node.inputs[1:3]]
        bias, rate = (None if n is None else draft.add_weight(Weight(tensors=(n,), layout="as it is")) for n in names)
        if bias is None or rate is None:
            raise draft.unsupported(node, "its bias or its scale is not a constant vector")
        (biased,) = draft.insert(node, "Add", [node.inputs[0], bias])
        (softplus,) = draft.insert(node, "Softplus", [biased])
        draft.replace(node.outputs[0], draft.insert(node, "Mul", [softplus, rate])[0])
        if len(node.outputs) > 1:
            draft.replace(node.outputs[1], draft.insert(node, "Sigmoid", [input_of(node, 3)])[0])
        draft.graph.remove(node, safe=True)


def raise_delta_rules(draft: Draft) -> None:
    """Replace recurrences by LinearAttention.

    Requires: linears and decays are converted. Ensures: a recurrence and the convolution before it are
    LinearAttention(qkv, decay, step, weight, bias, conv_state, recurrent_state), and the linears of decay and step are
    halves of one.

    Raises:
        UnsupportedModelError: the recurrence is of another kind, or its values differ from those of chunkrt's operator.
    """
    for node in list(draft.graph):
        if (node.domain, node.op_type) == (CONTRIB, "LinearAttention"):
            _raise(draft, node)


def raise_gated_norms(draft: Draft) -> None:
    """Express GatedRMSNorm by HeadNorm and Mul.

    Requires: recurrences are converted. Ensures: GatedRMSNorm is Mul(HeadNorm(x), activation(gate)).
    """
    for node in list(draft.graph):
        if (node.domain, node.op_type) != (CONTRIB, "GatedRMSNorm"):
            continue
        x, scale, gate = node.inputs[:3]
        activation = _string(node, "activation", "silu")
        columns, name = width(draft, x), None if scale is None else row(draft, scale)
        if columns is None or name is None or columns % (head_dim := draft.source.info(name).shape[0]):
            raise draft.unsupported(node, "its weight is not a constant vector with the columns of a head")
        if activation not in ("silu", "swish", "sigmoid"):
            raise draft.unsupported(node, f"its activation is {activation!r}")
        weight = draft.add_weight(Weight(tensors=(name,), layout="heads", repeats=(columns // head_dim,)))
        epsilon = decimal(float_attribute(node, "epsilon", 1e-5))
        (normed,) = draft.insert(node, "HeadNorm", [x, weight], domain=DOMAIN, epsilon=epsilon)
        (active,) = draft.insert(node, "Sigmoid", [gate])
        if activation != "sigmoid":
            (active,) = draft.insert(node, "Mul", [gate, active])
        draft.replace(node.outputs[0], draft.insert(node, "Mul", [normed, active])[0])
        draft.graph.remove(node, safe=True)


def _raise(draft: Draft, node: ir.Node) -> None:
    rule = _string(node, "update_rule", "gated_delta")
    past, decay, beta = (input_of(node, index) for index in (3, 4, 5))
    if rule != "gated_delta" or decay is None or beta is None:
        raise draft.unsupported(node, f"its update_rule is {rule!r} or it has no decay or no step")
    if int_attribute(node, "state_window"):
        raise draft.unsupported(node, "it has a window of states")
    if past is None or past.name not in draft.signature.states or past.shape is None:
        raise draft.unsupported(node, "its past is not an input of the model with an output for its new value")
    convolution = _convolution(draft, node)
    conv_past = check_convolution(draft, convolution)
    before = producer(convolution.inputs[0], "Transpose")
    is_by_row = bool(int_attribute(convolution, "channels_last"))
    if is_by_row or before is None or not is_transposition(before):
        raise draft.unsupported(convolution, "its input is not rows that were transposed to channels")
    rows, sizes = before.inputs[0], past.shape[-2:]
    k_heads, v_heads = int_attribute(node, "q_num_heads"), int_attribute(node, "kv_num_heads")
    k_dim, v_dim = (size if isinstance(size, int) else 0 for size in sizes)
    columns = 2 * k_heads * k_dim + v_heads * v_dim
    if min(k_heads, v_heads, k_dim, v_dim) < 1 or v_heads % k_heads or width(draft, rows) != columns:
        raise draft.unsupported(
            node,
            f"{k_heads} query and key heads and {v_heads} value heads, of {k_dim} and {v_dim} columns, do not "
            f"divide {width(draft, rows)} columns",
        )
    weight, bias = convolution_weights(draft, convolution)
    if draft.shape(weight)[0] != columns:
        raise draft.unsupported(convolution, f"it has {draft.shape(weight)[0]} channels, expected {columns}")
    heads = {"num_k_heads": k_heads, "num_v_heads": v_heads, "head_k_dim": k_dim, "head_v_dim": v_dim}
    has_unit_length = _find_length(draft, node, convolution, heads)
    if bias is not None and is_constant(draft, convolution.inputs[2]):
        given = convolution.inputs[2]
        bias = bias if given is not None and numbers(draft, given).any() else None
    _merge_gates(draft, decay, beta)
    (output,) = draft.insert(
        node,
        "LinearAttention",
        [rows, decay, beta, weight, bias, conv_past, past],
        domain=DOMAIN,
        attn_type="gated_delta_rule",
        use_qk_l2norm=int(has_unit_length),
        **heads,
    )
    draft.replace(node.outputs[0], output)


def _convolution(draft: Draft, node: ir.Node) -> ir.Node:
    """Return the convolution from which queries, keys and values are made."""
    found: dict[ir.Node, None] = {}
    pending, seen = list(node.inputs[:3]), set()
    while pending:
        value = pending.pop()
        maker = None if value is None or value in seen else value.producer()
        seen.add(value)
        if maker is None or draft.evaluator.is_positional((value.name if value is not None else "") or ""):
            continue
        if (maker.domain, maker.op_type) == (CONTRIB, "CausalConvWithState"):
            found[maker] = None
        elif maker.domain == DOMAIN or maker.op_type == "MatMul":
            raise draft.unsupported(node, "its queries, keys and values do not all come from a convolution")
        else:
            pending += maker.inputs
    if len(found) != 1:
        raise draft.unsupported(node, f"its queries, keys and values come from {len(found)} convolutions, expected one")
    return next(iter(found))


def _find_length(draft: Draft, node: ir.Node, convolution: ir.Node, heads: dict[str, int]) -> bool:
    """Return whether queries and keys are normalised to unit length, from the results of random rows, decays, steps and
    states.

    Raises:
        UnsupportedModelError: the results differ from chunkrt's, with unit length and without it.
    """
    given = _random(draft, node, convolution, heads)
    found = _results(draft, node, convolution, given)
    kernel, bias = (None if v is None else numbers(draft, v) for v in (convolution.inputs[1], convolution.inputs[2]))
    assert kernel is not None
    tolerance = TOLERANCE if all(array.dtype == np.float32 for array in given) else FLOAT16_TOLERANCE
    for has_unit_length in (True, False):
        x, decay, beta, conv_state, recurrent = (array[0].astype(np.float32) for array in given)
        output = linear_attention(
            x.T,
            decay,
            beta,
            kernel.astype(np.float32),
            None if bias is None else bias.astype(np.float32),
            conv_state,
            recurrent,
            None,
            attn_type="gated_delta_rule",
            use_qk_l2norm=int(has_unit_length),
            **heads,
        )
        expected = (output, conv_state, recurrent)
        if all(_agree(*pair, tolerance) for pair in zip(found, expected, strict=True)):
            return has_unit_length
    raise draft.unsupported(
        node,
        f"with the convolution {convolution.name!r} it computes other numbers than the gated delta rule, with queries "
        "and "
        "keys of unit length or without",
    )


def _random(draft: Draft, node: ir.Node, convolution: ir.Node, heads: dict[str, int]) -> list[Array]:
    """Return random values of the convolution's input [1, C, T], the decay and the step [1, T, Hv], and both states."""
    rng, length = np.random.default_rng(0), draft.regions.probe.length
    types = {v.name: np.dtype(v.dtype.numpy()) for v in draft.graph.inputs if v.dtype is not None}
    conv_past, past = convolution.inputs[3], node.inputs[3]
    assert conv_past is not None
    assert past is not None
    kernel = convolution.inputs[1]
    assert kernel is not None
    channels, _, taps = numbers(draft, kernel).shape
    v_heads, k_dim, v_dim = (heads[name] for name in ("num_v_heads", "head_k_dim", "head_v_dim"))
    shapes = [(1, channels, length), (1, channels, taps - 1), (1, v_heads, k_dim, v_dim)]
    x, conv_state, state = (rng.standard_normal(shape) for shape in shapes)
    decay = -np.abs(rng.standard_normal((1, length, v_heads)))
    beta = rng.uniform(0, min(1, 4 / k_dim), decay.shape)  # small enough for keys of any length
    rows = (array.astype(types[conv_past.name]) for array in (x, decay, beta, conv_state))
    return [*rows, state.astype(types[past.name])]


def _results(draft: Draft, node: ir.Node, convolution: ir.Node, given: list[Array]) -> list[Array]:
    """Return the foreign graph's result [T, Hv * dv] and both new states."""
    result, state = (output.name or "" for output in node.outputs[:2])
    new_conv = convolution.outputs[1].name or ""
    of_rule, of_conv = (draft.regions.writer(name) for name in (result, new_conv))
    names = [of_conv.input[0], *of_rule.input[4:6], of_conv.input[3], of_rule.input[3]]
    roots = dict(zip(names, given, strict=True))
    for target in (result, new_conv, state):
        for name in draft.regions.positional_inputs(target, set(names)):
            if name not in draft.regions.fixed and not draft.regions.is_size(name):
                raise draft.unsupported(node, f"its input depends on {name!r}, which changes with the length")
    return [draft.regions.part(name, roots)(roots)[0].astype(np.float32) for name in (result, new_conv, state)]


def _agree(found: Array, expected: Array, tolerance: float) -> bool:
    return found.shape == expected.shape and bool(np.abs(found - expected).max() <= tolerance * np.abs(expected).max())


def _merge_gates(draft: Draft, decay: ir.Value, beta: ir.Value) -> None:
    """Merge the linears of step and decay into one with a Split, if they have the same input."""
    sigmoid, scaled = producer(beta, "Sigmoid"), producer(decay, "Mul")
    softplus = producer(scaled.inputs[0], "Softplus") if scaled is not None else None
    biased = producer(softplus.inputs[0], "Add") if softplus is not None else None
    if sigmoid is None or biased is None:
        return
    b, a = sigmoid.inputs[0], biased.inputs[0]
    parts = [part for value in (b, a) if (part := find_projection(draft, value)) is not None]
    if len(parts) < 2 or a is None or b is None or a is b:
        return
    first = next(node for node in draft.graph if node in (parts[0].value.producer(), parts[1].value.producer()))
    if (merged := merge(draft, first, parts)) is None:
        return
    halves = draft.insert(first, "Split", [merged], num_outputs=2, axis=-1)
    draft.replace(b, halves[0])
    draft.replace(a, halves[1])


def _string(node: ir.Node, name: str, default: str) -> str:
    found = node.attributes.get(name)
    return default if found is None else str(found.value)
