"""`chunkrt pull`: fetch a model of the catalogue or of the hub."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from chunkrt.checkpoints import catalogue
from chunkrt.checkpoints.hub import fetch_model, parse_hub_id
from chunkrt.cli.options import verbose_option


@click.command()
@click.argument("name")
@click.option("--force", is_flag=True, help="Fetch it even if it is here.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@verbose_option
def pull(name: str, force: bool, as_json: bool) -> None:
    """Fetch the model NAME and print where it lies. One that is here already is verified, and fetched if it is wrong.

    NAME is one of the catalogue, or an id of the Hugging Face hub: org/name, org/name:Q4_0, org/name@revision. Of the
    hub's models what has changed there is fetched; those of the catalogue only with --force, as they have no pinned
    hash.
    """
    model = parse_hub_id(name)
    path = fetch_model(model) if model else pull_with_progress(catalogue.find(name), is_forced=force)
    click.echo(json.dumps({"name": name, "path": str(path)}) if as_json else path)


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
