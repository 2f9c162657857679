"""The command line: one module per command, imported when the command is called.

Data goes to stdout, progress and logs go to stderr. An error is one line on stderr and exit status 1 (2 for a wrong
command line, 130 after Ctrl-C); `-v` adds the traceback. If mpiexec launched several ranks, the first one runs the
command and prints its output.
"""

from __future__ import annotations

import errno
import importlib
import io
import logging
import os
import sys
import traceback
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

import click

from chunkrt import __version__
from chunkrt.cli.output import FlagFormatter, in_flags
from chunkrt.cli.peers import INSTEAD
from chunkrt.engine.loading import follow
from chunkrt.errors import INSTALL_COMPILE, ChunkrtError, cause_of, needs_compile_extra
from chunkrt.runtime.ranks.launch import connect, say

COMMANDS = {
    "run": "Answer a prompt.",
    "chat": "Chat with a model.",
    "serve": "Serve a model over OpenAI's HTTP API.",
    "bench": "Measure prefill and decode speed.",
    "trace": "Show a time breakdown of a recorded run.",
    "support": "Check whether a checkpoint is supported.",
    "compare": "Compare a model's values with those in Transformers.",
    "plan": "Show the subgraphs of a model and their costs.",
    "ops": "Show the implementation of each operator of a model.",
    "calibrate": "Measure activation ranges on a text.",
    "eval": "Measure the quality of a model, and its distance from the float model.",
    "fit": "Check whether a model fits a device, before compiling it.",
    "simulate": "Predict prefill speed on a device that you do not have.",
    "tune": "Search the best settings for a device, by simulation.",
    "experiment": "Simulate a grid of choices from a TOML file.",
    "report": "Write a page about runs, from the files of other commands.",
    "profile": "Measure a model on this machine, for simulate and tune.",
    "compile": "Write an engine directory, for the CPU and one or several NPUs.",
    "export": "Write a decoder as ONNX, for other tools.",
    "models": "List the catalogue and the downloaded models.",
    "pull": "Download a model of the catalogue or the hub.",
    "cache": "List and remove cached files.",
    "doctor": "Check this machine, and report missing parts.",
    "device-test": "Check a compiled model on a device, and write a report.",
}


def find_command(name: str) -> click.Command:
    """Import the module of a command, and return the command."""
    module = name.replace("-", "_")
    command: click.Command = getattr(importlib.import_module(f"chunkrt.cli.{module}"), module)
    return command


class CommandGroup(click.Group):
    """Group of commands whose modules are imported when needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, in the order of COMMANDS."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import `chunkrt.cli.<name>` and return its command of that name."""
        if cmd_name in INSTEAD:
            raise click.UsageError(f"no such command {cmd_name!r}: {INSTEAD[cmd_name]}")
        if cmd_name not in COMMANDS:
            return None
        return find_command(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command, or fail with the nearest name."""
        name = args[0]
        if name not in INSTEAD and (nearest := get_close_matches(name, COMMANDS, 1)) and name not in COMMANDS:
            ctx.fail(f"No such command {name!r}; did you mean {nearest[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Run decoder language models with chunked prefill on CPU and NPU."""


def main() -> None:
    """Entry point of the `chunkrt` command."""
    if sys.stderr is None:  # closed
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115, for as long as the process lives
    if sys.stdout is None:
        say("chunkrt: standard output is closed; redirect it to the null device to discard it")
        sys.exit(1)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(io.UnsupportedOperation):  # a program that calls this function has read from standard input
                stream.reconfigure(encoding="utf-8")  # most Windows code pages lack characters of prompts and answers
    is_verbose = any(a == "--verbose" or (a[:1] == "-" and a[1:2] == "v" and set(a[1:]) == {"v"}) for a in sys.argv)
    handler = logging.StreamHandler()
    handler.setFormatter(FlagFormatter("%(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO if is_verbose else logging.WARNING, handlers=[handler])
    try:
        if (launch := connect(sys.argv[1:])) is not None and launch.rank > 0:
            logging.getLogger().setLevel(logging.INFO if is_verbose else logging.ERROR)
            sys.exit(follow(launch))
        status = cli.main(prog_name="chunkrt", standalone_mode=False)
        sys.stdout.flush()
        sys.exit(status if isinstance(status, int) else 0)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.NoSuchOption as error:
        if hint := INSTEAD.get(error.option_name):
            _report(f"no such option {error.option_name}: {hint}", False, error.exit_code)
        path = error.ctx.command_path if error.ctx else "chunkrt"
        _report(f"{error.format_message().rstrip('.')} (see `{path} --help`)", False, error.exit_code)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f" (see `{context.command_path} --help`)" if context else ""
        _report(error.format_message().rstrip(".") + hint, False, error.exit_code)
    except ChunkrtError as error:
        _report(str(error), is_verbose, 1)
    except (KeyboardInterrupt, click.Abort):
        say("interrupted")
        sys.exit(130)
    except BrokenPipeError:
        _give_up_output()
        sys.exit(1)
    except MemoryError as error:
        _report(f"out of memory ({error or 'an allocation failed'})", is_verbose, 1)
    except OSError as error:
        is_broken = sys.platform == "win32" and error.errno == _WINDOWS_BROKEN_PIPE and error.filename is None
        if is_broken and _stdout_fails():
            _give_up_output()
            sys.exit(1)
        if error.filename is None and error.errno in _OUTPUT_IS_LOST:
            _give_up_output()
            _report(f"cannot write to standard output: {cause_of(error)}", is_verbose, 1)
        _report(f"{cause_of(error)}{f': {error.filename}' if error.filename else ''}", is_verbose, 1)
    except Exception as error:
        if isinstance(error, ImportError) and needs_compile_extra(error):
            _report(f"this command needs {error.name}, which is not installed; run {INSTALL_COMPILE}", is_verbose, 1)
        _report(f"unexpected {type(error).__name__}: {error} (run again with -v for the traceback)", is_verbose, 1)


_OUTPUT_IS_LOST = (errno.ENOSPC, errno.EIO, errno.EBADF, errno.EFBIG, errno.EDQUOT)

_WINDOWS_BROKEN_PIPE = errno.EINVAL
"""Error of a write to a pipe without a reader on Windows, which stands for other errors too."""


def _stdout_fails() -> bool:
    """Return True if nothing more can be written. A new line shows it; one after incomplete output does no harm."""
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        return True
    return False


def _give_up_output() -> None:
    """Redirect stdout to the null device, so that the interpreter does not fail again when it flushes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(message: str, is_verbose: bool, status: int) -> None:
    if is_verbose:
        traceback.print_exc()
    say(f"chunkrt: {' '.join(in_flags(message).split())}", is_verbose=is_verbose)
    sys.exit(status)
