"""Generate docs/options.md from the declarations of all options.

python docs/site/options.py > docs/options.md
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import click

from chunkrt.cli import COMMANDS, find_command
from chunkrt.cli.command import GROUPS
from chunkrt.cli.generation_options import SAMPLING
from chunkrt.engine.declaration import Declaration
from chunkrt.engine.options import DECLARED, python_help

DEFAULT = re.compile(r"\s*\[default: (.*?)\]")

_SHARED = ("help", "help_all", "verbose")

HEADER = """# All options

This page is generated from the declarations of the options, by `make docs`. The name below a flag is a parameter of
`chunkrt.load`, a field of `chunkrt.EngineOptions`, and the key in a settings file (`--settings`).
"""


def page() -> str:
    """Return the text of the page."""
    commands = {name: find_command(name) for name in COMMANDS}
    parts = [HEADER, "## Engine options\n", *_engine_options()]
    run = {option.name: option for option in _options(commands["run"])}
    parts.append("## Sampling options\n\nOptions of `run` and `chat`, and fields of `chunkrt.SamplingOptions`.\n")
    parts.append(_table((*_described(run[name]), name) for name in SAMPLING))
    parts.append("## Options of each command\n\nOptions of engines and of sampling are not repeated.\n")
    for name, command in commands.items():
        for words, one in _with_subcommands(name, command):
            own = [option for option in _options(one) if option.name not in (*DECLARED, *SAMPLING, *_SHARED)]
            parts.append(f"### {words}\n\n{one.get_short_help_str(200)}\n")
            if own:
                parts.append(_table((*_described(option), "") for option in own))
    return "\n".join(parts)


def fields() -> str:
    """Return a table of the fields of EngineOptions, in terms of Python."""
    rows = [f"| `{name}` | {_sentence(text, DECLARED[name][1])} |\n" for name, text in python_help().items()]
    return "| field | meaning |\n| --- | --- |\n" + "".join(rows)


def _engine_options() -> Iterator[str]:
    for group in GROUPS:
        named = {n: (default, d) for n, (_, default, d) in DECLARED.items() if d.group == group and d.flag}
        if named:
            rows = ((_flags(d), _sentence(d.help, default) + _values(d), n) for n, (default, d) in named.items())
            yield f"### {group}\n\n{_table(rows)}"


def _flags(declared: Declaration) -> str:
    return ", ".join(f"`{flag}`" for flag in (*declared.aliases, declared.flag))


def _table(rows: Iterable[tuple[str, str, str]]) -> str:
    """Return a table of two columns, so that it fits a narrow screen: flags and field, and meaning."""
    lines = [f"| {flags}{f'<br>`{name}`' if name else ''} | {meaning} |\n" for flags, meaning, name in rows]
    return "| option | meaning |\n| --- | --- |\n" + "".join(lines)


def _described(option: click.Option) -> tuple[str, str]:
    flags = ", ".join(f"`{flag}`" for flag in (*option.opts, *option.secondary_opts))
    return flags, _sentence(option.help or "", option.default)


def _sentence(help: str, default: object) -> str:
    """Return a help text with its default as a sentence."""
    found = DEFAULT.search(help)
    shown = found[1] if found else default if isinstance(default, str | int | float) and default != "" else None
    if isinstance(shown, bool):
        shown = "on" if shown else None
    return DEFAULT.sub("", help).replace("|", "\\|") + (f" Default: {shown}." if shown is not None else "")


def _values(declared: Declaration) -> str:
    values = (declared.metavar or "").split("|") if declared.metavar else declared.choices() if declared.choices else ()
    return f" Values: {', '.join(f'`{value}`' for value in values)}." if values else ""


def _options(command: click.Command) -> list[click.Option]:
    return [p for p in command.params if isinstance(p, click.Option) and not p.hidden]


def _with_subcommands(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield f"chunkrt {name}", command
    for sub in getattr(command, "commands", {}).values():
        yield f"chunkrt {name} {sub.name}", sub


if __name__ == "__main__":
    print(page(), end="")
