"""The command line: one module a command, imported when that command is called.

Data goes to stdout, progress and logs to stderr. What went wrong is one line on stderr and exit status 1 (2 for a
wrong command line, 130 after Ctrl-C); `-v` adds the traceback. Of several ranks that mpiexec launched, the first runs
the command and speaks.
"""

from __future__ import annotations

import errno
import importlib
import io
import logging
import os
import sys
import traceback
from difflib import get_close_matches
from pathlib import Path

import click

from chunkrt.cli.peers import INSTEAD
from chunkrt.engine.loading import follow
from chunkrt.errors import ChunkrtError
from chunkrt.runtime.ranks.launch import connect, say

COMMANDS = {
    "run": "Answer a prompt.",
    "chat": "Talk with a model.",
    "serve": "Serve a model over HTTP, as OpenAI's API has it.",
    "bench": "Measure prefill and decode speed.",
    "trace": "Tell where the time of a traced run went.",
    "support": "Tell what there is for a checkpoint, and what is missing.",
    "plan": "Show how a model is cut into subgraphs.",
    "ops": "Show what runs each operator of a model, and why.",
    "calibrate": "Measure activation ranges on some text.",
    "eval": "Measure how good a model is, and how far from float.",
    "fit": "Tell whether a model fits a device, before it is compiled.",
    "simulate": "Predict prefill speed on a device that is not here.",
    "tune": "Search how a model should run on a device, by simulation.",
    "profile": "Measure a model on this machine, for simulate and tune.",
    "compile": "Write an engine directory, for one or several NPUs.",
    "export": "Write a decoder as ONNX, for other tools.",
    "models": "List the catalogue.",
    "pull": "Download a model of the catalogue.",
    "cache": "Tell what is kept on this machine, and clear it.",
    "doctor": "Tell what this machine can run, and what is missing.",
}


class CommandGroup(click.Group):
    """Imports a command's module when it is needed, and turns errors into one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order of the table above."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import `chunkrt.cli.<name>` and take the command of that name."""
        if cmd_name in INSTEAD:
            raise click.UsageError(f"there is no {cmd_name}: {INSTEAD[cmd_name]}")
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"chunkrt.cli.{cmd_name}"), cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As any group does, with a guess where there is no such command."""
        name = args[0]
        if name not in INSTEAD and (nearest := get_close_matches(name, COMMANDS, 1)) and name not in COMMANDS:
            ctx.fail(f"No such command {name!r}; did you mean {nearest[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="chunkrt")
def cli() -> None:
    """Chunked prefill of decoder language models on CPU and NPU."""


def main() -> None:
    """Entry point of the `chunkrt` command."""
    if sys.stderr is None:  # closed: nobody wants to know
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115, for as long as the process lives
    if sys.stdout is None:
        say("chunkrt: standard output is closed; send it to the null device if nobody wants it")
        sys.exit(1)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8")  # what a model says has no place in most Windows code pages
    is_verbose = any(a == "--verbose" or (a[:1] == "-" and a[1:2] == "v" and set(a[1:]) == {"v"}) for a in sys.argv)
    logging.basicConfig(level=logging.INFO if is_verbose else logging.WARNING, format="%(name)s: %(message)s")
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
        if told := INSTEAD.get(error.option_name):
            _report(f"there is no {error.option_name}: {told}", False, error.exit_code)
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
        _report(f"there is too little memory ({error or 'no more can be had'})", is_verbose, 1)
    except OSError as error:
        if error.filename is None and error.errno in _OUTPUT_IS_LOST:
            _give_up_output()
            _report(f"cannot write to standard output: {error.strerror}", is_verbose, 1)
        _report(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", is_verbose, 1)
    except Exception as error:
        _report(f"unexpected {type(error).__name__}: {error} (run again with -v for the traceback)", is_verbose, 1)


_OUTPUT_IS_LOST = (errno.ENOSPC, errno.EIO, errno.EBADF, errno.EFBIG, errno.EDQUOT)


def _give_up_output() -> None:
    """Else the interpreter would try again to write what is left, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(message: str, is_verbose: bool, status: int) -> None:
    if is_verbose:
        traceback.print_exc()
    say(f"chunkrt: {' '.join(message.split())}", is_verbose=is_verbose)
    sys.exit(status)
