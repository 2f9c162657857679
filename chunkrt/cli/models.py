"""`chunkrt models`: what the catalogue holds."""

from __future__ import annotations

import json

import click

from chunkrt.checkpoints.catalogue import Entry, damage, entries, pulled
from chunkrt.checkpoints.catalogue.entry import WheelSource
from chunkrt.cli.options import verbose_option


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
@verbose_option
def models(as_json: bool) -> None:
    """List the models of the catalogue, and which of them are on this machine."""
    known = list(entries().values())
    if as_json:
        click.echo(json.dumps([_facts(entry) for entry in known], indent=2))
        return
    table = [("NAME", "FAMILY", "SIZE", "LICENCE", "PULLED"), *map(_row, known)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        click.echo("  ".join(map(str.ljust, row, widths)).rstrip())
    for entry in known:
        if entry.terms:
            click.echo(f"{entry.name}: terms of use at {entry.terms}")


def _row(entry: Entry) -> tuple[str, ...]:
    num_bytes = _num_bytes(entry)
    size = "-" if num_bytes is None else f"{num_bytes / 1e6:.0f} MB"
    is_pulled = "no" if pulled(entry) is None else "damaged" if damage(entry) else "yes"
    return entry.name, entry.family, size, entry.licence, is_pulled


def _facts(entry: Entry) -> dict[str, str | int | None]:
    path = pulled(entry)
    return {
        "name": entry.name,
        "family": entry.family,
        "scheme": entry.scheme,
        "context_length": entry.context_length,
        "licence": entry.licence,
        "terms": entry.terms,
        "bytes": _num_bytes(entry),
        "path": str(path) if path else None,
        "damage": damage(entry),
    }


def _num_bytes(entry: Entry) -> int | None:
    return entry.source.bytes if isinstance(entry.source, WheelSource) else None
