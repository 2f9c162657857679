"""`chunkrt serve`: a model behind OpenAI's HTTP API."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import threading
from pathlib import Path
from typing import Any, Literal

import click

from chunkrt.cli.command import GroupedCommand
from chunkrt.cli.generation import template_option
from chunkrt.cli.options import engine_options, open_engine
from chunkrt.errors import ConfigError
from chunkrt.files import read_text

LATE_SECONDS = 5.0
"""After --grace, until the process ends whatever runs: requests are answered and chunks end meanwhile."""


@click.command(cls=GroupedCommand, first=("host", "port", "api_key_file", "max_sessions", "npu"))
@click.argument("model")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 takes a free one.")
@click.option("--name", help="What clients call the model; by default as it is called here.")
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    help="Clients have to send a key of this file, which has one a line: KEY, or NAME: KEY.",
)
@click.option("--no-api-key", is_flag=True, help="Let anybody in, beyond this machine too.")
@click.option("--max-sessions", type=click.IntRange(1), default=16, show_default=True, help="Sequences at a time.")
@click.option(
    "--max-waiting",
    type=click.IntRange(0),
    default=64,
    show_default=True,
    help="Requests that wait; more get 503 at once.",
)
@click.option(
    "--grace",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="Seconds to finish in; 5 s later the process ends, even if a device does not answer.",
)
@click.option("--max-body", type=click.IntRange(1), default=16 * 2**20, show_default=True, help="Bytes of a request.")
@click.option("--allow-origin", metavar="ORIGIN", help="Let pages of this origin ask (* for any); by default of none.")
@click.option(
    "--allow-host", metavar="NAME", multiple=True, help="A name to be asked by, beside localhost and addresses."
)
@click.option(
    "--embeddings",
    type=click.Choice(["last", "mean"]),
    help="Give embeddings of the last token's hidden state or of the mean of all.  [default: as the model's files say]",
)
@template_option("a request's own come first")
@engine_options
def serve(
    model: str,
    host: str,
    port: int,
    name: str | None,
    api_key_file: Path | None,
    no_api_key: bool,
    max_sessions: int,
    max_waiting: int,
    grace: float,
    max_body: int,
    allow_origin: str | None,
    allow_host: tuple[str, ...],
    embeddings: Literal["last", "mean"] | None,
    template_options: dict[str, Any],
    **settings: Any,
) -> None:
    """Serve MODEL over HTTP, as OpenAI's API has it: chats, completions, scores; and a page to chat at.

    Requests that come at the same time share chunks. Ctrl-C or SIGTERM: nothing new is taken, and what runs is finished
    within --grace.
    """
    keys = {} if api_key_file is None else _read_keys(api_key_file)
    if host.startswith("[") and host.endswith("]"):  # an IPv6 address as URLs have it
        host = host[1:-1]
    if not keys and not no_api_key and not _is_loopback(host):
        raise ConfigError(
            f"--host {host} can be reached from elsewhere and there is no key; give --api-key-file, or say --no-api-key"
        )
    try:
        from chunkrt.server.listening import listen
        from chunkrt.server.service import ServerOptions, Service
    except ImportError as error:
        raise ConfigError(f"the server needs {error.name}; pip install 'chunkrt[serve]'") from error
    options = ServerOptions(
        api_keys=keys,
        max_sessions=max_sessions,
        queue=max_waiting,
        max_body_bytes=max_body,
        allow_origin=allow_origin and allow_origin.rstrip("/").lower(),  # as browsers write it
        allow_hosts=(host, *allow_host),
        embeddings=embeddings,
        template_options=template_options,
    )
    with open_engine(model, {"queue": max(max_sessions, 1), **settings}) as engine:
        service = Service(engine, name or _name(model), options)

        def tell(url: str) -> None:
            click.echo(f"{service.name} is served at {url} (Ctrl-C ends)", err=True)

        deadline = threading.Timer(grace + LATE_SECONDS, _abandon, (grace,))
        deadline.daemon = True
        try:
            asyncio.run(listen(service, host, port, grace_seconds=grace, tell=tell, on_end=deadline.start))
            engine.close()
        finally:
            deadline.cancel()


def _abandon(grace: float) -> None:
    """End the process, threads in a device's driver or not."""
    click.echo(f"chunkrt: a task did not end within {grace + LATE_SECONDS:g} s; is the device stuck?", err=True)
    os._exit(1)


def _name(model: str) -> str:
    """Of files and folders their own; a catalogue's name or a hub's id as it is."""
    path = Path(model)
    return path.resolve().name if path.exists() else model


def _read_keys(path: Path) -> dict[str, str]:
    """Return the keys of a file by their names. A line is `KEY`, `NAME: KEY`, a comment after `#`, or empty."""
    try:
        lines = read_text(path).splitlines()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API keys from {path}: {error}") from error
    keys = dict[str, str]()
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        name, separator, key = line.rpartition(": ")
        name, key = name.strip() if separator else f"key-{number}", key.strip()
        if not name or not name.isprintable() or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                f"{path}, line {number}, holds no API key: expected ASCII letters without spaces, or NAME: KEY"
            )
        if name in keys or key in keys.values():
            raise ConfigError(f"{path}, line {number}: the name or the key has come before; give each client its own")
        keys[name] = key
    if not keys:
        raise ConfigError(f"{path} holds no API key: expected one a line, as KEY or NAME: KEY")
    if os.name == "posix" and mode & 0o004:
        click.echo(f"warning: every user of this machine can read {path}; chmod 600 {path}", err=True)
    return keys


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
