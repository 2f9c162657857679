"""Checks of plans from files against the table of operators, so that other code can rely on them."""

from __future__ import annotations

from chunkrt.graph.operators import MOST, check_node, require
from chunkrt.graph.plan import ATTENTION_OPS, INPUTS, Plan, Subgraph, Tensor


def check_plan(plan: Plan) -> None:
    """Raise ValueError for an inconsistent plan, or KeyError for an unknown tensor name."""
    require(set(plan.inputs) <= INPUTS.keys(), f"its inputs {plan.inputs} are not all known")
    require(1 <= plan.vocab_size <= MOST and 1 <= plan.context_length <= MOST, "its sizes are invalid")
    require(plan.long_context_from is None or 1 <= plan.long_context_from <= MOST, "its longer context is invalid")
    for name, tensor in plan.tensors.items():
        _check_tensor(plan, name, tensor)
    names = [subgraph.name for subgraph in plan.subgraphs]
    require(len(set(names)) == len(names), "two subgraphs share a name")
    nodes = [node.name for subgraph in plan.subgraphs for node in subgraph.nodes]
    require(len(set(nodes)) == len(nodes), "two nodes share a name")
    known, states = set(plan.inputs), set[str]()
    for subgraph in plan.subgraphs:
        is_alone = known.isdisjoint(subgraph.outputs) and states.isdisjoint(subgraph.state)
        require(is_alone, f"{subgraph.name} writes a tensor that another subgraph writes")
        _check_subgraph(plan, subgraph, known)
        known.update(subgraph.outputs)
        states.update(subgraph.state)
    require(plan.output in known, f"no subgraph writes its output {plan.output!r}")
    shape = plan.tensors[plan.output].shape
    require(shape == ("R", plan.vocab_size), f"its output {plan.output!r} has the invalid shape {list(shape)}")
    attention = [node for s in plan.subgraphs for node in s.nodes if node.op in ATTENTION_OPS]
    windows = {node.attributes["window"] for node in attention} - {0}
    require(len(windows) <= 1, f"its layers have windows of {windows}; one window is possible")
    rows = plan.context_length * (1 if plan.long_context_from is None else 2)
    for node in attention:
        found = plan.tensors[node.inputs[3]].shape[0]
        require(found == rows, f"{node.name!r} has rotary tables of {found} rows, expected {rows}")
    tables = {name for node in attention for name in node.inputs[3:5]}
    others = [tensor.name for tensor in plan.tensors.values() if tensor.rotary and tensor.name not in tables]
    require(not others, f"{others} are not rotary tables")


def _check_tensor(plan: Plan, name: str, tensor: Tensor) -> None:
    if tensor.kind == "value":
        is_sound = tensor.dtype == ("int64" if name in INPUTS else "float32") and not {"P", "W"} & set(tensor.shape)
        is_sound = is_sound and (name not in INPUTS or tensor.shape == INPUTS[name])
    else:
        symbols = () if tensor.kind == "weight" else ("P", "W")
        is_sound = tensor.dtype == "float32" and all(type(d) is int or d in symbols for d in tensor.shape)
    sizes = [size for size in tensor.shape if size not in ("T", "R", "P", "W")]
    is_sound = is_sound and all(isinstance(size, int) and 1 <= size <= MOST for size in sizes)
    require(is_sound and tensor.name == name, f"tensor {name!r} is {tensor}")


def _check_subgraph(plan: Plan, subgraph: Subgraph, known: set[str]) -> None:
    for kind, names in {"weight": subgraph.weights, "state": subgraph.state, "value": subgraph.inputs}.items():
        require(all(plan.tensors[name].kind == kind for name in names), f"{subgraph.name} reads {names} as {kind}")
    require(known.issuperset(subgraph.inputs), f"{subgraph.name} reads tensors that no subgraph has written")
    inside = {*subgraph.inputs, *subgraph.weights, *subgraph.state}
    written: set[str] = set()
    for node in subgraph.nodes:
        try:
            require(inside.issuperset(filter(None, node.inputs)), "it reads tensors that do not exist")
            require(node.outputs and inside.isdisjoint(node.outputs), "it writes tensors that exist already")
            inputs = [plan.tensors[name] if name else None for name in node.inputs]
            outputs = [plan.tensors[name] for name in node.outputs]
            require(all(output.kind == "value" for output in outputs), "it writes a weight or a state")
            taken = [None if tensor is None else (tensor.dtype, tensor.shape) for tensor in inputs]
            check_node(node.domain, node.op, node.attributes, taken, outputs[0].shape)
        except ValueError as error:
            raise ValueError(f"node {node.name!r}: {error}") from error
        inside.update(node.outputs)
        written.update(node.outputs)
    require(written.issuperset(subgraph.outputs), f"{subgraph.name} outputs a tensor that it does not write")
    require(len(set(subgraph.outputs)) == len(subgraph.outputs), f"{subgraph.name} outputs a tensor twice")
    constants = [*subgraph.weights, *subgraph.state]
    read = {name for node in subgraph.nodes for name in node.inputs}
    require(len(set(constants)) == len(constants) and read.issuperset(constants), f"{subgraph.name} names {constants}")
