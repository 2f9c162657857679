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
@click.option("--force", is_flag=True, help="Fetch it even if it is here.")
@verbose_option
def pull(name: str, force: bool) -> None:
    """Fetch the model NAME and print where it lies. One that is here already is verified, and fetched if it is wrong.

    What comes from the Hugging Face hub has no pinned hash: --force alone fetches it again.
    """
    click.echo(pull_with_progress(catalogue.find(name), is_forced=force))


def pull_with_progress(entry: catalogue.Entry, *, is_forced: bool) -> Path:
    """Pull and verify an entry; on a terminal, a progress bar on stderr while something is fetched."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return catalogue.pull(entry, is_verified=True, is_forced=is_forced)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"pulling {entry.name}", total=None)
        return catalogue.pull(
            entry,
            lambda done, total: bar.update(task, completed=done, total=total),
            is_verified=True,
            is_forced=is_forced,
        )
