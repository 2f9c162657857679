"""A decoder in float over a window of text, subgraph after subgraph, with a say in how each operator is run.

For those who look at what happens inside: calibration, trials of schemes, errors by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.backends.reference import run_operator
from chunkrt.graph.plan import Node, Plan, resolve

Float32 = NDArray[np.float32]
TokenIds = NDArray[np.int64]
Values = Mapping[str, Any]
RunNode = Callable[[Node, Values], Any]
"""One operator, given all values known by then: its output, or a tuple of them."""


def first_values(token_ids: TokenIds, logit_rows: NDArray[np.int64]) -> dict[str, Any]:
    """What a decoder is given for tokens that start at position 0."""
    return {"input_ids": token_ids, "position": np.zeros(1, np.int64), "logit_rows": logit_rows}


def run_subgraph(plan: Plan, index: int, live: Values, weights: Mapping[str, Float32], run: RunNode) -> dict[str, Any]:
    """Run one subgraph of a plan on a window: from the values that live before it to those that live after it."""
    subgraph = plan.subgraphs[index]
    num_tokens = len(live["input_ids"])
    symbols = {"P": num_tokens, "W": num_tokens}
    caches = {name: np.zeros(resolve(plan.tensors[name].shape, symbols), np.float32) for name in subgraph.state}
    table_row = {"rope_position": np.array([plan.rope_offset(num_tokens)])}
    values: dict[str, Any] = {
        "": None,
        **live,
        **table_row,
        **{name: weights[name] for name in subgraph.weights},
        **caches,
    }
    for node in subgraph.nodes:
        results = run(node, values)
        values.update(zip(node.outputs, results if isinstance(results, tuple) else (results,), strict=True))
    later = {name for s in plan.subgraphs[index + 1 :] for name in s.inputs} | {plan.output, "input_ids"}
    return {name: values[name] for name in (*live, *subgraph.outputs) if name in later}


def run_node(node: Node, values: Values) -> Any:
    """One operator in float."""
    return run_operator(node, [values[name] for name in node.inputs])
