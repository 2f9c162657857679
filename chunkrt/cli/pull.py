"""`chunkrt pull`: fetch a model of the catalogue."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from chunkrt.checkpoints import catalogue
from chunkrt.cli.options import verbose_option


@click.command()
@click.argument("name")
@verbose_option
def pull(name: str) -> None:
    """Fetch the model NAME, unless it is here already, and print where it lies."""
    click.echo(pull_with_progress(catalogue.find(name)))


def pull_with_progress(entry: catalogue.Entry) -> Path:
    """Pull an entry; on a terminal, a progress bar on stderr while something is fetched."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return catalogue.pull(entry)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"pulling {entry.name}", total=None)
        return catalogue.pull(entry, lambda done, total: bar.update(task, completed=done, total=total))
