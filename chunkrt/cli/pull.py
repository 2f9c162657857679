"""`chunkrt pull`: download a model of the catalogue or of the hub."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from chunkrt.checkpoints import catalogue
from chunkrt.checkpoints.catalogue import fetch
from chunkrt.checkpoints.hub import fetch_model, parse_hub_id
from chunkrt.cli.command import GroupedCommand
from chunkrt.cli.shared_options import verbose_option


@click.command(cls=GroupedCommand)
@click.argument("name")
@click.option("--force", is_flag=True, help="Download again, even if the files exist.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@verbose_option
def pull(name: str, force: bool, as_json: bool) -> None:
    """Download the model NAME and print its path. Existing files are verified, and replaced if they are damaged.

    NAME is a catalogue name or a Hugging Face hub id: org/name, org/name:Q4_0 or org/name@revision. For hub models,
    files that have changed on the hub are downloaded. Catalogue models have pinned hashes.
    """
    model = parse_hub_id(name)
    path = fetch_model(model) if model else pull_with_progress(catalogue.find(name), is_forced=force)
    click.echo(json.dumps({"name": name, "path": str(path)}) if as_json else path)


def pull_with_progress(entry: catalogue.CatalogueEntry, *, is_forced: bool) -> Path:
    """Download and verify an entry; in a terminal, show a progress bar on stderr."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return fetch.pull(entry, is_verified=True, is_forced=is_forced)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"pulling {entry.name}", total=None)
        return fetch.pull(
            entry,
            lambda done, total: bar.update(task, completed=done, total=total),
            is_verified=True,
            is_forced=is_forced,
        )
