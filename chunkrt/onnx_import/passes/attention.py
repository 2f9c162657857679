"""Attention nodes become chunkrt's CachedAttention over one linear of queries, keys and values.

Anchors are operators that are attention by themselves. Where a graph has attention taken apart, a pass before this one
puts it together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from chunkrt.onnx_import.draft import (
    CONTRIB,
    DOMAIN,
    Draft,
    Weight,
    float_attribute,
    input_of,
    int_attribute,
    producer,
)
from chunkrt.onnx_import.passes.rotary import Tables, make_tables, take_off
from chunkrt.onnx_import.positions import check_positions, check_total
from chunkrt.onnx_import.projections import find_projection, merge
from chunkrt.onnx_import.widths import width


@dataclass(frozen=True, kw_only=True)
class Attention:
    """What an attention node says, whatever its form.

    query, key, value: rows before RoPE; key and value are None where the query holds all three. window: keys that a row
    sees, its own among them; 0 for all before it. scale: of the scores; 0 for head_dim^-1/2.
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


def raise_attention(draft: Draft) -> None:
    """Requires: linears, norms of heads and columns are raised. Ensures: attention is CachedAttention(qkv, cos, sin,
    past_key, past_value), and its past is a state of the graph.
    """
    for node in list(draft.graph):
        if read := READERS.get((node.domain, node.op_type)):
            put(draft, node, read(draft, node))


def put(draft: Draft, node: ir.Node, attention: Attention) -> None:
    """Put chunkrt's attention in the place of a node whose first output is rows [T, num_heads * head_dim].

    Raises:
        UnsupportedModelError: its queries, keys and values are not linears of one input, or its past is no state.
    """
    for past in (attention.past_key, attention.past_value):
        if past is None or past.name not in draft.signature.states:
            raise draft.unsupported(node, "its past is not an input of the model that an output renews")
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise draft.unsupported(node, f"it has {heads} heads of queries and {kv_heads} of keys")
    qkv = attention.query if attention.key is None else _joined(draft, node, attention)
    columns = width(draft, qkv)
    if columns is None or columns % (heads + 2 * kv_heads):
        raise draft.unsupported(node, f"{heads} + 2 * {kv_heads} heads do not share {columns} columns")
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
    draft.replace(node.outputs[0], output)


def _scale(stated: float, head_dim: int) -> float:
    """What scores are multiplied by: the number that a float32 stands for, head_dim^-1/2 if that is it."""
    usual: float = head_dim**-0.5
    return usual if not stated or np.float32(stated) == np.float32(usual) else float(f"{stated:.7g}")


def _joined(draft: Draft, node: ir.Node, attention: Attention) -> ir.Value:
    """Queries, keys and values side by side; norms of their heads as one behind it."""
    norms = [producer(value, "HeadNorm", DOMAIN) for value in (attention.query, attention.key, attention.value)]
    under = [
        value if norm is None else norm.inputs[0]
        for value, norm in zip((attention.query, attention.key, attention.value), norms, strict=True)
    ]
    parts = [part for value in under if (part := find_projection(draft, value)) is not None]
    qkv = merge(draft, node, parts) if len(parts) == 3 else None
    if qkv is None:
        raise draft.unsupported(node, "its queries, keys and values are not linears of one input")
    if norms == [None, None, None]:
        return qkv
    query, key, of_value = norms
    if query is None or key is None or of_value is not None:
        raise draft.unsupported(node, "only heads of queries and of keys, both, can be normalised")
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


def _group_query(draft: Draft, node: ir.Node) -> Attention:
    """com.microsoft's GroupQueryAttention: causal by itself, present keys are rotated."""
    plain = {"softcap": 0.0, "smooth_softmax": 0.0, "qk_output": 0.0, "kv_cache_bit_width": 0.0}
    for name, usual in plain.items():
        if float_attribute(node, name, usual) not in (usual, -1.0):
            raise draft.unsupported(node, f"its {name} is {float_attribute(node, name)}, which is not supported")
    if extra := [v.name for v in node.inputs[10:] if v is not None]:
        raise draft.unsupported(node, f"it reads {extra[0]!r}: a bias, a sink or a scale, which is not supported")
    check_total(draft, node, input_of(node, 5), less=1)
    check_total(draft, node, input_of(node, 6))
    query, key, value = node.inputs[:3]
    assert query is not None
    tables = None
    if int_attribute(node, "do_rotary"):
        if int_attribute(node, "rotary_interleaved"):
            raise draft.unsupported(node, "it rotates neighbours (interleaved); only rotation by halves is supported")
        check_positions(draft, node, input_of(node, 9))
        tables = make_tables(draft, node, input_of(node, 7), input_of(node, 8))
    elif key is not None:
        query, tables = take_off(draft, query)
        key, of_keys = take_off(draft, key)
        tables = same_tables(draft, node, tables, of_keys)
    if tables is None:
        raise draft.unsupported(node, "nothing rotates its queries and keys; attention without RoPE is not supported")
    window = int_attribute(node, "local_window_size", -1)
    return Attention(
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
    """The tables of queries and keys. Raises UnsupportedModelError if they differ."""
    names = [None if t is None else [draft.weights[value].tensors for value in t] for t in (left, right)]
    if names[0] != names[1]:
        raise draft.unsupported(node, "its queries and keys are rotated by different tables")
    return left


READERS: dict[tuple[str, str], Callable[[Draft, ir.Node], Attention]] = {
    (CONTRIB, "GroupQueryAttention"): _group_query,
}
"""What is read as attention, by domain and operator."""
