"""Generate docs/options.md from the declarations of all options.

python docs/site/options.py > docs/options.md
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator

import click

from chunkrt.cli import COMMANDS
from chunkrt.cli.command import GROUPS
from chunkrt.cli.generation import SAMPLING
from chunkrt.engine.declaration import Declaration
from chunkrt.engine.options import DECLARED

DEFAULT = re.compile(r"\s*\[default: (.*?)\]")

HEADER = """# All options

This page is generated from the declarations of the options, by `make docs`. A name in the column "field and key" is a
parameter of `chunkrt.load` and a field of `chunkrt.EngineOptions`, and the same name is the key in a settings file
(`--settings`).
"""


def page() -> str:
    """Return the text of the page."""
    commands = {name: getattr(importlib.import_module(f"chunkrt.cli.{name}"), name) for name in COMMANDS}
    parts = [HEADER, "## Engine options\n", *_engine_options()]
    run = {option.name: option for option in _options(commands["run"])}
    parts.append("## Sampling options\n\nOptions of `run` and `chat`, and fields of `chunkrt.SamplingOptions`.\n")
    parts.append(_table([run[name] for name in SAMPLING], "field"))
    parts.append("## Options of each command\n\nOptions of engines and of sampling are not repeated.\n")
    for name, command in commands.items():
        for words, one in _with_subcommands(name, command):
            own = [option for option in _options(one) if option.name not in (*DECLARED, *SAMPLING)]
            own = [option for option in own if option.name not in ("help", "help_all", "verbose")]
            parts.append(f"### {words}\n\n{one.get_short_help_str(200)}\n")
            if own:
                parts.append(_table(own))
    return "\n".join(parts)


def _engine_options() -> Iterator[str]:
    for group in GROUPS:
        rows = [
            _row(f"`{declared.flag}`", name, declared.help + _values(declared), default)
            for name, (_, default, declared) in DECLARED.items()
            if declared.group == group and declared.flag
        ]
        if rows:
            yield f"### {group}\n"
            yield "| flag | field and key | default | meaning |\n| --- | --- | --- | --- |\n" + "".join(rows)


def _values(declared: Declaration) -> str:
    values = (declared.metavar or "").split("|") if declared.metavar else declared.choices() if declared.choices else ()
    return f" Values: {', '.join(f'`{value}`' for value in values)}." if values else ""


def _table(options: Iterable[click.Option], field: str = "") -> str:
    names = ["flag", *([field] if field else []), "default", "meaning"]
    head = f"| {' | '.join(names)} |\n|{' --- |' * len(names)}\n"
    rows = []
    for option in options:
        flags = ", ".join(f"`{flag}`" for flag in (*option.opts, *option.secondary_opts))
        rows.append(_row(flags, option.name if field else "", option.help or "", option.default))
    return head + "".join(rows)


def _row(flags: str, name: str, help: str, default: object) -> str:
    found = DEFAULT.search(help)
    shown = found[1] if found else default if isinstance(default, str | int | float) and default != "" else ""
    if isinstance(shown, bool):
        shown = "on" if shown else "off"
    cells = [flags, *([f"`{name}`"] if name else []), str(shown), DEFAULT.sub("", help)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _options(command: click.Command) -> list[click.Option]:
    return [p for p in command.params if isinstance(p, click.Option) and not p.hidden]


def _with_subcommands(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield f"chunkrt {name}", command
    for sub in getattr(command, "commands", {}).values():
        yield f"chunkrt {name} {sub.name}", sub


if __name__ == "__main__":
    print(page(), end="")
