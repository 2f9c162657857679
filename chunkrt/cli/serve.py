"""`chunkrt serve`: serve a model over OpenAI's HTTP API."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import click

from chunkrt.cli.command import FiniteRange, GroupedCommand, option
from chunkrt.cli.generation_options import template_option
from chunkrt.cli.shared_options import engine_options_but, open_engine, refuse_without
from chunkrt.errors import ConfigError, cause_of
from chunkrt.files import read_text

LATE_SECONDS = 5.0
"""Seconds after --grace until the process ends regardless of running tasks; requests are answered meanwhile."""


@click.command(
    cls=GroupedCommand,
    first="host port api_key_file max_sessions npu scheme threads context_length cache_memory prefix_cache",
)
@click.argument("model")
@option("--host", group="Access", default="127.0.0.1", show_default=True, help="Address to listen on.")
@option(
    "--port",
    group="Access",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="Port to listen on; 0 selects a free port.",
)
@option("--name", group="Answer", help="Name of the model for clients.  [default: MODEL]")
@option(
    "--api-key-file",
    group="Access",
    type=click.Path(path_type=Path),
    help="Require one of the API keys in this file. Each line is KEY or NAME: KEY.",
)
@option(
    "--no-api-key",
    group="Access",
    is_flag=True,
    help="Accept requests without a key even when listening on a public address.",
)
@option(
    "--max-sessions",
    group="Execution",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Maximum number of sequences that are computed at the same time.",
)
@option(
    "--max-waiting",
    group="Execution",
    type=click.IntRange(0),
    default=64,
    show_default=True,
    help="Maximum number of waiting requests; further ones get status 503.",
)
@option(
    "--grace",
    group="Execution",
    type=FiniteRange(0),
    default=30.0,
    show_default=True,
    help="Seconds for running requests to finish on shutdown; the process exits at most 5 s later.",
)
@option(
    "--max-body",
    group="Access",
    type=click.IntRange(1),
    default=16 * 2**20,
    show_default=True,
    help="Largest body of a request, in bytes.",
)
@option(
    "--allow-origin",
    group="Access",
    metavar="ORIGIN",
    help="Allow CORS requests from ORIGIN (* for any).  [default: none]",
)
@option(
    "--allow-host",
    group="Access",
    metavar="NAME",
    multiple=True,
    help="Accept NAME in the Host header, in addition to localhost and IP addresses; may be repeated.",
)
@option(
    "--embeddings",
    group="Answer",
    type=click.Choice(["last", "mean"]),
    help="Serve embeddings: the hidden state of the last token, or the mean of all.  [default: as the model's files "
    "specify]",
)
@option(
    "--load-adapter",
    "loaded_adapters",
    group="Model",
    metavar="NAME=PATH",
    multiple=True,
    help="Load a LoRA adapter, which requests choose by NAME; may be repeated. It needs --adapters.",
)
@option(
    "--adapter-scale",
    "adapter_scales",
    group="Model",
    metavar="NAME=FACTOR",
    multiple=True,
    help="Multiply the products of the adapter NAME of --load-adapter by FACTOR; may be repeated.  [default: 1]",
)
@option(
    "--adapter-folder",
    group="Access",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Let clients load and unload adapters of this folder. It needs --adapters.  [default: they may not]",
)
@template_option("a request's own options take precedence")
@engine_options_but("queue", max_waiting="queue")
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
    loaded_adapters: tuple[str, ...],
    adapter_scales: tuple[str, ...],
    adapter_folder: Path | None,
    template_options: dict[str, Any],
    **settings: Any,
) -> None:
    """Serve MODEL over OpenAI's HTTP API: chats, completions, scores and embeddings, and a web page for chats.

    Concurrent requests are batched into shared chunks. On Ctrl-C or SIGTERM, the server refuses new requests and
    waits for running ones for at most --grace seconds.
    """
    if not settings["adapters"]:
        refuse_without("--adapters", "loaded_adapters", "adapter_scales", "adapter_folder")
    pairs = [_pair("--load-adapter", text, "PATH") for text in loaded_adapters]
    scales = dict(_scale(text, pairs) for text in adapter_scales)
    keys = {} if api_key_file is None else _read_keys(api_key_file)
    if host.startswith("[") and host.endswith("]"):  # an IPv6 address, written as in URLs
        host = host[1:-1]
    if not keys and not no_api_key and not _is_loopback(host):
        raise ConfigError(
            f"--host {host} is a public address and there is no API key; give --api-key-file, or --no-api-key"
        )
    try:
        from chunkrt.server.listening import listen
        from chunkrt.server.service import ServerOptions, Service
    except ImportError as error:
        raise ConfigError(f'the server needs {error.name}; pip install "chunkrt[serve]"') from error
    options = ServerOptions(
        api_keys=keys,
        max_sessions=max_sessions,
        queue=max_waiting,
        max_body_bytes=max_body,
        allow_origin=allow_origin and allow_origin.rstrip("/").lower(),  # the form that browsers send
        allow_hosts=(host, *allow_host),
        embeddings=embeddings,
        template_options=template_options,
        adapter_folder=adapter_folder,
    )
    with open_engine(model, settings) as engine:
        for adapter, path in pairs:
            engine.load_adapter(path, name=adapter, scale=scales.get(adapter, 1.0))
        service = Service(engine, name or _name(model), options)

        def report(url: str) -> None:
            click.echo(f"{service.name} is served at {url} (stop it with Ctrl-C)", err=True)

        deadline = threading.Timer(grace + LATE_SECONDS, _abandon, (grace,))
        deadline.daemon = True
        try:
            asyncio.run(listen(service, host, port, grace_seconds=grace, tell=report, on_end=deadline.start))
            engine.close()
        finally:
            deadline.cancel()


def _abandon(grace: float) -> None:
    """End the process, even if threads are blocked in a device driver."""
    click.echo(f"chunkrt: a task did not end within {grace + LATE_SECONDS:g} s; is the device stuck?", err=True)
    os._exit(1)


def _pair(flag: str, text: str, what: str) -> tuple[str, str]:
    """Return the name and the value of NAME=VALUE."""
    name, separator, value = text.partition("=")
    if not (name and separator and value):
        raise ConfigError(f"{flag} is {text!r}, expected NAME={what}")
    return name, value


def _scale(text: str, adapters: Sequence[tuple[str, str]]) -> tuple[str, float]:
    """Return the name of one of the adapters, and its factor."""
    name, value = _pair("--adapter-scale", text, "FACTOR")
    if name not in dict(adapters):
        raise ConfigError(
            f"--adapter-scale names {name!r}, which no --load-adapter loads; add --load-adapter {name}=PATH"
        )
    try:
        return name, float(value)
    except ValueError:
        raise ConfigError(f"--adapter-scale is {text!r}, expected NAME=FACTOR with a number as FACTOR") from None


def _name(model: str) -> str:
    """Return the name of a file or folder; other names are returned unchanged."""
    path = Path(model)
    return path.resolve().name if path.exists() else model


def _read_keys(path: Path) -> dict[str, str]:
    """Return the keys of a file by name. A line is `KEY`, `NAME: KEY`, a comment after `#`, or empty."""
    try:
        lines = read_text(path).splitlines()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API keys from {path}: {cause_of(error)}") from error
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
            raise ConfigError(f"{path}, line {number}: the name or the key is a duplicate; give each client its own")
        keys[name] = key
    if not keys:
        raise ConfigError(f"{path} holds no API key; expected lines of the form KEY or NAME: KEY")
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
