"""Options that several commands share, and loading of an engine with a progress bar."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from chunkrt.backends import BACKENDS
from chunkrt.backends.qnn.htp_options import HtpOptions
from chunkrt.cli.command import option
from chunkrt.engine.engine import Engine
from chunkrt.engine.loading import load
from chunkrt.engine.options import DECLARED
from chunkrt.engine.settings import read_settings
from chunkrt.errors import ConfigError
from chunkrt.progress import ShownProgress
from chunkrt.runtime.record import RunRecord
from chunkrt.runtime.trace.file import check_trace_path, write_trace

Command = TypeVar("Command", bound=Callable[..., Any])


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


def _number(flag: str, expected: str, *, prefix: str = "", word: str | None = None) -> Callable[[str | None], Any]:
    """Return a function that reads a number after a prefix, or a word."""

    def read(text: str | None) -> float | str | None:
        try:
            return text if text is None or text == word else float(text.removeprefix(prefix))
        except ValueError as error:
            raise ConfigError(f"{flag} is {text!r}, expected {expected}") from error

    return read


_UNITS = {"": 10**9, "MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}


def read_size(flag: str, text: str) -> int:
    """Return a size in bytes, from a number and a unit (GB by default).

    Raises:
        ConfigError: the text is no size above 0.
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) *([MG]i?B|)", text.strip(), re.IGNORECASE)
    num_bytes = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    if num_bytes < 1:
        raise ConfigError(f"{flag} is {text!r}, expected a size above 0, e.g. 2GB, 800MB or 1.5GiB")
    return num_bytes


def _size(flag: str) -> Callable[[str | None], int | None]:
    """Return a function that reads an optional size."""
    return lambda text: None if text is None else read_size(flag, text)


QUANTISATION_FIELDS = ("scheme", "calibration", "shadow", "budget", "outputs", "equalisation", "rotation")
PLANNING_FIELDS = (
    "npu",
    *QUANTISATION_FIELDS,
    "ops",
    "chunk_length",
    "context_length",
    "placement",
    "npu_strict",
    "attention",
    "npu_window",
    "npu_graph",
    "soc",
    "htp",
    "cache_dtype",
)
_WITHOUT_NPU = ("off", *BACKENDS)
CONTEXT_FIELDS = ("context_shift", "context_keep")
ALIASES = {
    "context_length": ("-c", "--ctx-size"),
    "threads": ("-t",),
    "cache_dtype": ("-ctk", "--cache-type-k"),
}
"""Flags by which other tools, mostly llama.cpp, name an option."""
_CACHE_TYPES = {"f32": "float32", "f16": "float16", "q8_0": "int8", "bf16": "bfloat16"}
_FOR_NPUS = (
    "soc",
    "htp",
    "on_npu_failure",
    "decode_on",
    "npu_strict",
    "attention",
    "npu_window",
    "npu_graph",
    "weights",
)
_READERS: dict[str, Callable[[Any], Any]] = {
    "budget": _number("--budget", "kl=NATS, as in kl=0.01", prefix="kl="),
    "equalisation": _number("--equalise", "0 to 1, or off", word="off"),
    "ops": lambda given: given or None,
    "htp": HtpOptions.parse,
    "cache_dtype": lambda text: _CACHE_TYPES.get(text, text),
    "cache_memory": _size("--cache-memory"),
    "prefix_cache_memory": _size("--prefix-cache-memory"),
    "prefix_cache_disk": _size("--prefix-cache-disk"),
}
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
    read = _READERS.get(name)
    return option(
        *ALIASES.get(name, ()),
        declared.flag,
        name,
        group=declared.group,
        type=None if read else OneOf(declared.choices) if declared.choices else _TYPES.get(kind),
        default=None if read else default,
        show_default=not read and type(default) in (str, int),
        multiple=name in ("ops", "htp"),
        metavar=declared.metavar,
        callback=(lambda context, parameter, value: read(value)) if read else None,
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


def engine_options_but(*own: str) -> Callable[[Command], Command]:
    """Like `engine_options`, without options that the command declares itself; a settings file may set them."""
    names = [name for name in DECLARED if name not in (*CONTEXT_FIELDS, *own)]
    return _engine_options(*names, of_settings=DECLARED)


def planning_options(command: Command) -> Command:
    """Like `engine_options`, with only the options on which a plan and its runners depend."""
    return _engine_options(*PLANNING_FIELDS, of_settings=PLANNING_FIELDS)(command)


def _engine_options(*names: str, of_settings: Iterable[str]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        @wraps(command)
        def checked(*arguments: Any, **options: Any) -> Any:
            if options.get("npu") in _WITHOUT_NPU:
                refuse_without(f"an NPU (--npu is {options['npu']})", *_FOR_NPUS)
            if options.get("attention") != "npu" and options.get("placement") is None:
                refuse_without("--attention npu", "npu_window", "npu_graph")
            if options.get("weights") == "npu-only":
                refuse_without("--weights both", "decode_on")
            if options.get("cache_memory") is None:
                refuse_without("--cache-memory", "queue")
            if not options.get("context_shift"):
                refuse_without("--context-shift", "context_keep")
            if options.get("prefix_cache") == "off":
                refuse_without("a prefix cache (--prefix-cache is off)", "prefix_cache_memory")
            if options.get("prefix_cache") in (None, "memory", "off"):
                refuse_without("--prefix-cache disk, or a folder", "prefix_cache_disk")
            return command(*arguments, **options)

        with_settings = _VERBOSE(settings_option(*of_settings)(checked))
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


def settings_option(*names: str) -> Callable[[Command], Command]:
    """Give a command --settings; the file's values of these names arrive as keyword arguments.

    The command line takes precedence over the file, and the file over the defaults.
    """

    def decorate(command: Command) -> Command:
        @wraps(command)
        def with_settings(*arguments: Any, settings_file: Path | None, **options: Any) -> Any:
            if settings_file is not None:
                source = click.get_current_context().get_parameter_source
                found = read_settings(settings_file)
                given = {name for name in options if source(name) is not ParameterSource.DEFAULT}
                options |= {name: found[name] for name in names if name in found and name not in given}
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


@contextmanager
def written_trace(path: Path | None, model: str) -> Iterator[list[RunRecord]]:
    """Yield a list for records of runs, and write them as a trace at the end, if a path is given.

    Raises:
        ConfigError: the trace cannot be written; a wrong path is reported before anything runs.
    """
    records: list[RunRecord] = []
    if path is not None:
        check_trace_path(path)
    yield records
    if path is not None:
        write_trace(path, records, f"chunkrt {model}")


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
