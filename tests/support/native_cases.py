"""Hand-made plans for tests of the native backend: one subgraph with random weights, and a function that runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from chunkrt.engine_directory.store import (
    INPUT_STEP_SUFFIX,
    MULTIPLIER_SUFFIX,
    OUTPUT_STEP_SUFFIX,
    SCALE_SUFFIX,
    WeightStore,
    pack,
    pack_products,
)
from chunkrt.graph.plan import Node, Plan, Subgraph, Tensor
from chunkrt.quant.scheme import LEVELS, Scheme, find_scheme

W8A8 = find_scheme("w8a8-dynamic")
VOCABULARY = 30
Case = tuple[Subgraph, Plan, WeightStore]


def tensor(name: str, *shape: int | str, kind: Any = "value", dtype: str = "float32") -> Tensor:
    return Tensor(name=name, dtype=dtype, shape=shape, kind=kind)


def node(op: str, inputs: str, outputs: str, domain: str = "", **attributes: Any) -> Node:
    """Return a node named after its first output; names are separated by blanks, and "-" is an absent input."""
    names = outputs.split()
    return Node(
        name=names[0],
        op=op,
        domain=domain,
        inputs=tuple(name.replace("-", "") for name in inputs.split()),
        outputs=tuple(names),
        attributes=attributes,
    )


def make_case(
    nodes: Sequence[Node], tensors: Sequence[Tensor], outputs: str, *, scheme: Scheme = W8A8, seed: int = 0
) -> Case:
    """Return a subgraph with random weights; its inputs are the values that its nodes read but do not produce."""
    by_name = {t.name: t for t in tensors}
    made = {name for n in nodes for name in n.outputs}
    read = list(dict.fromkeys(name for n in nodes for name in n.inputs if name and name not in made))
    subgraph = Subgraph(
        name="static.0",
        device="npu",
        is_static=True,
        rows="T",
        nodes=tuple(nodes),
        inputs=tuple(n for n in read if by_name[n].kind == "value"),
        outputs=tuple(outputs.split()),
        weights=tuple(n for n in read if by_name[n].kind == "weight"),
        state=tuple(n for n in read if by_name[n].kind == "state"),
    )
    plan = Plan(
        family="test",
        subgraphs=(subgraph,),
        tensors=by_name,
        inputs=subgraph.inputs,
        output=outputs.split()[-1],
        vocab_size=VOCABULARY,
        context_length=64,
    )
    return subgraph, plan, random_weights(subgraph, plan, scheme, seed)


def random_products(rng: np.random.Generator, depth: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return products of 4-bit integers and multipliers, int8 [depth, columns], and the multipliers.

    Multipliers are int8 [ceil(depth / 32), columns].
    """
    multipliers = rng.integers(1, 17, (-(-depth // 32), columns)).astype(np.int8)
    integers = rng.integers(-7, 8, (depth, columns)).astype(np.int8)
    return integers * np.repeat(multipliers, 32, axis=0)[:depth], multipliers


def random_weights(subgraph: Subgraph, plan: Plan, scheme: Scheme, seed: int) -> WeightStore:
    rng = np.random.default_rng(seed)
    linears = {n.inputs[1] for n in subgraph.nodes if n.op == "MatMul"}
    tables = {n.inputs[0] for n in subgraph.nodes if n.op == "Gather"}
    arrays: dict[str, np.ndarray] = {}
    for name in subgraph.weights:
        shape = tuple(int(d) for d in plan.tensors[name].shape)
        if name in linears:
            if scheme.storage_of(name) == "int4":
                products, multipliers = random_products(rng, *shape)
                arrays[name], arrays[name + MULTIPLIER_SUFFIX] = pack_products(products, multipliers)
            else:
                arrays[name] = pack(rng.integers(-127, 128, shape).astype(np.int8))
            arrays[name + SCALE_SUFFIX] = rng.random(shape[1], np.float32) * np.float32(2e-3)
            if scheme.is_static:  # ranges that the largest values exceed
                levels = np.float32(LEVELS[scheme.activation_bits_of(name)])
                columns = shape[1] if scheme.has_column_grids(name) else 1
                arrays[name + INPUT_STEP_SUFFIX] = np.float32([2]) / levels
                arrays[name + OUTPUT_STEP_SUFFIX] = (rng.random(columns, np.float32) + np.float32(0.5)) / levels
        else:
            arrays[name] = rng.standard_normal(shape).astype(np.float16 if name in tables else np.float32)
    return WeightStore(arrays, {name: tuple(plan.tensors[name].shape) for name in linears})  # type: ignore[misc]


def run(
    backend: Any, case: Case, inputs: Mapping[str, np.ndarray], rows: int, scheme: Scheme = W8A8
) -> dict[str, np.ndarray]:
    subgraph, plan, weights = case
    outputs = {name: np.full((rows, *plan.tensors[name].shape[1:]), np.nan, np.float32) for name in subgraph.outputs}
    backend.compile(subgraph, plan, 33, scheme, weights).run(inputs, outputs)
    return outputs


def random_rows(rows: int, width: int, seed: int = 9) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)
