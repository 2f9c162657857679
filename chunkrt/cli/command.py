"""Parts of every command: MODEL by position or as -m, and a help text that shows options by group."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar, cast

import click
from click.shell_completion import CompletionItem

from chunkrt.checkpoints.hub import cached_models, parse_hub_id
from chunkrt.cli.peers import hidden_options
from chunkrt.errors import ChunkrtError, ConfigError

Command = TypeVar("Command", bound=Callable[..., Any])

STATUS_OF_NO = 3
"""Exit status of a command that checks a condition which does not hold."""

MOST_SHOWN = 10
"""Number of options up to which `--help` shows all of them."""

GROUPS = (
    "Prompt",
    "Answer",
    "Sampling",
    "Measurement",
    "Workload",
    "Ranks",
    "Search",
    "Access",
    "Model",
    "Quantisation",
    "Devices",
    "Execution",
    "Context and memory",
    "Output",
)
"""Titles of the groups of options in `--help-all`, in order."""


class GroupedOption(click.Option):
    """An option with the title of its group in `--help-all`.

    Args:
        group: one of GROUPS, or empty for "Other options".
    """

    def __init__(self, *arguments: Any, group: str = "", **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        assert not group or group in GROUPS
        self.group = group


def option(*flags: str, group: str = "", **settings: Any) -> Callable[[Command], Command]:
    """Give a command an option that belongs to a group; the arguments are those of `click.option`."""
    return click.option(*flags, cls=GroupedOption, group=group, **settings)


def json_option(help: str) -> Callable[[Command], Command]:
    """Give a command --json; it arrives as the keyword argument `as_json`."""
    return option("--json", "as_json", group="Output", is_flag=True, help=help)


def plot_option(help: str, name: str = "plot") -> Callable[[Command], Command]:
    """Give a command --plot; it arrives as the keyword argument `name`."""
    return option("--plot", name, group="Output", type=click.Path(path_type=Path), metavar="FILE", help=help)


class GroupedCommand(click.Command):
    """A command whose `--help` shows the options that are used most, and whose `--help-all` shows all, in groups.

    Args:
        first: names of the options that `--help` shows, in order, separated by spaces.
    """

    def __init__(self, *arguments: Any, first: str = "", **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._first = tuple(first.split())

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the command's parameters, `--help-all`, and options of other tools, which are refused by name."""
        own = super().get_params(ctx)
        names = {name for parameter in own for name in parameter.opts}
        return [*own, _HELP_ALL, *(other for other in hidden_options() if other.opts[0] not in names)]

    def invoke(self, ctx: click.Context) -> Any:
        """Call the command. In its errors, names of parameters become flags: those with an underscore, and the name at
        the beginning. Errors of files keep the names, which are keys of the files.
        """
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            if re.match(r".*\.[a-z]\w*: ", str(error)):
                raise
            flags = {p.name: p.opts[-1] for p in self.params if p.opts[-1].startswith("-")}
            names = r"^\w+(?=: | is )|(?<![\w`'./-])[a-z]+(?:_[a-z]+)+(?![\w`'./(=])"
            error.args = (re.sub(names, lambda found: flags.get(found[0], found[0]), str(error)),)
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options used most, or, for `--help-all`, all options by group."""
        options = {p.name: p for p in self.get_params(ctx) if isinstance(p, click.Option)}
        records = {name: record for name, p in options.items() if (record := p.get_help_record(ctx)) is not None}
        if not ctx.meta.get(_SHOWS_ALL, False):
            is_long = self._first and len(records) > MOST_SHOWN
            rest = [name for name in records if name not in self._first]
            last = [name for name in rest if records[name][0].endswith(("--help", "--help-all"))]
            with formatter.section("Options"):
                names = [*self._first, *last] if is_long else [name for name in records if name != _HELP_ALL.name]
                formatter.write_dl([records[name] for name in names])
            return
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Most used", *GROUPS, "Other options")}
        for name in (*self._first, *(name for name in records if name not in self._first)):
            group = "Most used" if name in self._first else getattr(options[name], "group", "")
            sections[group or "Other options"].append(records[name])
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


_SHOWS_ALL = "chunkrt.cli.shows_all_options"


def _show_all(context: click.Context, _: click.Parameter, is_given: bool) -> None:
    if is_given:
        context.meta[_SHOWS_ALL] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()


_HELP_ALL = click.Option(
    ["--help-all"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_all,
    help="Show all options and exit.",
)


class FiniteRange(click.FloatRange):
    """A number in a range. Unlike click's class it accepts neither nan nor infinities."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number, or fail."""
        number: float = super().convert(value, param, ctx)
        if not isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class ModelName(click.ParamType[str]):
    """A model by any of its names; the shell completes known names and files."""

    name = "model"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text: any text may name a model."""
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return names of the catalogue and of the hub's cache; the shell adds files."""
        from chunkrt.checkpoints.catalogue import entries

        try:
            names = [*entries(), *(name for name, _ in cached_models())]
        except ChunkrtError:
            names = []
        known = [CompletionItem(name) for name in names if name.startswith(incomplete)]
        return [CompletionItem(incomplete, type="file"), *known]  # bash forgets the items before a file


_MODEL = ModelName()
_MODEL_HELP = "Model to use, in place of the argument MODEL."


def model_argument(command: Command) -> Command:
    """Give a command MODEL, also as -m, and --revision; the model's name arrives as the keyword argument `model`."""

    @wraps(command)
    def with_model(
        *arguments: Any, model: str | None, model_option: str | None, revision: str | None, **options: Any
    ) -> Any:
        if model is not None and model_option is not None:
            raise click.UsageError(f"MODEL is {model!r} and -m is {model_option!r}; give one of them")
        if (name := model if model is not None else model_option) is None:
            raise click.MissingParameter(ctx=click.get_current_context(), param_hint="'MODEL'", param_type="argument")
        return command(*arguments, model=with_revision(name, revision), **options)

    wrapped = revision_option(with_model)
    flags = ("-m", "-hf", "--model", "model_option")
    wrapped = option(*flags, group="Model", type=_MODEL, metavar="MODEL", help=_MODEL_HELP)(wrapped)
    return cast(Command, click.argument("model", type=_MODEL, required=False)(wrapped))


def revision_option(command: Command) -> Command:
    """Give a command `--revision`; it arrives as the keyword argument `revision`."""
    help = "Use this branch, tag or commit of a hub model."
    return option("--revision", group="Model", help=help)(command)


def with_revision(model: str, revision: str | None) -> str:
    """Return a model's name with a revision.

    Raises:
        ConfigError: the name is no id of the hub, or has a revision already.
    """
    if revision is None:
        return model
    if parse_hub_id(named := f"{model}@{revision}") is None:
        raise ConfigError(f"--revision is {revision!r}, but {model} is no hub id (org/name); omit --revision")
    return named
