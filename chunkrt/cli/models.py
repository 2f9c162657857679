"""`chunkrt models`: list the catalogue and the downloaded models."""

from __future__ import annotations

import json
from pathlib import Path

import click

from chunkrt.checkpoints.catalogue import CatalogueEntry, damage, entries, home, pulled
from chunkrt.checkpoints.catalogue.entry import WheelSource
from chunkrt.checkpoints.checkpoint import parts_of
from chunkrt.checkpoints.hub import cached_models, parse_hub_id
from chunkrt.cli.command import GroupedCommand
from chunkrt.cli.shared_options import verbose_option
from chunkrt.engine_directory.manifest import MANIFEST
from chunkrt.errors import ConfigError
from chunkrt.files import only_writer, read_json
from chunkrt.files import remove as remove_path


@click.command(cls=GroupedCommand)
@click.option("--remove", metavar="NAME", help="Delete a downloaded model, and the engines that were compiled from it.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
@verbose_option
def models(remove: str | None, as_json: bool) -> None:
    """List the models of the catalogue, their state on this machine, and models in the Hugging Face hub's cache."""
    if remove is not None:
        _print_removed(remove_model(remove), as_json)
        return
    known = list(entries().values())
    of_hub = list(cached_models())
    if as_json:
        facts = [_facts(entry) for entry in known] + [_hub_facts(name, path) for name, path in of_hub]
        click.echo(json.dumps(facts, indent=2))
        return
    table = [("NAME", "FAMILY", "SIZE", "LICENCE", "PULLED"), *map(_row, known)]
    table += [(name, "-", f"{_size(path) / 1e6:.0f} MB", "-", "hub") for name, path in of_hub]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        click.echo("  ".join(map(str.ljust, row, widths)).rstrip())
    for entry in known:
        if entry.terms:
            click.echo(f"{entry.name}: terms of use at {entry.terms}")


def remove_model(name: str) -> list[tuple[Path, int]]:
    """Delete a downloaded model and the engines that were compiled under its name; return paths and their bytes.

    Raises:
        ConfigError: no file of this model exists.
    """
    there = [folder for folder in (home() / "engines").glob("*") if _compiled_from(folder) == name]
    if name in entries():
        there += [folder for folder in [home() / "models" / name] if folder.exists()]
    if not there:
        hint = "delete models of the hub's cache with its own client: hf cache rm model/" + name
        other = hint if parse_hub_id(name) else "`chunkrt models` lists the downloaded models"
        raise ConfigError(f"no downloaded files of {name!r}; {other}")
    removed = [(path, _size(path)) for path in there]
    for path in there:
        with only_writer(path if path.parent.name == "models" else path.parent, f"removing {name}"):
            remove_path(path)
    return removed


def _print_removed(removed: list[tuple[Path, int]], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps([{"path": str(path), "bytes": num_bytes} for path, num_bytes in removed], indent=2))
        return
    for path, num_bytes in removed:
        click.echo(f"removed {path} ({num_bytes / 1e6:.0f} MB)")


def _compiled_from(folder: Path) -> str:
    """Return the name of an engine directory's model; None for another folder."""
    try:
        return str(read_json(folder / MANIFEST)["model"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _size(path: Path) -> int:
    """Return the size in bytes of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() else parts_of(path)
    return sum(file.stat().st_size for file in files if file.is_file())


def _row(entry: CatalogueEntry) -> tuple[str, ...]:
    num_bytes = _num_bytes(entry)
    size = "-" if num_bytes is None else f"{num_bytes / 1e6:.0f} MB"
    is_pulled = "no" if pulled(entry) is None else "damaged" if damage(entry) else "yes"
    return entry.name, entry.family, size, entry.licence, is_pulled


def _facts(entry: CatalogueEntry) -> dict[str, str | int | None]:
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


def _hub_facts(name: str, path: Path) -> dict[str, str | int | None]:
    facts: dict[str, str | int | None] = dict.fromkeys(("family", "scheme", "context_length", "licence", "terms"))
    return {"name": name, **facts, "bytes": _size(path), "path": str(path), "damage": ""}


def _num_bytes(entry: CatalogueEntry) -> int | None:
    return entry.source.bytes if isinstance(entry.source, WheelSource) else None
