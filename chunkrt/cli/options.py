"""Options that several commands share, and how they load an engine with a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import click
from click.core import ParameterSource

from chunkrt.backends.qnn.options import HtpOptions
from chunkrt.engine.engine import Engine, load
from chunkrt.engine.options import ON_NPU_FAILURE, OUTPUTS, EngineOptions, npu_choices
from chunkrt.engine.settings import read_settings
from chunkrt.errors import ConfigError
from chunkrt.quant.scheme import DEFAULT_BUDGETS, SCHEME_NAMES
from chunkrt.runtime.affinity import NO_AFFINITY
from chunkrt.runtime.policy import DEFAULT_POLICY, policy_names
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


_HTP = click.option(
    "--htp",
    multiple=True,
    metavar="NAME=VALUE",
    callback=lambda context, parameter, value: HtpOptions.parse(value),
    help="A setting of the NPU: performance_mode, vtcm_mb, rpc_control_latency_us.",
)


def _budget(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return float(text.removeprefix("kl="))
    except ValueError as error:
        raise ConfigError(f"--budget is {text!r}, expected kl=NATS, as in kl=0.01") from error


def _equalisation(text: str | None) -> float | Literal["off"] | None:
    if text is None or text == "off":
        return text  # type: ignore[return-value]
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"--equalise is {text!r}, expected 0 to 1, or off") from error


QUANTISATION_FIELDS = ("scheme", "calibration", "shadow", "budget", "outputs", "equalisation", "rotation")
_QUANTISATION_OPTIONS = (
    click.option("--scheme", type=click.Choice(SCHEME_NAMES), help="Quantisation.  [default: the model's]"),
    click.option(
        "--calibration", type=click.Path(path_type=Path), help="What `chunkrt calibrate` wrote.  [default: made]"
    ),
    click.option(
        "--shadow",
        metavar="none|all|auto|LIST",
        help="8-bit linears whose largest inputs are computed in float beside them; auto: the fewest within --budget.  "
        "[default: none]",
    ),
    click.option(
        "--budget",
        metavar="kl=NATS",
        callback=lambda context, parameter, value: _budget(value),
        help="Mean KL divergence from the float model allowed to --shadow auto and --scheme mixed.  "
        f"[default: kl={DEFAULT_BUDGETS['shadow']} and kl={DEFAULT_BUDGETS['mixed']}]",
    ),
    click.option(
        "--outputs",
        type=click.Choice(OUTPUTS),
        help="Of static linears: rounded to a grid, as an NPU does, or float.  "
        "[default: float for w8a8 on a CPU, else grid]",
    ),
    click.option(
        "--equalise",
        "equalisation",
        metavar="0..1|off",
        callback=lambda context, parameter, value: _equalisation(value),
        help="Unevenness of activations that static schemes move into the weights.  [default: the scheme's]",
    ),
    click.option(
        "--rotate/--no-rotate", "rotation", help="Rotate the residual stream before a static scheme quantises."
    ),
)
_ENGINE_OPTIONS = (
    click.option(
        "--npu",
        type=OneOf(npu_choices),
        default="auto",
        show_default=True,
        help="Who plays the NPU. auto: a Hexagon NPU if there is one, else native; qnn: that NPU, or its emulator; "
        "off: no partition, all on the CPU; or a plug-in.",
    ),
    click.option(
        "--ops",
        multiple=True,
        metavar="all|none|+NAME|-NAME",
        callback=lambda context, parameter, value: value or None,
        help="Operators in the form of their backend or a plug-in, the others in the reference's; several with commas "
        "or repeated. `chunkrt ops` lists them.  [default: all; none for --npu reference]",
    ),
    click.option(
        "--chunk",
        "chunk_length",
        type=int,
        help="Tokens of a chunk.  [default: as compiled, else 32 with an NPU, 128 without]",
    ),
    click.option(
        "--policy",
        type=OneOf(policy_names),
        default=DEFAULT_POLICY,
        show_default=True,
        help="Order of tasks.",
    ),
    click.option(
        "--in-flight", "chunks_in_flight", type=int, help="Chunks under way at once.  [default: as many as help]"
    ),
    click.option("--threads", type=int, help="Thread budget.  [default: the cores, or those of --affinity]"),
    click.option(
        "--affinity",
        default=NO_AFFINITY,
        show_default=True,
        metavar="none|big|LIST",
        help="CPUs to run on: big for the fast cores, or a list such as 0,2,4-7. On Linux.",
    ),
    click.option("--context", "context_length", type=int, help="Positions to hold.  [default: the model's]"),
    click.option("--place", "placement", type=click.Path(path_type=Path), help="TOML file that places modules."),
    click.option("--soc", help="The SoC whose NPU is used or emulated.  [default: this one, or SM8650]"),
    click.option(
        "--on-npu-failure",
        type=click.Choice(ON_NPU_FAILURE),
        help="Go on on the CPU, or fail.  [default: fallback for auto, else fail]",
    ),
    _HTP,
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
    command = settings_option(*EngineOptions.__dataclass_fields__)(command)
    for option in reversed((*_ENGINE_OPTIONS[:1], *_QUANTISATION_OPTIONS, *_ENGINE_OPTIONS[1:], _VERBOSE)):
        command = option(command)
    return command


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


def quantisation_options(command: Command) -> Command:
    """Give a command those of the engine's options that say how a checkpoint is quantised."""
    for option in reversed(_QUANTISATION_OPTIONS):
        command = option(command)
    return command


def htp_option(command: Command) -> Command:
    """Give a command --htp alone."""
    return _HTP(command)


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


@contextmanager
def open_engine(model: str, options: dict[str, Any]) -> Iterator[Engine]:
    """Load a model, showing a progress bar on stderr while it is pulled or compiled."""
    with progress_bar() as progress, load(model, progress=progress, **options) as engine:
        progress("", 0, 0)
        yield engine


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr for each thing that is being done; silent unless stderr is a terminal.

    Yields a function of (what, done, total); a total of 0 takes the bar away.
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    bars = Progress(console=console, transient=True, disable=not console.is_terminal)
    task = bars.add_task("", total=None, visible=False)

    def update(what: str, done: int, total: int) -> None:
        if total and not bars.live.is_started:
            bars.start()
        bars.update(task, description=what, completed=done, total=total or None, visible=bool(total))
        if not total or done >= total:
            bars.stop()

    try:
        yield update
    finally:
        bars.stop()
