"""Construction of a decoder's plan: placement, tracing, separation of linears' shadows, and partition into subgraphs.

A node runs on the device on which its module was placed, or on the device that a rule selects. Adjacent nodes on one
device form one subgraph, so a decoder of L layers has L + 1 static and L dynamic subgraphs, between an embedding and an
LM head. A linear with a shadow forms a separate subgraph, and so do its shadow and every sum over ranks.

    x -> MatMul -> y      becomes      x -> MatMul ----------------> y.main --+
                                       x -> chunkrt::ShadowLinear -> y.shadow -+-> Add -> y

A second processor can thus compute the part of the input that exceeds the linear's grid while the linear runs: the
linear and its shadow depend only on the same earlier subgraph.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import groupby
from typing import Literal, cast

import onnx_ir as ir

from chunkrt.checkpoints.source import BlockTensor, TensorSource
from chunkrt.errors import ConfigError, ModelError
from chunkrt.graph.decoders import describe_family, naming_plugin
from chunkrt.graph.modules import Float32, Module, Parameter
from chunkrt.graph.operators import check_plan, is_dynamic
from chunkrt.graph.ops import (
    ALONE_KEY,
    CONTEXT_KEY,
    DEVICE_KEY,
    LONG_CONTEXT_KEY,
    NO_HEAD_KEY,
    ROTARY_KEY,
    STATE_KEY,
    trace,
)
from chunkrt.graph.placement import Placement
from chunkrt.graph.plan import (
    DOMAIN,
    GATHER_OPS,
    LINK_OPS,
    MAIN_SUFFIX,
    SHADOW_OP,
    Attribute,
    Device,
    Dtype,
    Node,
    Place,
    Plan,
    Rotary,
    Subgraph,
    Tensor,
    read_only_caches,
)
from chunkrt.graph.rope import RotaryTable, RotaryTables
from chunkrt.graph.rotary_tables import Float64

_DTYPES: Mapping[ir.DataType, Dtype] = {
    ir.DataType.FLOAT: "float32",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.INT64: "int64",
}

SHADOW_SUFFIX = ".shadow"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A checkpoint with its decoder and plan, which need no weights."""

    source: TensorSource
    decoder: Module
    plan: Plan

    def load(self, name: str) -> Float32:
        """Return a weight's values, by its plan name. Raises ModelError as `Parameter.load` does."""
        parameter = self.parameters[name]
        with naming_plugin(self.plan.family):
            if isinstance(parameter, RotaryTable):
                return parameter.load_rows(self.source, int(self.plan.tensors[name].shape[0]))
            return parameter.load(self.source)

    def load_rotary(self, name: str) -> Float64:
        """Return the recipe of a rotary table, by its plan name; see `graph/rotary_tables.py`. Raises as `load`."""
        parameter = self.parameters[name]
        assert isinstance(parameter, RotaryTable)
        return parameter.recipe(self.source)

    def within(self, num_tokens: int) -> Planned:
        """Return a copy with a plan for contexts of at most `num_positions` tokens; see `Plan.within`."""
        return replace(self, plan=self.plan.within(num_tokens))

    def load_blocks(self, name: str) -> BlockTensor | None:
        """Return a linear's weight in the checkpoint's own blocks of 4 bits, by its plan name; None if it is not stored
        in them.

        Raises:
            ModelError, QuantizationError: see `Parameter.load_blocks`.
        """
        return self.parameters[name].load_blocks(self.source)

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """All parameters of the decoder, by plan name."""
        return {parameter.name: parameter for parameter in self.decoder.parameters()}

    @property
    def num_parameters(self) -> int:
        """Number of values in all tensors that the decoder reads, except RoPE's. A tied LM head and its table count
        once.
        """
        modules = [module for module in self.decoder.modules() if not isinstance(module, RotaryTables)]
        members = (member for module in modules for member in vars(module).values())
        tensors = [member.checkpoint_tensors for member in members if isinstance(member, Parameter)]
        return sum(math.prod(shape) for shape in {name: s for each in tensors for name, s in each.items()}.values())


def plan_decoder(
    source: TensorSource, decoder: Module, placement: Placement, is_shadowed: Callable[[str], bool] | None = None
) -> Planned:
    """Place a decoder, trace it, and cut it into subgraphs.

    Args:
        is_shadowed: returns whether the linear of a weight gets a shadow.

    Raises:
        ConfigError: a pattern of the placement matches no module.
        ModelError: the decoder cannot be traced, or declares a parameter that it does not use.
    """
    defaults = {module.path: module.device for module in decoder.modules()}
    place(decoder, placement)
    title = describe_family(source.architecture)
    graph = trace(decoder, title=title)
    if unused := unused_parameters(decoder, graph):
        module, _, attribute = unused[0].name.rpartition(".")
        more = f" (and {len(unused) - 1} more)" if len(unused) > 1 else ""
        raise ModelError(
            f"the {title} builds module {module!r}, but no operator reads its parameter {attribute!r}{more}; call the "
            "module in a forward, or do not build it"
        )
    if is_shadowed is not None:
        cut_shadowed(graph, is_shadowed)
    plan = partition(graph, family=source.architecture, defaults=defaults)
    check_new_plan(plan)
    return Planned(source=source, decoder=decoder, plan=plan)


def place(decoder: Module, placement: Placement) -> None:
    """Place every module that a pattern matches, and all modules below it; later patterns override earlier ones.

    Raises:
        ConfigError: a pattern matches no module; the message suggests the nearest path.
    """
    modules = {module.path: module for module in decoder.modules()}
    by_themselves = {path: module.device for path, module in modules.items()}
    for pattern, device in placement.items():
        matched = [module for path, module in modules.items() if fnmatchcase(path, pattern)]
        if not matched:
            nearest = get_close_matches(pattern, modules, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise ConfigError(f"the placement of {pattern!r} matches no module{hint}")
        for module in matched:
            module.to(device)
            for below in module.modules():
                if below is not module:
                    below.device = by_themselves[below.path]


def check_new_plan(plan: Plan) -> None:
    """Raise ModelError, which names the family, if chunkrt cannot run the plan of its decoder."""
    try:
        check_plan(plan)
    except ValueError as error:
        raise ModelError(
            f"the {describe_family(plan.family)} makes an invalid plan: {error}; correct its modules"
        ) from error


def unused_parameters(decoder: Module, traced: ir.Model) -> list[Parameter]:
    """Return the parameters that a decoder declares and that no operator of its traced graph reads.

    Rotary tables are exempt: layers of one kind share a pair of tables, and a decoder may have no layer of that kind.
    """
    tables = {id(p) for m in decoder.modules() if isinstance(m, RotaryTables) for p in m.parameters()}
    unread = (p for p in decoder.parameters() if p.name not in traced.graph.initializers)
    return [parameter for parameter in unread if id(parameter) not in tables]


def partition(model: ir.Model, *, family: str, defaults: Mapping[str, Place | None] | None = None) -> Plan:
    """Cut a traced decoder into subgraphs.

    Args:
        model: a model that `trace` returned.
        family: Hugging Face's model_type.
        defaults: devices of the modules by path before they were placed, which determine the names of subgraphs; by
            default nothing was placed.

    Requires: nodes in execution order, as after tracing. Ensures: every node is in exactly one subgraph, and running
    the subgraphs in order computes the graph.
    """
    graph = model.graph
    nodes = list(graph)
    state = {v.name or "" for v in graph.inputs if STATE_KEY in v.metadata_props}
    updates = {v.name or "" for v in graph.outputs[1:]}
    groups = [list(group) for _, group in groupby(nodes, key=_home)]
    names = _names(groups, defaults or {})
    reads = Counter(v.name for node in nodes for v in node.inputs if v is not None)
    reads[graph.outputs[0].name] += 1
    subgraphs = tuple(
        _subgraph(name, group, reads, graph, state, updates) for name, group in zip(names, groups, strict=True)
    )
    logits = graph.outputs[0]
    return Plan(
        family=family,
        subgraphs=subgraphs,
        tensors=_tensors(graph, subgraphs, state),
        inputs=tuple(v.name or "" for v in graph.inputs if v.name not in state),
        output=logits.name or "",
        vocab_size=int(_dimensions(logits)[-1]),
        context_length=int(graph.metadata_props.get(CONTEXT_KEY, "0")),
        has_head=NO_HEAD_KEY not in graph.metadata_props,
        long_context_from=int(long_from) if (long_from := graph.metadata_props.get(LONG_CONTEXT_KEY)) else None,
    )


def _home(node: ir.Node) -> tuple[str, ...]:
    """Return a node's key; adjacent nodes with the same key share a subgraph."""
    device = _device(node)
    alone = node.name or "" if device == "link" else node.metadata_props.get(ALONE_KEY, "")
    return device, _rows(node), alone


def _device(node: ir.Node) -> Device:
    if node.op_type in LINK_OPS:
        return "link"
    placed = node.metadata_props.get(DEVICE_KEY)
    if placed:
        return cast(Device, placed)
    return "cpu" if is_dynamic(node.domain, node.op_type) else "npu"


def _rows(node: ir.Node) -> Literal["T", "R"]:
    return cast(Literal["T", "R"], _dimensions(node.outputs[0])[0])


def _dimensions(value: ir.Value) -> tuple[int | str, ...]:
    assert value.shape is not None, value.name
    return tuple(d if isinstance(d, int) else str(d.value) for d in value.shape)


def _is_static(nodes: Sequence[ir.Node]) -> bool:
    return not any(is_dynamic(node.domain, node.op_type) for node in nodes)


def _names(groups: Sequence[Sequence[ir.Node]], defaults: Mapping[str, Place | None]) -> list[str]:
    """Return readable names of the subgraphs: embedding, static.0, dynamic.0, static.1, ..., shadow.0, link.0, ...,
    head.

    The numbers count the parts of the default partition, so they do not depend on the placement. A subgraph has the
    number of its first node of its kind. If a placement cuts a part, a piece that begins later in the part has the name
    of its first module, too: static.1, static.1.down_proj, static.1.input_layernorm.
    """
    nodes = [node for group in groups for node in group]
    counts: dict[str, int] = {}
    parts: dict[int, tuple[str, int, bool]] = {}
    """Kind and number of the part of each node, and whether the node is its first one."""
    for index, part in enumerate(
        list(each) for _, each in groupby(nodes, key=lambda node: _default_home(node, defaults))
    ):
        kind = _kind(index, part)
        parts |= {id(node): (kind, counts.get(kind, 0), node is part[0]) for node in part}
        counts[kind] = counts.get(kind, 0) + 1
    names: dict[str, None] = {}
    for index, group in enumerate(groups):
        kind = _kind(index, group)
        first = next((node for node in group if parts[id(node)][0] == kind), group[0])
        _, number, is_first = parts[id(first)]
        name = f"{kind}.{number}" if kind not in ("embedding", "head") or number else kind
        if not is_first and kind in ("static", "dynamic"):
            name += f".{_piece(first)}"
        further = (f"{name}.{count}" for count in range(2, len(groups) + 2))
        names[name if name not in names else next(other for other in further if other not in names)] = None
    return list(names)


def _default_home(node: ir.Node, defaults: Mapping[str, Place | None]) -> tuple[str, ...]:
    """Return the key of `_home` that a node has in the default partition."""
    device, *others = _home(node)
    parts = (node.name or "").split(".")
    paths = [".".join(parts[:length]) for length in range(len(parts) - 1, -1, -1)]
    if device == "link" or not any(path in defaults for path in paths):
        return device, *others
    placed = next((found for path in paths if (found := defaults.get(path)) is not None), None)
    return placed or ("cpu" if is_dynamic(node.domain, node.op_type) else "npu"), *others


def _piece(node: ir.Node) -> str:
    """Return the name of the module that contains a node; for a node of a layer itself its own name."""
    *_, module, own = ("", *(node.name or "").split("."))
    return own if module.isdigit() or not module else module


def _kind(index: int, group: Sequence[ir.Node]) -> str:
    """Return the kind of subgraph that a group of nodes makes, by the group's index."""
    if index == 0 and {node.op_type for node in group if is_dynamic(node.domain, node.op_type)} <= set(GATHER_OPS):
        return "embedding"
    if group[0].op_type == SHADOW_OP:
        return "shadow"
    if group[0].op_type in LINK_OPS:
        return "link"
    if _rows(group[0]) == "R":
        return "head"
    return "static" if _is_static(group) else "dynamic"


def _subgraph(
    name: str,
    group: Sequence[ir.Node],
    reads: Counter[str | None],
    graph: ir.Graph,
    state: set[str],
    updates: set[str],
) -> Subgraph:
    """Make a subgraph from a group of nodes.

    `reads` is the number of reads of each value in the graph. If it exceeds the reads in the group, the value is an
    output.
    """
    made = {value.name for node in group for value in node.outputs}
    read = Counter(v.name or "" for node in group for v in node.inputs if v is not None)
    nodes = tuple(plan_node(node, updates) for node in group)
    shared = read_only_caches(nodes)
    return Subgraph(
        name=name,
        device=_device(group[0]),
        is_static=_is_static(group),
        rows=_rows(group[0]),
        nodes=nodes,
        inputs=tuple(n for n in read if n not in made and n not in graph.initializers and n not in state),
        outputs=tuple(v.name or "" for node in group for v in node.outputs if reads[v.name] > read[v.name or ""]),
        weights=tuple(n for n in read if n in graph.initializers),
        state=tuple(n for n in read if n in state and n not in shared),
        shared_state=tuple(n for n in read if n in shared),
    )


def plan_node(node: ir.Node, updates: Collection[str]) -> Node:
    """Return a traced node as a node of a plan.

    Args:
        updates: names of the new contents of states, which are not values of a plan.
    """
    outputs = [value for value in node.outputs if value.name not in updates]
    return Node(
        name=node.name or "",
        op=node.op_type,
        domain=node.domain,
        inputs=tuple(v.name or "" if v is not None else "" for v in node.inputs),
        outputs=tuple(v.name or "" for v in outputs),
        attributes={name: cast(Attribute, attribute.value) for name, attribute in node.attributes.items()},
    )


def _tensors(graph: ir.Graph, subgraphs: Sequence[Subgraph], state: set[str]) -> dict[str, Tensor]:
    values = {v.name or "": v for v in (*graph.inputs, *graph.initializers.values())}
    values |= {v.name or "": v for node in graph for v in node.outputs}
    used = {n for s in subgraphs for node in s.nodes for n in (*node.inputs, *node.outputs) if n}
    tensors = {}
    for name, value in values.items():
        if name not in used:
            continue
        kind: Literal["weight", "state", "value"] = (
            "weight" if name in graph.initializers else "state" if name in state else "value"
        )
        assert value.dtype is not None
        dtype = _DTYPES[value.dtype]
        rotary = cast(Rotary, value.metadata_props.get(ROTARY_KEY, ""))
        tensors[name] = Tensor(name=name, dtype=dtype, shape=_dimensions(value), kind=kind, rotary=rotary)
    return tensors


def cut_shadowed(model: ir.Model, is_shadowed: Callable[[str], bool]) -> None:
    """Add a shadow, in place, to every linear whose weight is selected by name.

    Requires: a traced decoder. Ensures: the outputs of linears keep their names and, except for rounding, their values;
    a linear and its shadow are marked to become separate subgraphs, the shadow's on the CPU.
    """
    graph = model.graph
    for node in list(graph):
        weight = node.inputs[1] if node.op_type == "MatMul" else None
        if weight is not None and weight.name in graph.initializers and is_shadowed(weight.name or ""):
            _cut_out(graph, node)


def _cut_out(graph: ir.Graph, linear: ir.Node) -> None:
    whole = linear.outputs[0]
    name = whole.name or ""
    shadow = ir.Node(
        DOMAIN, SHADOW_OP, linear.inputs, num_outputs=1, name=name + SHADOW_SUFFIX, metadata_props={DEVICE_KEY: "cpu"}
    )
    add = ir.Node("", "Add", [whole, shadow.outputs[0]], num_outputs=1, name=f"{name}.sum")
    add.metadata_props.update({k: v for k, v in linear.metadata_props.items() if k == DEVICE_KEY})
    for result, suffix in ((shadow.outputs[0], SHADOW_SUFFIX), (add.outputs[0], "")):
        result.type, result.shape = whole.type, whole.shape
        result.name = name + suffix
    for user, index in tuple(whole.uses()):
        if user is not add:
            user.replace_input_with(index, add.outputs[0])
    whole.name = name + MAIN_SUFFIX
    for index, output in enumerate(graph.outputs):
        if output is whole:
            graph.outputs[index] = add.outputs[0]
    graph.insert_after(linear, [shadow, add])
    for half in (linear, shadow):
        half.metadata_props[ALONE_KEY] = half.name or ""
