"""`chunkrt serve`: a model behind OpenAI's HTTP API."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from chunkrt.cli.command import GroupedCommand
from chunkrt.cli.options import engine_options, open_engine
from chunkrt.engine.engine import Engine
from chunkrt.errors import ConfigError


@click.command(cls=GroupedCommand, first=("host", "port", "api_key_file", "max_sessions", "npu"))
@click.argument("model")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 takes a free one.")
@click.option("--name", help="What clients call the model; by default as it was given here.")
@click.option("--api-key-file", type=click.Path(path_type=Path), help="Clients have to give the key in this file.")
@click.option("--no-api-key", is_flag=True, help="Let anybody in, beyond this machine too.")
@click.option("--max-sessions", type=click.IntRange(1), default=16, show_default=True, help="Sequences at a time.")
@click.option("--max-waiting", type=click.IntRange(0), default=64, show_default=True, help="More get 503 at once.")
@click.option("--grace", type=click.FloatRange(0), default=30.0, show_default=True, help="Seconds to finish in.")
@click.option("--max-body", type=click.IntRange(1), default=16 * 2**20, show_default=True, help="Bytes of a request.")
@click.option("--allow-origin", metavar="ORIGIN", help="Let pages of this origin ask (* for any); by default of none.")
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
    **settings: Any,
) -> None:
    """Serve MODEL over HTTP, as OpenAI's API has it: chats, completions, scores; and a page to chat at.

    Requests that come at the same time share chunks. Ctrl-C or SIGTERM: nothing new is taken, and what runs is finished
    within --grace.
    """
    key = _read_key(api_key_file)
    if key is None and not no_api_key and not _is_loopback(host):
        raise ConfigError(
            f"--host {host} can be reached from elsewhere and there is no key; give --api-key-file, or say --no-api-key"
        )
    try:
        from chunkrt.server.service import ServerOptions
    except ImportError as error:
        raise ConfigError(f"the server needs {error.name}; pip install 'chunkrt[serve]'") from error
    options = ServerOptions(
        api_key=key,
        max_sessions=max_sessions,
        queue=max_waiting,
        max_body_bytes=max_body,
        allow_origin=allow_origin,
    )
    with open_engine(model, {"queue": max(max_sessions, 1), **settings}) as engine:
        asyncio.run(_serve(engine, name or Path(model).name, options, host, port, grace))


async def _serve(engine: Engine, name: str, options: Any, host: str, port: int, grace: float) -> None:
    import uvicorn

    from chunkrt.server.app import make_app
    from chunkrt.server.service import Service

    service = Service(engine, name, options)

    class Server(uvicorn.Server):
        """Ends with exit status 0 when it is told to end."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Uvicorn's would raise the signal once more when all is over."""
            loop = asyncio.get_running_loop()

            def end() -> None:
                if self.should_exit:
                    self.force_exit = True
                service.admission.is_closed = self.should_exit = True

            for number in (signal.SIGINT, signal.SIGTERM):
                try:
                    loop.add_signal_handler(number, end)
                except NotImplementedError:  # Windows
                    signal.signal(number, lambda *_: loop.call_soon_threadsafe(end))
            yield

        async def startup(self, sockets: Any = None) -> None:
            """Says where it is, once it is there."""
            await super().startup(sockets)
            if not self.should_exit:
                at = self.servers[0].sockets[0].getsockname()
                shown = f"[{at[0]}]" if ":" in at[0] else at[0]
                click.echo(f"{name} is served at http://{shown}:{at[1]} (Ctrl-C ends)", err=True)

    config = uvicorn.Config(
        make_app(service),
        host=host,
        port=port,
        log_level="error",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=max(int(grace), 1),
    )
    server = Server(config)
    try:
        await server.serve()
    except SystemExit as error:  # uvicorn's, when it cannot listen
        raise ConfigError(f"cannot listen at {host}:{port}; choose another --port") from error


def _read_key(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        key = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API key from {path}: {error}") from error
    if not key or not key.isprintable() or " " in key:
        raise ConfigError(f"{path} holds no API key: expected one line of letters")
    return key


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
