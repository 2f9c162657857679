"""Conversion of attention nodes to chunkrt's CachedAttention over one linear of queries, keys and values.

This pass handles attention operators. `decomposed/` has already composed such operators from small operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from chunkrt.graph.plan import DOMAIN
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
from chunkrt.onnx.importing.passes.norms import results_of, rows_of
from chunkrt.onnx.importing.passes.rotary import Tables, make_tables, take_off
from chunkrt.onnx.importing.positions import check_positions, check_total, find_window
from chunkrt.onnx.importing.projections import find_projection, merge


@dataclass(frozen=True, kw_only=True)
class AttentionNode:
    """Description of an attention node, regardless of its form.

    Attributes:
        query, key, value: rows before RoPE; key and value are None if the query holds all three.
        window: number of keys that a row sees, including its own; 0 for all earlier keys.
        scale: factor of the scores; 0 for head_dim^-1/2.
        results: name of the value that holds the result as rows; by default the node's first output.
    """

    query: ir.Value
    key: ir.Value | None
    value: ir.Value | None
    past_key: ir.Value | None
    past_value: ir.Value | None
    tables: Tables
    num_heads: int
    num_kv_heads: int
    scale: float
    window: int
    results: Sequence[ir.Value] = ()


def put(draft: Draft, node: ir.Node, attention: AttentionNode) -> None:
    """Replace a node whose first output is rows [T, num_heads * head_dim] by chunkrt's attention.

    Raises:
        UnsupportedModelError: the queries, keys and values are not linears of one input, or the past is not a state.
    """
    for past in (attention.past_key, attention.past_value):
        if past is None or past.name not in draft.signature.states:
            raise draft.unsupported(node, "its past is not an input of the model with an output for its new value")
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise draft.unsupported(node, f"it has {heads} query heads and {kv_heads} key heads")
    qkv = attention.query if attention.key is None else _joined(draft, node, attention)
    columns = width(draft, qkv)
    if columns is None or columns % (heads + 2 * kv_heads):
        raise draft.unsupported(node, f"{heads} + 2 * {kv_heads} heads do not divide {columns} columns")
    head_dim = columns // (heads + 2 * kv_heads)
    if draft.shape(attention.tables.cos)[1] * 2 > head_dim:
        raise draft.unsupported(node, f"its tables rotate more than the {head_dim} columns of a head")
    (output,) = draft.insert(
        node,
        "CachedAttention",
        [qkv, *attention.tables, attention.past_key, attention.past_value],
        domain=DOMAIN,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=_scale(attention.scale, head_dim),
        window=attention.window,
    )
    for result in attention.results or node.outputs[:1]:
        draft.replace(result, output)


def _scale(stated: float, head_dim: int) -> float:
    """Return the factor of the scores: head_dim^-1/2 if it equals that, otherwise the decimal number that a float32
    approximates.
    """
    usual: float = head_dim**-0.5
    return usual if not stated or np.float32(stated) == np.float32(usual) else decimal(stated)


def _joined(draft: Draft, node: ir.Node, attention: AttentionNode) -> ir.Value:
    """Merge queries, keys and values into one linear; norms of their heads become one norm after it."""
    norms = [producer(value, "HeadNorm", DOMAIN) for value in (attention.query, attention.key, attention.value)]
    under = [
        value if norm is None else norm.inputs[0]
        for value, norm in zip((attention.query, attention.key, attention.value), norms, strict=True)
    ]
    parts = [part for value in under if (part := find_projection(draft, value)) is not None]
    qkv = merge(draft, node, parts) if len(parts) == 3 else None
    if qkv is None:
        raise draft.unsupported(node, "its queries, keys and values are not linear layers of one input")
    if norms == [None, None, None]:
        return qkv
    query, key, of_value = norms
    if query is None or key is None or of_value is not None:
        raise draft.unsupported(node, "norms are supported only on both query and key heads")
    epsilons = [float_attribute(norm, "epsilon") for norm in (query, key)]
    weights = [draft.weights[w] for norm in (query, key) if (w := norm.inputs[1]) is not None]
    if epsilons[0] != epsilons[1]:
        raise draft.unsupported(node, f"the norms of queries and keys have different epsilons: {epsilons}")
    weight = draft.add_weight(
        Weight(
            tensors=tuple(name for w in weights for name in w.tensors),
            layout="heads",
            repeats=tuple(count for w in weights for count in w.repeats),
        )
    )
    return draft.insert(node, "HeadNorm", [qkv, weight], domain=DOMAIN, epsilon=epsilons[0])[0]


EXTRA_INPUTS = (
    "a bias of the scores",
    "a sink",
    "a scale of stored keys",
    "a scale of stored values",
    "a norm of queries without constant norms of both queries and keys",
    "a norm of keys without constant norms of both queries and keys",
    "lengths of several sequences",
)
"""Inputs of GroupQueryAttention from the tenth on."""


def raise_attention(draft: Draft) -> None:
    """Replace attention nodes by CachedAttention.

    Requires: linears, norms of heads and columns are converted. Ensures: attention is CachedAttention(qkv, cos, sin,
    past_key, past_value), and its past is a state of the graph.
    """
    for node in list(draft.graph):
        if read := READERS.get((node.domain, node.op_type)):
            put(draft, node, read(draft, node))


def _group_query(draft: Draft, node: ir.Node) -> AttentionNode:
    """Read com.microsoft's GroupQueryAttention, which is always causal and whose present keys are rotated."""
    plain = {"softcap": 0.0, "smooth_softmax": 0.0, "qk_output": 0.0, "kv_cache_bit_width": 0.0}
    plain |= {"causal": 1.0, "sliding_window_cache": 0.0}
    for name, usual in plain.items():
        if float_attribute(node, name, usual) not in (usual, -1.0):
            raise draft.unsupported(node, f"its {name} is {float_attribute(node, name)}, which is not supported")
    if extra := [(place, v.name) for place, v in enumerate(node.inputs[10:]) if v is not None]:
        place, read = extra[0]
        raise draft.unsupported(node, f"it reads {read!r}: {EXTRA_INPUTS[place]}, which is not supported")
    query, key, value = node.inputs[:3]
    assert query is not None
    tables = None
    if int_attribute(node, "do_rotary"):
        if int_attribute(node, "rotary_interleaved"):
            raise draft.unsupported(
                node, "it rotates adjacent columns (interleaved RoPE); only rotate-half RoPE is supported"
            )
        tables = make_tables(draft, node, input_of(node, 7), input_of(node, 8))
        check_positions(draft, node, input_of(node, 9), draft.shape(tables.cos)[0])
    elif key is not None:
        query, tables = take_off(draft, query)
        key, of_keys = take_off(draft, key)
        tables = same_tables(draft, node, tables, of_keys)
    if tables is None:
        raise draft.unsupported(node, "its queries and keys are not rotated; attention without RoPE is not supported")
    context = draft.shape(tables.cos)[0]
    check_total(draft, node, input_of(node, 5), context, less=1)
    check_total(draft, node, input_of(node, 6), context)
    window = int_attribute(node, "local_window_size", -1)
    return AttentionNode(
        query=query,
        key=key,
        value=value,
        past_key=node.inputs[3],
        past_value=node.inputs[4],
        tables=tables,
        num_heads=int_attribute(node, "num_heads"),
        num_kv_heads=int_attribute(node, "kv_num_heads"),
        scale=float_attribute(node, "scale"),
        window=max(window, 0),
    )


def same_tables(draft: Draft, node: ir.Node, left: Tables | None, right: Tables | None) -> Tables | None:
    """Return the rotary tables of queries and keys. Raises UnsupportedModelError if the two differ."""
    names = [None if t is None else [draft.weights[value].tensors for value in t] for t in (left, right)]
    if names[0] != names[1]:
        raise draft.unsupported(node, "its queries and keys are rotated by different tables")
    return left


def _multi_head(draft: Draft, node: ir.Node) -> AttentionNode:
    """Read com.microsoft's MultiHeadAttention, which has as many key heads as query heads and adds a mask to the
    scores.
    """
    if extra := [v.name for v in (*node.inputs[3:5], *node.inputs[8:]) if v is not None]:
        raise draft.unsupported(node, f"it reads {extra[0]!r}: a bias or a padding mask, which is not supported")
    query, value = node.inputs[0], input_of(node, 2)
    mask = input_of(node, 5)
    if not int_attribute(node, "unidirectional") and mask is None:
        raise draft.unsupported(node, "it is not causal: it has no mask and is not unidirectional")
    return _from_heads(
        draft,
        node,
        (query, input_of(node, 1), value),
        (input_of(node, 6), input_of(node, 7)),
        mask=mask,
        heads=(int_attribute(node, "num_heads"), int_attribute(node, "num_heads")),
    )


def _standard(draft: Draft, node: ir.Node) -> AttentionNode:
    """Read standard ONNX's Attention, since opset 23."""
    if float_attribute(node, "softcap") or input_of(node, 6) is not None:
        raise draft.unsupported(
            node, "its scores are capped, or it has lengths of keys as an input, which is not supported"
        )
    mask = input_of(node, 3)
    if not int_attribute(node, "is_causal") and mask is None:
        raise draft.unsupported(node, "it is not causal: it has no mask, and is_causal is 0")
    operands, pasts = [], []
    for operand, past in zip(node.inputs[:3], (None, input_of(node, 4), input_of(node, 5)), strict=True):
        appended = producer(operand, "Concat") if past is None and operand is not node.inputs[0] else None
        is_cached = appended is not None and int_attribute(appended, "axis") in (2, -2) and len(appended.inputs) == 2
        if is_cached and mask is None:
            raise draft.unsupported(node, "keys are appended before it, and is_causal counts rows from the first key")
        pasts.append(appended.inputs[0] if appended is not None and is_cached else past)
        operands.append(appended.inputs[1] if appended is not None and is_cached else operand)
    is_by_row = "q_num_heads" in node.attributes
    return _from_heads(
        draft,
        node,
        (operands[0], operands[1], operands[2]),
        (pasts[1], pasts[2]),
        mask=mask,
        heads=(int_attribute(node, "q_num_heads"), int_attribute(node, "kv_num_heads")) if is_by_row else None,
        results=() if is_by_row else results_of(draft, node),
    )


def _count_heads(draft: Draft, node: ir.Node, query: ir.Value, past: ir.Value | None) -> tuple[int, int]:
    """Return the numbers of query and key heads of operands [batch, heads, T, D], from the sizes of the past."""
    sizes = [d for d in past.shape if isinstance(d, int)] if past is not None and past.shape is not None else []
    columns = width(draft, query)
    if len(sizes) < 2 or columns is None or sizes[-1] < 1 or columns % sizes[-1]:
        raise draft.unsupported(node, "neither it nor the shape of its past states its number of heads")
    return columns // sizes[-1], sizes[-2]


def _from_heads(
    draft: Draft,
    node: ir.Node,
    operands: tuple[ir.Value | None, ir.Value | None, ir.Value | None],
    past: tuple[ir.Value | None, ir.Value | None],
    *,
    mask: ir.Value | None,
    heads: tuple[int, int] | None,
    results: Sequence[ir.Value] = (),
) -> AttentionNode:
    """Read attention whose operands may be by head, and whose queries and keys are already rotated. A node without a
    mask must be causal itself.
    """
    query, key, value = (rows_of(draft, node, operand) for operand in operands)
    tables = same_tables(draft, node, query.tables, key.tables)
    if tables is None or value.tables is not None:
        raise draft.unsupported(node, "its queries and keys must be rotated before it, and its values must not")
    num_heads, num_kv_heads = heads or _count_heads(draft, node, query.rows, past[0])
    return AttentionNode(
        query=query.rows,
        key=key.rows,
        value=value.rows,
        past_key=past[0],
        past_value=past[1],
        tables=tables,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        scale=float_attribute(node, "scale"),
        window=0 if mask is None else find_window(draft, node, mask, draft.shape(tables.cos)[0]),
        results=results,
    )


READERS: dict[tuple[str, str], Callable[[Draft, ir.Node], AttentionNode]] = {
    (CONTRIB, "GroupQueryAttention"): _group_query,
    (CONTRIB, "MultiHeadAttention"): _multi_head,
    ("", "Attention"): _standard,
}
"""Functions that read attention nodes, by domain and operator."""
