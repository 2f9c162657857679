"""Options that several commands share, and how they load an engine with a progress bar."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click
from click.core import ParameterSource

from chunkrt.backends import BACKENDS
from chunkrt.backends.qnn.options import HtpOptions
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
    """One of names that plug-ins may add to, and which are therefore looked up when they are needed."""

    name = "name"

    def __init__(self, names: Callable[[], Sequence[str]]) -> None:
        self._names = names

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """As `click.Choice` has it."""
        return click.Choice(self._names()).get_metavar(param, ctx) or ""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """As `click.Choice` does it."""
        return click.Choice(self._names()).convert(value, param, ctx)


def _number(flag: str, expected: str, *, prefix: str = "", word: str | None = None) -> Callable[[str | None], Any]:
    """Reads a number behind a prefix, or a word."""

    def read(text: str | None) -> float | str | None:
        try:
            return text if text is None or text == word else float(text.removeprefix(prefix))
        except ValueError as error:
            raise ConfigError(f"{flag} is {text!r}, expected {expected}") from error

    return read


_UNITS = {"": 10**9, "MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}


def read_size(flag: str, text: str) -> int:
    """Bytes: a number with a unit behind it, GB if there is none. Raises ConfigError if it is no size above 0."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) *([MG]i?B|)", text.strip(), re.IGNORECASE)
    num_bytes = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    if num_bytes < 1:
        raise ConfigError(f"{flag} is {text!r}, expected a size above 0 such as 2GB, 800MB or 1.5GiB")
    return num_bytes


def _size(flag: str) -> Callable[[str | None], int | None]:
    """Reads a size, if one is given."""
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
"""What peers call an option, llama.cpp before all."""
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
    """Give a command some of the options that `EngineOptions` declares; they arrive as keyword arguments."""

    def decorate(command: Command) -> Command:
        for name in reversed(names):
            command = _engine_option(name)(command)
        return command

    return decorate


def _engine_option(name: str) -> Callable[[Command], Command]:
    kind, default, declared = DECLARED[name]
    read = _READERS.get(name)
    return click.option(
        *ALIASES.get(name, ()),
        declared.flag,
        name,
        type=None if read else OneOf(declared.choices) if declared.choices else _TYPES.get(kind),
        default=None if read else default,
        show_default=not read and type(default) in (str, int),
        multiple=name in ("ops", "htp"),
        metavar=declared.metavar,
        callback=(lambda context, parameter, value: read(value)) if read else None,
        help=declared.help,
    )


_SETTINGS = click.option(
    "--settings",
    "settings_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="TOML file of options, such as `chunkrt tune` writes. Those given here win over it.",
)
_VERBOSE = click.option("-v", "--verbose", is_flag=True, expose_value=False, help="Logs and tracebacks.")


def engine_options(command: Command) -> Command:
    """Give a command the options that `EngineOptions` takes, --settings and -v; they arrive as keyword arguments.

    It stands below all other options of the command.
    """
    return engine_options_but()(command)


def engine_options_but(*own: str) -> Callable[[Command], Command]:
    """As `engine_options`, without those that the command declares itself; a settings file may have them."""
    names = [name for name in DECLARED if name not in (*CONTEXT_FIELDS, *own)]
    return _engine_options(*names, of_settings=DECLARED)


def planning_options(command: Command) -> Command:
    """As `engine_options`, but only those that a plan and what runs it depend on."""
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
    """Refuse options of the present command that were given on its command line, and would do nothing.

    Raises:
        ConfigError: the first of them.
    """
    context = click.get_current_context()
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is ParameterSource.COMMANDLINE:
            raise ConfigError(f"{parameter.opts[-1]} does nothing without {needed}; leave it away")


def settings_option(*names: str) -> Callable[[Command], Command]:
    """Give a command --settings. What the file says of these names arrives as keyword arguments.

    What is given on the command line wins over the file, and the file over an option's default.
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
    """Give a command -v alone; `main` reads it."""
    return _VERBOSE(command)


def trace_option(command: Command) -> Command:
    """Give a command --trace; it arrives as the keyword argument `trace`."""
    return click.option(
        "--trace",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Write a trace for Perfetto's viewer and `chunkrt trace`.",
    )(command)


def ranks_options(command: Command) -> Command:
    """Give a command --ranks and --rank, of which one's share is shown; they arrive as `size` and `rank`."""
    command = click.option("--rank", type=int, help="Which of them, from 0.  [default: 0]")(command)
    return click.option("--ranks", "size", type=int, help="Show the share of one of so many ranks.")(command)


@contextmanager
def written_trace(path: Path | None, model: str) -> Iterator[list[RunRecord]]:
    """Yields a list for the records of runs, which become the trace at the end; without a path, nothing does.

    Raises:
        ConfigError: the trace cannot be written; that the path is wrong is told before anything runs.
    """
    records: list[RunRecord] = []
    if path is not None:
        check_trace_path(path)
    yield records
    if path is not None:
        write_trace(path, records, f"chunkrt {model}")


def measured(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings to measure with: everything is computed, unless the prefix cache is asked for by name.

    Raises ConfigError if the present command was given a budget for a cache that there is not.
    """
    if settings.get("prefix_cache") is None:
        refuse_without("--prefix-cache", "prefix_cache_memory")
    return {**settings, "prefix_cache": settings.get("prefix_cache") or "off"}


@contextmanager
def open_engine(model: str, options: dict[str, Any]) -> Iterator[Engine]:
    """Load a model, showing on stderr how far it is while it is pulled or compiled."""
    with ShownProgress() as progress, load(model, progress=progress, **options) as engine:
        progress("", 0, 0)
        yield engine
