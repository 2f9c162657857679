"""`chunkrt experiment`: simulate a grid of choices that a TOML file describes."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import click

from chunkrt.cli.command import GroupedCommand, json_option, option, plot_option
from chunkrt.cli.output import print_table
from chunkrt.cli.shared_options import verbose_option
from chunkrt.cli.simulate import accuracy_of
from chunkrt.errors import ConfigError, cause_of, unknown_name
from chunkrt.files import read_toml, written_aside
from chunkrt.pictures import check_picture
from chunkrt.progress import ShownProgress
from chunkrt.simulate import find_device
from chunkrt.simulate.experiments import CHOICES, GridRow, Rows, placement_text
from chunkrt.simulate.experiments import experiment as simulate_grid

OF_COMMAND = ("workers", "dask", "output", "progress")
"""Arguments of `chunkrt.experiment` that the file does not contain."""

NUM_SHOWN = 12

NO_NAME = {"placement_name": "natural", "graphs": "one"}
"""Texts of choices whose name is empty."""


@click.command(cls=GroupedCommand, first="output csv_file workers dask plot as_json")
@click.argument("grid", type=click.Path(path_type=Path))
@option(
    "-o",
    "--output",
    group="Output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write finished rows to this file as JSON lines. An interrupted experiment continues from it.",
)
@option(
    "--csv",
    "csv_file",
    group="Output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the rows as a table with commas.",
)
@option("--workers", group="Execution", type=int, help="Number of processes.  [default: as many as are worth starting]")
@option("--dask", group="Execution", help="Address of a Dask scheduler whose workers run the simulations.")
@plot_option("Draw tokens/s over prompt lengths as .png or .svg (needs matplotlib).")
@json_option("Print all rows as a JSON list.")
@verbose_option
def experiment(
    grid: Path,
    output: Path | None,
    csv_file: Path | None,
    workers: int | None,
    dask: str | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Simulate the prefill of a model at every point of the grid in the TOML file GRID.

    The keys of the file are the arguments of `chunkrt.experiment`: model, devices, schemes, prompt_lengths,
    chunk_lengths and policies; and optionally attentions, shadow, chunks_in_flight and a table of placements.
    """
    _check_outputs(grid, {"--csv": csv_file, "-o": output, "--plot": plot})
    arguments = read_grid(grid)
    if plot is not None:
        check_picture(plot)
    with ShownProgress() as progress:
        rows = simulate_grid(**arguments, workers=workers, dask=dask, output=output, progress=progress)
        progress("", 0, 0)
    if csv_file is not None:
        _write_csv(rows, csv_file)
    if plot is not None:
        rows.plot(plot)
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        _print(rows)
        for name in arguments["devices"]:
            click.echo(accuracy_of(find_device(name)))


def _check_outputs(grid: Path, outputs: Mapping[str, Path | None]) -> None:
    """Raise ConfigError if an output would overwrite the grid or another output."""
    seen = {grid.resolve(): "the grid"}
    for flag, path in outputs.items():
        if path is None:
            continue
        if other := seen.get(path.resolve()):
            raise ConfigError(f"{flag} {path} would overwrite {other}; name another file")
        seen[path.resolve()] = f"the file of {flag}"


def read_grid(path: Path) -> dict[str, Any]:
    """Return the arguments of `chunkrt.experiment` in a TOML file.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown or missing.
    """
    try:
        found = read_toml(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {cause_of(error)}") from error
    known = {name: p for name, p in signature(simulate_grid).parameters.items() if name not in OF_COMMAND}
    for name in found:
        if name not in known:
            raise ConfigError(f"{path}: {unknown_name('key', name, known)}")
    for name, parameter in known.items():
        if parameter.default is Parameter.empty and name not in found:
            raise ConfigError(f"{path}: the key {name!r} is missing")
    flights = found.get("chunks_in_flight")
    if isinstance(flights, list):
        found["chunks_in_flight"] = [None if flight == "auto" else flight for flight in flights]
    return found


def _write_csv(rows: Rows, path: Path) -> None:
    text = io.StringIO()
    records = [asdict(row) | {"placement": placement_text(row.placement)} for row in rows]
    writer = csv.DictWriter(text, list(GridRow.__dataclass_fields__))
    writer.writeheader()
    writer.writerows(records)
    try:
        with written_aside(path) as aside:
            aside.write_text(text.getvalue(), encoding="utf-8", newline="")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {cause_of(error)}") from error


def _print(rows: Rows) -> None:
    """Print the fastest rows, and the number of rows on the Pareto front."""
    varying = [name for name in CHOICES if len({getattr(row, name) for row in rows}) > 1]
    fastest = sorted(rows, key=lambda row: -row.tokens_per_s)[:NUM_SHOWN]
    front = rows.pareto()
    click.echo(
        f"{rows[0].model}: {len(rows)} rows, predicted by simulation; {len(front)} (*) on the Pareto fronts of time, "
        "memory and energy of each device and prompt length"
    )
    figures = ("ttft ms", "tokens/s", "MB", "joules")
    head = (*(name.removesuffix("_name").replace("_", " ") for name in varying), *figures, "")
    table: list[tuple[str, ...]] = [head]
    for row in fastest:
        joules = "" if row.energy_joules is None else f"{row.energy_joules:.2f}"
        memory = f"{row.peak_memory_bytes / 1e6:.0f}"
        times = f"{row.time_to_first_token_ms:.1f}", f"{row.tokens_per_s:.1f}"
        choices = (str(getattr(row, name)) or NO_NAME.get(name, "") for name in varying)
        table.append((*choices, *times, memory, joules, "*" if row in front else ""))
    print_table(table, right=figures)
    if len(rows) > len(fastest):
        click.echo(f"the {len(fastest)} fastest of {len(rows)} rows; --json, --csv and -o show all")
