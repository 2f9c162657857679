"""Reports: one page with timelines, causes of idle time, Pareto fronts and tables, from the files of other commands."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from chunkrt.engine.arguments import require_path
from chunkrt.errors import ConfigError, cause_of
from chunkrt.files import check_writable, written_aside
from chunkrt.reports.formats import ReportSource
from chunkrt.reports.page import page_of
from chunkrt.reports.sources import Given, source_of

__all__ = ["report"]


def report(
    sources: Mapping[str, Given] | Iterable[Given], output: str | os.PathLike[str], *, title: str = "chunkrt report"
) -> None:
    """Write one HTML page about runs, measured or predicted. The page needs no other file.

    Args:
        sources: files that `chunkrt` wrote (traces, and the output of bench, experiment, simulate, tune and eval with
            --json); rows of an experiment; simulations; or lists of the records of runs. A mapping names them.
        output: the page; an existing file is replaced.
        title: heading of the page.

    Raises:
        ConfigError: there are no sources; a source cannot be read, is damaged or of an unknown kind; or the page cannot
            be written.
    """
    path = Path(require_path("output", output))
    check_page(path)
    if not isinstance(title, str):
        raise ConfigError(f"title is {title!r:.80}, expected text")
    if isinstance(sources, str | os.PathLike) or not isinstance(sources, Iterable):
        raise ConfigError(f"sources is {sources!r:.80}, expected a list; put it in brackets")
    if isinstance(sources, Mapping) and (wrong := [name for name in sources if not isinstance(name, str)]):
        raise ConfigError(f"sources has the name {wrong[0]!r:.80}, expected text")
    found: list[ReportSource] = []
    if isinstance(sources, Mapping):
        found += [source_of(source, name) for name, source in sources.items()]
    else:
        found += [source_of(source) for source in sources]
    if not found:
        raise ConfigError("a report needs at least one source; name a file")
    page = page_of(found, title)
    try:
        with written_aside(path) as aside:
            aside.write_text(page, encoding="utf-8", errors="backslashreplace", newline="\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {cause_of(error)}") from error


def check_page(path: Path) -> None:
    """Raise ConfigError if a page cannot be written to a path."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"cannot write a report to {path}: its name must end in .html")
    if path.exists() and not path.is_file():
        raise ConfigError(f"cannot write a report to {path}: it is not a file; name a file")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write a report to {path}: there is no folder {path.parent}")
    try:
        check_writable(path)
    except OSError as error:
        raise ConfigError(f"cannot write a report to {path}: {cause_of(error)}") from error
