"""`chunkrt cache`: list and remove the files that chunkrt keeps on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import msgspec

from chunkrt.backends.qnn.contexts import ContextFolder
from chunkrt.checkpoints import catalogue
from chunkrt.cli.command import FiniteRange, GroupedCommand
from chunkrt.cli.shared_options import DEFAULT_UNIT, verbose_option
from chunkrt.engine.arguments import read_size
from chunkrt.engine.prefix_cache.block_file import read_header
from chunkrt.engine.prefix_cache.folder import clear as clear_prefixes
from chunkrt.engine.prefix_cache.folder import entries, is_part
from chunkrt.engine.prefix_cache.opening import own_folder
from chunkrt.errors import ConfigError, cause_of
from chunkrt.files import bytes_below, only_writer, remove

KINDS = {
    "prefixes": "computed prompt prefixes (--prefix-cache disk)",
    "engines": "compiled models",
    "contexts": "contexts compiled for NPUs",
    "calibrations": "activation ranges and searched schemes",
    "digests": "hashes of files",
    "logits": "logits of float models, for eval",
    "models": "downloaded models; `chunkrt pull` downloads them again",
}
SECONDS_PER_DAY = 86_400
REBUILT = ("prefixes", "engines", "contexts", "calibrations", "digests", "logits")
"""Kinds that `clear --all` removes; their files are rebuilt when needed."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """One kind of cached files, with the number of entries and their bytes."""

    kind: str
    what: str
    folder: str
    entries: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Prefixes:
    """Files of one model and scheme in a folder of the prefix cache; `tokens` is their total number of tokens."""

    model: str
    scheme: str
    files: int
    tokens: int
    bytes: int


_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_folder = click.option(
    "--folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder of the prefix cache, if --prefix-cache named one.",
)


@click.group()
def cache() -> None:
    """List and remove files that chunkrt keeps on this machine: models, compiled engines, prompt prefixes."""


@cache.command("list", cls=GroupedCommand)
@_as_json
@verbose_option
def list_kept(as_json: bool) -> None:
    """List the kept files by kind, and their size. CHUNKRT_HOME sets their folder."""
    kept = [_kept(kind) for kind in KINDS]
    if as_json:
        click.echo(json.dumps([asdict(one) for one in kept], indent=1))
        return
    for one in kept:
        click.echo(f"{one.kind:<13}{one.entries:>6}{one.bytes / 1e6:>10.1f} MB  {one.what}")
    click.echo(f"in {catalogue.home()}")


@cache.command(cls=GroupedCommand)
@_folder
@_as_json
@verbose_option
def show(folder: Path | None, as_json: bool) -> None:
    """Show the files of the prefix cache on disk, by model."""
    folder = folder or own_folder()
    found, damaged = _prefixes(folder)
    if as_json:
        facts = {"folder": str(folder), "models": [asdict(one) for one in found], "damaged": damaged}
        click.echo(json.dumps(facts, indent=1))
        return
    for one in found:
        click.echo(f"{one.model} {one.scheme}: {one.tokens} tokens in {one.files} files, {one.bytes / 1e6:.1f} MB")
    if damaged:
        click.echo(f"{damaged} damaged or incomplete files, which are removed when they are read")
    click.echo(f"{folder}: {sum(stat.st_size for stat in entries(folder).values()) / 1e6:.1f} MB")


@cache.command(cls=GroupedCommand)
@click.argument("kinds", nargs=-1, type=click.Choice(REBUILT), metavar=f"[{'|'.join(REBUILT)}]...")
@click.option("--all", "everything", is_flag=True, help="Remove all kinds except models.")
@_folder
@click.option("--unused-days", type=FiniteRange(min=0), help="Remove contexts that were unused for so many days.")
@click.option("--most", metavar="SIZE", help="Remove the least recently used contexts until the others fit this size.")
@_as_json
@verbose_option
def clear(
    kinds: tuple[str, ...],
    everything: bool,
    folder: Path | None,
    unused_days: float | None,
    most: str | None,
    as_json: bool,
) -> None:
    """Remove kept files of these kinds; by default prompt prefixes.

    With `contexts`, --unused-days and --most remove only some of them.

    `chunkrt models --remove NAME` removes models. Running engines are not affected.
    """
    if folder is not None and (kinds or everything):
        raise click.UsageError("--folder is for the prefix cache; omit the kinds and --all")
    wanted = REBUILT if everything else kinds or ("prefixes",)
    if unused_days is not None or most is not None:
        if wanted != ("contexts",):
            raise click.UsageError("--unused-days and --most are for contexts: chunkrt cache clear contexts")
        freed = _evict(unused_days, None if most is None else read_size("--most", most, unit=DEFAULT_UNIT))
    else:
        freed = sum(_clear_one(kind, folder) for kind in wanted)
    if as_json:
        click.echo(json.dumps({"cleared": list(wanted), "bytes": freed}))
    else:
        click.echo(f"{freed / 1e6:.1f} MB freed: {', '.join(wanted)}")


def _kept(kind: str) -> Kept:
    folder = catalogue.home() / kind
    if kind == "prefixes":
        sizes = [stat.st_size for stat in entries(folder).values()]
    else:
        sizes = [bytes_below(path) for path in _listed(folder)]
    return Kept(kind=kind, what=KINDS[kind], folder=str(folder), entries=len(sizes), bytes=sum(sizes))


def _prefixes(folder: Path) -> tuple[list[Prefixes], int]:
    """Return the prefixes by model and scheme, and the number of damaged files."""
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    damaged = 0
    for path, stat in entries(folder).items():
        try:
            if is_part(path):
                raise ValueError("half-written")
            header = read_header(path)
        except (OSError, ValueError, msgspec.MsgspecError):
            damaged += 1
            continue
        found.setdefault((header.model, header.scheme), []).append((len(header.tokens), stat.st_size))
    prefixes = [
        Prefixes(
            model=model,
            scheme=scheme,
            files=len(files),
            tokens=sum(tokens for tokens, _ in files),
            bytes=sum(num_bytes for _, num_bytes in files),
        )
        for (model, scheme), files in sorted(found.items())
    ]
    return prefixes, damaged


def _clear_one(kind: str, folder: Path | None) -> int:
    """Remove one kind; return its bytes."""
    folder = folder or catalogue.home() / kind
    if not folder.is_dir():
        return 0
    work: Callable[[], int] = (lambda: clear_prefixes(folder)) if kind == "prefixes" else (lambda: _remove_all(folder))
    try:
        return work()
    except OSError as error:
        raise ConfigError(f"cannot clear {folder}: {cause_of(error)}") from error


def _evict(unused_days: float | None, most_bytes: int | None) -> int:
    contexts = ContextFolder(catalogue.home() / "contexts")
    if not contexts.path.is_dir():
        return 0
    try:
        return contexts.evict(
            unused_s=None if unused_days is None else unused_days * SECONDS_PER_DAY, most_bytes=most_bytes
        )
    except OSError as error:
        raise ConfigError(f"cannot clear {contexts.path}: {cause_of(error)}") from error


def _remove_all(folder: Path) -> int:
    before = bytes_below(folder)
    with only_writer(folder, "writing there"):
        for path in _listed(folder):
            remove(path)
        return before - bytes_below(folder)


def _listed(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith(".")) if folder.is_dir() else []
