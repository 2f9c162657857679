"""`chunkrt ops`: show the implementation of each operator of a model, its origin, and the reason of the choice."""

from __future__ import annotations

import json
from collections import Counter
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
    runs_on: str
    origin: str
    reason: str


@click.command(
    cls=GroupedCommand,
    first="ops npu scheme placement attention chunk_length size rank as_json",
)
@model_argument
@json_option("Print a JSON object.")
@ranks_options
@planning_options
def ops(model: str, as_json: bool, size: int | None, rank: int | None, **settings: Any) -> None:
    """Show every operator of MODEL: its number of uses, its implementation, and the reason of this choice.

    No weights are read. Work that the CPU does in place of an NPU, e.g. decoding, is not shown.
    """
    options = EngineOptions(**settings)
    switches, registry = Switches.parse(options.ops), registered_operators()
    check_switches(switches, registry)
    plan, scheme, _ = read_model(model, options, chosen_ranks(model, rank, size))
    plan, _ = plan_by_capability(plan, scheme, options, placement_of(model, options))
    dispatcher = Dispatcher(plan, scheme, registry, switches, default=default_base(options.npu))
    players = supports_by_role(options, scheme)
    supports, roles = dict(players.values()), {device: name for device, (name, _) in players.items()}
    counts: Counter[OperatorRow] = Counter()
    for subgraph in plan.subgraphs:
        backend = roles.get(subgraph.device, subgraph.device)
        for section in dispatcher.sections(subgraph, backend):
            if backend in supports:
                dispatcher.check(section, backend, supports[backend])
            for _, runner in section.runners:
                counts.update(_rows(runner, subgraph.device, dispatcher))
    counts[_row(dispatcher.sampler(), "session")] = 1
    rows = sorted(counts, key=lambda row: (row.operator, row.role, row.runs_on))
    if as_json:
        found = [{**asdict(row), "uses": counts[row]} for row in rows]
        click.echo(json.dumps({"model": model, "scheme": scheme.name, **roles, "operators": found}, indent=1))
    else:
        print_table(
            [("operator", "uses", "role", "runs on", "from", "why"), *(_cells(row, counts[row]) for row in rows)]
        )


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
                runs_on=runner.runs_on,
                origin=runner.origin,
                reason=f"a part of {runner.operator}",
            )


def _row(runner: Runner, role: str) -> OperatorRow:
    reason = in_flags(runner.reason)
    return OperatorRow(operator=runner.operator, role=role, runs_on=runner.runs_on, origin=runner.origin, reason=reason)


def _cells(row: OperatorRow, num_uses: int) -> tuple[str, ...]:
    return row.operator, str(num_uses), row.role, row.runs_on, row.origin, row.reason
