"""Translation of messages from the terms of Python into those of the command line."""

from __future__ import annotations

import logging
import re

from chunkrt.engine.options import DECLARED

_OPTION = re.compile(r"(?<![\w/'\"])`(\w+)(?:=(True|'[^'`]*'|[\w.-]+))?`(?![\w/'\"])")


def in_flags(message: str) -> str:
    """Replace options in backquotes by their flags: `npu='native'` becomes --npu native.

    Names that are no options of an engine are left unchanged.
    """

    def flag(found: re.Match[str]) -> str:
        if found[1] not in DECLARED or not (name := DECLARED[found[1]][2].main_flag):
            return found[0]
        value = (found[2] or "True").strip("'")
        if value == "True":
            return name
        return f"{name}={value}" if value.startswith("-") else f"{name} {value}"

    return _OPTION.sub(flag, message)


class FlagFormatter(logging.Formatter):
    """Formatter of log lines whose messages name options by their flags."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        return in_flags(super().format(record))
