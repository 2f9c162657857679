"""Convert chats to prompts with the Jinja template of a model.

A template is untrusted code. It runs in a separate process (`template_process.py`), which is stopped when it exceeds
MAX_SECONDS or MAX_BYTES.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

from chunkrt.errors import ConfigError, ModelError, cause_of
from chunkrt.tokenizer import template_process
from chunkrt.tokenizer.chat_prompt import NO_CONTROL_TOKENS, ChatPrompt, ControlTokens

MAX_SECONDS = 5.0
"""Time limit for rendering one prompt."""
MAX_BYTES = 1 << 28
"""Memory limit of the process, in addition to 16 times the part of its input that exceeds 1 MiB."""
_START_SECONDS = 60.0
_LIBRARIES = ("jinja2", "markupsafe")

_prepared: list[_Process] = []


def prepare() -> None:
    """Start the process of the next template now, so that it starts while a model is loaded. Errors are reported when a
    template needs the process.
    """
    with suppress(ConfigError):
        _prepared.append(_Process(MAX_BYTES))


class ChatTemplate:
    """A compiled template, in a separate process that lives as long as this object. Threads may share the object.

    Args:
        source: source text of the template, in Jinja.

    Raises:
        ModelError: the template does not compile.
        ConfigError: no Python interpreter can be started.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._process: _Process | None = None
        with self._lock:
            self._start(0)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        bos_token: str,
        eos_token: str,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        control_tokens: ControlTokens = NO_CONTROL_TOKENS,
    ) -> ChatPrompt:
        """Render a prompt. Fields of messages that are None are omitted, and `tools` is None for a template without
        tools.

        Args:
            options: further variables of the template.
            control_tokens: tokens that stay text if messages, tools or options spell them.

        Raises:
            ConfigError: the messages are not a list of JSON objects, each with a role; an option has the name of
                another variable, or is not a JSON value.
            ModelError: the template fails, refuses the messages, or takes more than MAX_SECONDS or MAX_BYTES.
        """
        given = {"messages": _plain(messages), "tools": None if tools is None else list(tools), "documents": None}
        own = {"add_generation_prompt": add_generation_prompt, "bos_token": bos_token, "eos_token": eos_token}
        if taken := sorted((given | own).keys() & set(options or ())):
            raise ConfigError(f"the option {taken[0]!r} of the chat template is set by chunkrt; use another name")

        def render(variables: dict[str, Any]) -> str:
            return self._answer(_line(variables | own))

        return control_tokens.render(render, given | _plain_options(options or {}))

    def _answer(self, line: bytes) -> str:
        with self._lock:
            process = self._start(len(line))
            try:
                return process.ask(line)
            except _RefusedError as error:
                raise ModelError(f"the model's chat template rejects these messages: {error}") from error

    def _start(self, num_bytes: int) -> _Process:
        """Return the process; start a new one if it has ended or has too little memory for `num_bytes` of input."""
        if self._process is None or not self._process.can_take(num_bytes):
            process = _prepared.pop() if _prepared else _Process(_memory_for(num_bytes))
            if not process.can_take(num_bytes):
                process.stop()
                process = _Process(_memory_for(num_bytes))
            weakref.finalize(self, process.stop)
            if self._process is not None:
                self._process.stop()
            self._process = process
            process.begin()
            try:
                process.ask(_line(self._source))
            except _RefusedError as error:
                raise ModelError(f"the model's chat template does not compile: {error}") from error
        return self._process


class _RefusedError(Exception):
    """An error that the process reported, or the reason for its end."""


class _Process:
    """A process that answers each line with a line. It belongs to its parent process; a fork of that process cannot use
    it."""

    def __init__(self, memory_bytes: int) -> None:
        if not sys.executable or getattr(sys, "frozen", False):
            raise ConfigError("chat templates need a Python interpreter, but sys.executable is not one")
        self.memory_bytes = memory_bytes
        self._owner = os.getpid()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", template_process.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            raise ConfigError(f"cannot start {sys.executable} for chat templates: {cause_of(error)}") from error
        path = sorted({str(Path(_origin(name)).parents[1]) for name in _LIBRARIES})
        with suppress(OSError):  # `begin` reports that the process has ended
            self._write(_line({"path": path, "memory_bytes": memory_bytes}))

    def begin(self) -> None:
        """Wait until the process has started. Raise ConfigError if it has ended."""
        try:
            self._read(_START_SECONDS)
        except _RefusedError as error:
            raise ConfigError(f"cannot start {sys.executable} for chat templates: {error}") from error

    def can_take(self, num_bytes: int) -> bool:
        """Return True if the process runs, belongs to this process, and has enough memory for `num_bytes` of input."""
        is_here = os.getpid() == self._owner and self._process.poll() is None
        return is_here and _memory_for(num_bytes) <= self.memory_bytes

    def ask(self, line: bytes) -> str:
        """Send a line and return the text of the answer.

        Raises:
            _RefusedError: the answer is an error, or the process ended or exceeded its limits. The process is then
                stopped.
        """
        return self._read(MAX_SECONDS, line)

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()

    def _read(self, seconds: float, line: bytes | None = None) -> str:
        """Return the text of the next answer, to `line` if one is given. The errors are those of `ask`."""
        assert self._process.stdout is not None
        watch = _Watch(self._process, seconds, self.memory_bytes)
        try:
            with watch:
                if line is not None:
                    self._write(line)
                answer = self._process.stdout.readline()
            found = json.loads(answer.decode("utf-8", "surrogatepass"))
        except (OSError, ValueError) as error:
            self.stop()
            raise _RefusedError(watch.reason or "its process ended") from error
        except BaseException:  # after an interrupt, the answer may still arrive, and would be mistaken for the next one
            self.stop()
            raise
        if "error" in found:
            raise _RefusedError(found["error"])
        text: str = found["text"]
        return text

    def stop(self) -> None:
        """Kill the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # unwritten bytes cannot be flushed any more
                pipe.close()
        if os.getpid() == self._owner:
            self._process.kill()
            self._process.wait()


class _Watch:
    """Kills a process at the time limit. On Windows, where the system does not limit memory, also kills it at the
    memory limit."""

    def __init__(self, process: subprocess.Popen[bytes], seconds: float, memory_bytes: int) -> None:
        self.reason = ""
        self._process, self._seconds, self._memory_bytes = process, seconds, memory_bytes
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        deadline = monotonic() + self._seconds
        step = 0.02 if sys.platform == "win32" else self._seconds
        while not self._ended.wait(step):
            if monotonic() >= deadline:
                return self._kill(f"rendering takes more than {self._seconds:g} seconds")
            if sys.platform == "win32" and _resident_bytes(self._process.pid) > self._memory_bytes:
                return self._kill("rendering takes too much memory")

    def _kill(self, reason: str) -> None:
        self.reason = reason
        self._process.kill()


def _resident_bytes(process_id: int) -> int:
    import psutil

    return int(psutil.Process(process_id).memory_info().rss)


def _memory_for(num_bytes: int) -> int:
    return MAX_BYTES + 16 * max(0, num_bytes - (1 << 20))


def _origin(library: str) -> str:
    found = find_spec(library)
    assert found is not None, library
    assert found.origin is not None, library
    return found.origin


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a copy of the messages that consists of JSON types only."""
    try:
        plain = json.loads(json.dumps(messages, default=_as_json_type))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the messages are not plain JSON data: {error}") from error
    if not isinstance(plain, list) or not plain:
        raise ConfigError(f"messages: found {type(messages).__name__}, expected a list with at least one message")
    for index, message in enumerate(plain):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError(f'message {index}: found {message!r:.80}, expected {{"role": ..., "content": ...}}')
    return [_as_templates_read_it(message) for message in plain]


def _as_json_type(value: object) -> object:
    """Return a mapping or a sequence as a type that JSON has."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not a JSON type")


_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def _as_templates_read_it(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without fields that are None, and with its reasoning under both names that templates use.

    Source: Transformers, `apply_chat_template` and `_alias_reasoning_fields`.
    """
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in _REASONING_FIELDS if key in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(options), default=_as_json_type))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the chat template's options are not plain JSON data: {error}") from error
    return plain
