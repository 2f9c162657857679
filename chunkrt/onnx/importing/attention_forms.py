"""Common description of all forms of attention, and its conversion to chunkrt's operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from chunkrt.graph.plan import DOMAIN
from chunkrt.onnx.importing.draft import Draft, Weight, float_attribute, producer, width
from chunkrt.onnx.importing.evaluation import decimal
from chunkrt.onnx.importing.passes.rotary import Tables
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
