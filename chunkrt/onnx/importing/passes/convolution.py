"""Conversion of LFM2's gated short convolution to chunkrt's LinearAttention of the kind "short_conv".

columns B, C, x of one linear:  C * convolve(B * x)
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import onnx_ir as ir

from chunkrt.graph.plan import DOMAIN
from chunkrt.onnx.importing.constants import is_constant, numbers, row, stored
from chunkrt.onnx.importing.draft import CONTRIB, Draft, Weight, input_of, int_attribute, producer, width
from chunkrt.onnx.importing.projections import Projection, find_projection, merge

BY_CHANNEL = (0, 2, 1)
"""The permutation from [batch, T, C] to [batch, C, T], which is its own inverse."""


def raise_convolutions(draft: Draft) -> None:
    """Replace gated short convolutions by LinearAttention.

    Requires: linears are converted. Ensures: a convolution with state, and all nodes between the linears before and
    after it, is LinearAttention(qkv, -, -, weight, bias, state).

    Raises:
        UnsupportedModelError: the convolution is not between two gates that are thirds of one linear, or has an
            activation.
    """
    for node in list(draft.graph):
        if (node.domain, node.op_type) == (CONTRIB, "CausalConvWithState"):
            _raise(draft, node)


def _raise(draft: Draft, node: ir.Node) -> None:
    activation = node.attributes.get("activation")
    if activation is not None and activation.value not in ("none", ""):
        raise draft.unsupported(node, f"its activation is {activation.value!r}, expected none")
    past = check_convolution(draft, node)
    if int_attribute(node, "channels_last"):
        raise draft.unsupported(node, "it has rows where its gates have channels")
    gated = producer(node.inputs[0], "Mul")
    users = [user for user, _ in node.outputs[0].uses()]
    if gated is None or len(users) != 1 or users[0].op_type != "Mul":
        raise draft.unsupported(node, "it is not multiplied by a gate before and after")
    others = [value for value in users[0].inputs if value is not node.outputs[0]]
    thirds = [_part(draft, value) for value in (gated.inputs[0], others[0], gated.inputs[1])]
    parts = [part for part in thirds if part is not None]
    results = [user for user, _ in users[0].outputs[0].uses()]
    if len(parts) < 3 or any(not is_transposition(user) for user in results):
        raise draft.unsupported(node, "its gates are not parts of one linear layer's result")
    weight, bias = convolution_weights(draft, node)
    before, after, x = parts
    if x.columns[0] < before.columns[0]:  # the factors of a product have no order, but the linear's columns have
        before, x = x, before
    if (qkv := merge(draft, node, [before, after, x])) is None:
        raise draft.unsupported(node, "its gates are not parts of one linear layer's result")
    channels = draft.shape(weight)[0]
    if any(len(part.columns) != channels for part in (before, after, x)):
        raise draft.unsupported(node, f"its gates do not have {channels} columns each")
    (output,) = draft.insert(
        node,
        "LinearAttention",
        [qkv, None, None, weight, bias, past],
        domain=DOMAIN,
        attn_type="short_conv",
        num_k_heads=1,
        num_v_heads=1,
        head_k_dim=channels,
        head_v_dim=channels,
    )
    for user in results:
        draft.replace(user.outputs[0], output)


def check_convolution(draft: Draft, node: ir.Node) -> ir.Value:
    """Return the past of a CausalConvWithState. Raises UnsupportedModelError for unsupported kinds."""
    if int_attribute(node, "ndim", 1) != 1 or int_attribute(node, "state_window"):
        raise draft.unsupported(node, "it is not one-dimensional, or has a window of states")
    if int_attribute(node, "dilation", 1) != 1:
        raise draft.unsupported(node, f"its dilation is {int_attribute(node, 'dilation', 1)}, expected 1")
    past = input_of(node, 3)
    if past is None or past.name not in draft.signature.states:
        raise draft.unsupported(node, "its past is not an input of the model with an output for its new value")
    return past


def convolution_weights(draft: Draft, node: ir.Node) -> tuple[ir.Value, ir.Value | None]:
    """Return the weights [channels, 1, taps] and the optional bias [channels] of a convolution."""
    kernel, bias = node.inputs[1], input_of(node, 2)
    if kernel is None or not is_constant(draft, kernel):
        raise draft.unsupported(node, "its weight is not constant")
    tensor = stored(draft, kernel)
    if len(tensor.shape) != 3 or tensor.shape[1] != 1 or tensor.shape[2] < 2:
        raise draft.unsupported(node, f"its weight has the shape {list(tensor.shape)}, expected [channels, 1, taps]")
    weight = draft.add_weight(Weight(tensors=(draft.keep(kernel.name or "", tensor),), layout="as it is"))
    if bias is None:
        return weight, None
    if (name := row(draft, bias)) is None:
        raise draft.unsupported(node, "its bias is not a constant vector")
    return weight, draft.add_weight(Weight(tensors=(name,), layout="as it is"))


def is_transposition(node: ir.Node) -> bool:
    """Return whether a node transposes rows to channels, or channels to rows."""
    perm = node.attributes.get("perm")
    return node.op_type == "Transpose" and perm is not None and tuple(perm.value) == BY_CHANNEL


def _part(draft: Draft, value: ir.Value | None) -> Projection | None:
    """Return channels of a transposed linear, as columns of the linear."""
    split = producer(value, "Split")
    if value is None or split is None or int_attribute(split, "axis") != 1:
        return None
    turned = producer(split.inputs[0], "Transpose")
    if turned is None or not is_transposition(turned):
        return None
    whole, columns = find_projection(draft, turned.inputs[0]), width(draft, turned.inputs[0])
    sizes = input_of(split, 1)
    if whole is None or columns is None:
        return None
    count = len(split.outputs)
    if sizes is not None and is_constant(draft, sizes):
        ends = list(accumulate(int(size) for size in numbers(draft, sizes)))
    elif sizes is None and columns % count == 0:
        ends = [columns // count * (i + 1) for i in range(count)]
    else:
        return None
    index = list(split.outputs).index(value)
    if len(ends) != count or ends[-1] != columns:
        return None
    chosen = np.arange([0, *ends][index], ends[index])
    return Projection(product=whole.product, bias=whole.bias, value=whole.value, columns=whole.columns[chosen])
