"""`chunkrt ops`: show the form of each operator of a model, its origin, and the reason of the choice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import click

from chunkrt.backends.dispatch import Dispatcher, Runner, check_switches, default_base, registered_operators
from chunkrt.backends.switches import Switches
from chunkrt.cli.command import GroupedCommand, json_option, model_argument
from chunkrt.cli.output import in_flags, print_table
from chunkrt.cli.plan import chosen_ranks, placement_of, read_model
from chunkrt.cli.shared_options import planning_options, ranks_options
from chunkrt.engine.capability import plan_by_capability
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.roles import supports_by_role


@dataclass(frozen=True, kw_only=True)
class OperatorRow:
    """An operator on a role ("npu", "cpu" or "session"), with the fields of its `Runner`."""

    operator: str
    role: str
    form: str
    origin: str
    reason: str


@click.command(
    cls=GroupedCommand,
    first="ops npu scheme placement attention chunk_length size rank by_node as_json",
)
@model_argument
@json_option("Print a JSON object.")
@click.option(
    "--nodes",
    "by_node",
    is_flag=True,
    help="List every node in the model's order, instead of the number of uses.",
)
@ranks_options
@planning_options
def ops(model: str, as_json: bool, by_node: bool, size: int | None, rank: int | None, **settings: Any) -> None:
    """Show every operator of MODEL: its number of uses, the form that runs it, and the reason of this choice.

    The name in the column "form" is the one that --ops takes. No weights are read. Work that the CPU does in place of
    an NPU, e.g. decoding, is not shown.
    """
    options = EngineOptions(**settings)
    switches, registry = Switches.parse(options.ops), registered_operators()
    check_switches(switches, registry)
    plan, scheme, _ = read_model(model, options, chosen_ranks(model, rank, size))
    plan, _ = plan_by_capability(plan, scheme, options, placement_of(model, options))
    dispatcher = Dispatcher(plan, scheme, registry, switches, default=default_base(options.npu))
    players = supports_by_role(options, scheme)
    supports, roles = dict(players.values()), {device: name for device, (name, _) in players.items()}
    nodes: dict[OperatorRow, list[str]] = {}
    listed: list[tuple[OperatorRow, str]] = []
    for subgraph in plan.subgraphs:
        backend = roles.get(subgraph.device, subgraph.device)
        for section in dispatcher.sections(subgraph, backend):
            if backend in supports:
                dispatcher.check(section, backend, supports[backend])
            for use, runner in section.runners:
                for row in _rows(runner, subgraph.device, dispatcher):
                    listed.append((row, use.node.name))
    listed.append((_row(dispatcher.sampler(), "session"), ""))
    for row, name in listed:
        nodes.setdefault(row, []).append(name)
    rows = sorted(nodes, key=lambda row: (row.operator, row.role, row.form))
    if as_json:
        found = [{**asdict(row), "uses": len(nodes[row]), "nodes": list(filter(None, nodes[row]))} for row in rows]
        click.echo(json.dumps({"model": model, "scheme": scheme.name, **roles, "operators": found}, indent=1))
    elif by_node:
        print_table([("operator", "node", *HEADER), *((row.operator, name, *_cells(row)) for row, name in listed)])
    else:
        print_table(
            [("operator", "uses", *HEADER), *((row.operator, str(len(nodes[row])), *_cells(row)) for row in rows)]
        )


HEADER = ("role", "form", "from", "why")


def _rows(runner: Runner, role: str, dispatcher: Dispatcher) -> Iterator[OperatorRow]:
    """Return the operator and its parts, which it calls or which are fused into it."""
    yield _row(runner, role)
    for part in dispatcher.part_names(runner.operator):
        if part in runner.parts:
            yield _row(runner.parts[part], role)
        else:
            yield OperatorRow(
                operator=part,
                role=role,
                form=runner.name,
                origin=runner.origin,
                reason=f"a part of {runner.operator}",
            )


def _row(runner: Runner, role: str) -> OperatorRow:
    reason = in_flags(runner.reason)
    return OperatorRow(operator=runner.operator, role=role, form=runner.name, origin=runner.origin, reason=reason)


def _cells(row: OperatorRow) -> tuple[str, ...]:
    return row.role, row.form, row.origin, row.reason
