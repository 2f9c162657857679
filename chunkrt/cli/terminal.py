"""Input of a chat from a terminal, and output of its answers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click

from chunkrt.checkpoints.catalogue import home
from chunkrt.cli.conversation import COMMANDS, SETTINGS
from chunkrt.errors import ConfigError
from chunkrt.files import BYTE_ORDER_MARK

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.key_binding import KeyPressEvent
    from rich.console import Console
    from rich.live import Live

FENCE = "```"


def line_reader() -> Callable[[], str | None]:
    """Return a function that reads the next turn, and returns None at the end of the input.

    In a terminal, a turn may have several lines, pasted or started by Alt-Enter. Ctrl-C discards the current input.
    """
    if sys.stdin is None or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _piped_line
    prompt = _prompt_session()

    def read() -> str | None:
        try:
            return prompt.prompt("> ").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            return ""

    return read


def _piped_line() -> str | None:
    try:
        line = "" if sys.stdin is None else sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not UTF-8 text: {error}") from error
    return line.removeprefix(BYTE_ORDER_MARK).strip() if line else None


def _prompt_session() -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    history = home() / "chat_history"
    try:
        history.parent.mkdir(parents=True, exist_ok=True)
        history.touch(mode=0o600)
        past: FileHistory | InMemoryHistory = FileHistory(str(history))
    except OSError:
        past = InMemoryHistory()
    return PromptSession(
        history=past, completer=_completer(), complete_while_typing=False, multiline=True, key_bindings=keys
    )


def _completer() -> Completer:
    from prompt_toolkit.completion import Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    files = PathCompleter(expanduser=True)

    class Commands(Completer):
        """Completion of commands and of their arguments: files and names of settings."""

        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
            name, space, rest = document.text_before_cursor.partition(" ")
            if not name.startswith("/"):
                return
            if not space:
                yield from (Completion(known, -len(name)) for known in COMMANDS if known.startswith(name))
            elif name in ("/save", "/load"):
                yield from files.get_completions(Document(rest), complete_event)
            elif name == "/set":
                yield from (Completion(known, -len(rest)) for known in SETTINGS if known.startswith(rest))

    return Commands()


class Shown:
    """Output of an answer as it arrives: in a terminal each complete block of Markdown is rendered, else text is shown.

    Args:
        renders: True if Markdown is rendered when standard output is a terminal.
    """

    def __init__(self, *, renders: bool) -> None:
        self._console: Console | None = None
        self._live: Live | None = None
        self._block = ""
        if renders and sys.stdout.isatty():
            from rich.console import Console

            console = Console()
            self._console = console if console.is_terminal and not console.is_dumb_terminal else None

    def __call__(self, text: str) -> None:
        """Show the next piece."""
        if self._console is None:
            click.echo(text, nl=False)
            return
        self._block += text
        while (end := block_end(self._block)) is not None:
            block, self._block = self._block[:end], self._block[end:].lstrip("\n")
            self._render(block)
        if self._block.strip():
            self._draw()

    def end(self) -> None:
        """Show the remainder of the answer."""
        if self._console is None:
            click.echo()
        else:
            self._render(self._block)
            self._block = ""

    def _draw(self) -> None:
        from rich.live import Live
        from rich.text import Text

        if self._live is None:
            self._live = Live(console=self._console, transient=True, auto_refresh=False)
            self._live.start()
        self._live.update(Text(self._block), refresh=True)

    def _render(self, block: str) -> None:
        from rich.markdown import Markdown

        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._console is not None and block.strip():
            self._console.print(Markdown(block))


def block_end(text: str) -> int | None:
    """Return the end of the first block of Markdown: an empty line outside of code."""
    start = 0
    while (end := text.find("\n\n", start)) >= 0:
        if text.count(FENCE, 0, end) % 2 == 0:
            return end + 1
        start = end + 1
    return None
