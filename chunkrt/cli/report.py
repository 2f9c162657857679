"""`chunkrt report`: write one page about runs from the files of other commands."""

from __future__ import annotations

from pathlib import Path

import click

from chunkrt.cli.command import GroupedCommand, option
from chunkrt.cli.shared_options import verbose_option
from chunkrt.reports import report as write_report


@click.command(cls=GroupedCommand)
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@option(
    "-o",
    "--output",
    group="Output",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Page to write, a name that ends in .html.",
)
@option("--title", group="Output", default="chunkrt report", show_default=True, help="Heading of the page.")
@verbose_option
def report(runs: tuple[Path, ...], output: Path, title: str) -> None:
    """Write one page with timelines, causes of idle time, Pareto fronts and tables that sort.

    Each RUN is a trace (`--trace` of run, bench and simulate), rows of an experiment (`experiment -o`), or the output
    of bench, experiment, simulate, tune or eval with --json. Each figure is labelled as measured, emulated or
    predicted. The page needs no other file and no network.
    """
    write_report(runs, output, title=title)
    click.echo(f"wrote {output}", err=True)
