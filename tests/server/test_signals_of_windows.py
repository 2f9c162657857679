"""Ctrl-C on Windows, where the event loop handles no signals."""

import subprocess
import sys

import pytest

FULL = """
import asyncio, contextlib, signal, sys
import click
from chunkrt.__main__ import main

def echo(text, **options):
    loop = asyncio.get_running_loop()
    with contextlib.suppress(BlockingIOError):
        while True:
            loop._csock.send(bytes(4096))
    signal.raise_signal(signal.SIGINT)

click.echo = echo
main()
"""
"""The command, with Ctrl-C as soon as it serves, and while the buffer that wakes its event loop is full."""


@pytest.mark.skipif(sys.platform != "win32", reason="the event loops of other systems handle signals")
def test_ctrl_c_ends_the_server_quietly_while_the_loop_is_busy(chat_folder):
    command = [sys.executable, "-P", "-c", FULL, "serve", str(chat_folder), "--port", "0", "--threads", "1"]
    finished = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (finished.returncode, finished.stderr) == (0, "")
