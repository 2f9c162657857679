"""Options that several commands share, and loading of an engine with a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from chunkrt.backends.fallback import NpuState
from chunkrt.cli.command import option
from chunkrt.engine.arguments import read_size
from chunkrt.engine.declaration import size
from chunkrt.engine.engine import Engine
from chunkrt.engine.loading import load
from chunkrt.engine.options import DECLARED
from chunkrt.engine.settings import DEVICE, read_device, read_settings
from chunkrt.errors import ConfigError
from chunkrt.progress import ShownProgress
from chunkrt.runtime.record import RunRecord
from chunkrt.runtime.trace.file import check_trace_path, write_trace

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_UNIT = "GB"
"""Unit of sizes without one on the command line."""


class OneOf(click.ParamType[str]):
    """One of several names, looked up when needed, since plug-ins may add names."""

    name = "name"

    def __init__(self, names: Callable[[], Sequence[str]]) -> None:
        self._names = names

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return the metavar of a `click.Choice` of the names."""
        return click.Choice(self._names()).get_metavar(param, ctx) or ""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return one of the names, or fail like `click.Choice`."""
        return click.Choice(self._names()).convert(value, param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the names that begin with the text."""
        return [CompletionItem(name) for name in self._names() if name.startswith(incomplete)]


QUANTISATION_FIELDS = tuple(name for name, (_, _, declared) in DECLARED.items() if declared.group == "Quantisation")
PLANNING_FIELDS = tuple(name for name, (_, _, declared) in DECLARED.items() if declared.is_planned)
CONTEXT_FIELDS = ("context_shift", "context_keep")
_TYPES: dict[str, Any] = {"int": int, "bool": bool, "Path": click.Path(path_type=Path)}


def engine_fields(*names: str) -> Callable[[Command], Command]:
    """Give a command options that `EngineOptions` declares; they arrive as keyword arguments."""

    def decorate(command: Command) -> Command:
        for name in reversed(names):
            command = _engine_option(name)(command)
        return command

    return decorate


def _engine_option(name: str) -> Callable[[Command], Command]:
    kind, default, declared = DECLARED[name]
    reads = declared.reads_flag
    if declared.reads is size:
        reads = partial(read_size, declared.main_flag, unit=DEFAULT_UNIT)

    def read(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        return value if reads is None or value is None else reads(value)

    return option(
        *declared.aliases,
        declared.flag,
        name,
        group=declared.group,
        type=None if reads else OneOf(declared.choices) if declared.choices else _TYPES.get(kind),
        default=None if reads else default,
        show_default=not reads and type(default) in (str, int),
        multiple=declared.is_repeatable,
        metavar=declared.metavar,
        callback=read,
        help=declared.help,
    )


_SETTINGS = option(
    "--settings",
    "settings_file",
    group="Model",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Read options from a TOML file, e.g. from `chunkrt tune`. Options on the command line take precedence.",
)
_VERBOSE = click.option("-v", "--verbose", is_flag=True, expose_value=False, help="Show logs and tracebacks.")


def engine_options(command: Command) -> Command:
    """Give a command the options of `EngineOptions`, --settings and -v; they arrive as keyword arguments.

    This decorator is placed below the decorators of all other options.
    """
    return engine_options_but()(command)


def engine_options_but(*own: str, **fields: str) -> Callable[[Command], Command]:
    """Like `engine_options`, without options that the command declares itself; a settings file may set them.

    Args:
        fields: see `settings_option`.
    """
    names = [name for name in DECLARED if name not in (*CONTEXT_FIELDS, *own)]
    return _engine_options(*names, of_settings=DECLARED, **fields)


def planning_options(command: Command) -> Command:
    """Like `engine_options`, with only the options on which a plan and its runners depend."""
    return _engine_options(*PLANNING_FIELDS, of_settings=PLANNING_FIELDS)(command)


def _engine_options(*names: str, of_settings: Iterable[str], **fields: str) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        @wraps(command)
        def checked(*arguments: Any, **options: Any) -> Any:
            for name, (_, _, declared) in DECLARED.items():
                for is_met, condition in declared.needs:
                    if not is_met(options):
                        refuse_without(condition.format_map(options), name)
            return command(*arguments, **options)

        with_settings = _VERBOSE(settings_option(*of_settings, **fields)(checked))
        return engine_fields(*(name for name in names if DECLARED[name][2].flag))(cast(Command, with_settings))

    return decorate


def refuse_without(needed: str, *names: str) -> None:
    """Refuse options that were given on the command line and have no effect.

    Args:
        needed: the condition under which the options have an effect, for the message.
        names: names of the options.

    Raises:
        ConfigError: one of the options was given.
    """
    context = click.get_current_context()
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is ParameterSource.COMMANDLINE:
            raise ConfigError(f"{parameter.opts[-1]} has no effect without {needed}; omit it")


def settings_option(*names: str, **fields: str) -> Callable[[Command], Command]:
    """Give a command --settings; the file's values of these names arrive as keyword arguments.

    The command line takes precedence over the file, and the file over the defaults.

    Args:
        fields: keyword arguments whose names differ from the names of their values in the file.
    """
    all_names = dict.fromkeys(names) | fields

    def decorate(command: Command) -> Command:
        @wraps(command)
        def with_settings(*arguments: Any, settings_file: Path | None, **options: Any) -> Any:
            if settings_file is not None:
                source = click.get_current_context().get_parameter_source
                found = read_settings(settings_file) | {DEVICE: read_device(settings_file)}
                given = {name for name in options if source(name) is not ParameterSource.DEFAULT}
                values = {name: found.get(field or name) for name, field in all_names.items() if name not in given}
                options |= {name: value for name, value in values.items() if value is not None}
            return command(*arguments, **options)

        return _SETTINGS(cast(Command, with_settings))

    return decorate


def verbose_option(command: Command) -> Command:
    """Give a command -v, which `main` reads."""
    return _VERBOSE(command)


def trace_option(command: Command) -> Command:
    """Give a command --trace; it arrives as the keyword argument `trace`."""
    return option(
        "--trace",
        group="Output",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Write a trace, for Perfetto's viewer and `chunkrt trace`.",
    )(command)


def ranks_options(command: Command) -> Command:
    """Give a command --ranks and --rank, which select one rank's share; they arrive as `size` and `rank`."""
    command = option("--rank", group="Ranks", type=int, help="Index of the rank to show, from 0.  [default: 0]")(
        command
    )
    return option("--ranks", "size", group="Ranks", type=int, help="Number of ranks that share the model.")(command)


class Traced:
    """Runs of a command, and the states of the NPU after them, for a trace.

    Attributes:
        records: the records of the runs.
    """

    def __init__(self) -> None:
        self.records: list[RunRecord] = []
        self.npu: list[NpuState] = []

    def end(self, engine: Engine) -> None:
        """Note the state of an engine's NPU after its last run."""
        if (state := engine.stats().npu) is not None:
            self.npu.append(state)


@contextmanager
def written_trace(path: Path | None, model: str) -> Iterator[Traced]:
    """Yield an object for records of runs, and write them as a trace at the end, if a path is given.

    Raises:
        ConfigError: the trace cannot be written; a wrong path is reported before anything runs.
    """
    traced = Traced()
    if path is not None:
        check_trace_path(path)
    yield traced
    if path is not None:
        write_trace(path, traced.records, f"chunkrt {model}", traced.npu)


def measured(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings for a measurement: the prefix cache is off unless the settings name one.

    Raises:
        ConfigError: the command line limits a prefix cache that is off.
    """
    if settings.get("prefix_cache") is None:
        refuse_without("--prefix-cache", "prefix_cache_memory")
    return {**settings, "prefix_cache": settings.get("prefix_cache") or "off"}


@contextmanager
def open_engine(model: str, options: dict[str, Any]) -> Iterator[Engine]:
    """Load a model, and show progress on stderr while the model is downloaded or compiled."""
    with ShownProgress() as progress, load(model, progress=progress, **options) as engine:
        progress("", 0, 0)
        yield engine
