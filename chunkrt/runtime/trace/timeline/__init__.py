"""Timelines of runs as pictures."""

from __future__ import annotations

from pathlib import Path

from chunkrt.errors import ConfigError, cause_of
from chunkrt.files import written_aside
from chunkrt.runtime.record import RunRecord
from chunkrt.runtime.trace.timeline.picture import make_picture
from chunkrt.runtime.trace.timeline.vector import to_html, to_svg

FORMATS = (".svg", ".html")

__all__ = ["FORMATS", "draw"]


def draw(record: RunRecord, path: Path) -> None:
    """Draw the timeline of a run into a temporary file next to `path`, and rename it.

    Args:
        record: the record of a run, real or simulated.
        path: its suffix selects the format: .svg or .html.

    Raises:
        ConfigError: the format is unknown, the file cannot be written, or the events contradict the schedule's rules.
    """
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"cannot draw {path}: its name must end with one of {', '.join(FORMATS)}")
    if path.exists() and not path.is_file():
        raise ConfigError(f"cannot draw {path}: it is not a file; name a file")
    picture = make_picture(record)
    try:
        path.parent.stat()  # do not create a missing folder
        with written_aside(path) as aside:
            aside.write_text(to_svg(picture) if path.suffix.lower() == ".svg" else to_html(picture), "utf-8")
    except OSError as error:
        raise ConfigError(f"cannot draw {path}: {cause_of(error)}") from error
