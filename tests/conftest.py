"""What all tests share: a cache of their own, never the user's; and the command line, called in this process."""

import io
import sys
from dataclasses import dataclass

import pytest
from hypothesis import settings

from chunkrt.cli import main

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory):
    """CHUNKRT_HOME for the whole run, so that each checkpoint is compiled once a scheme and not once a test."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHUNKRT_HOME", str(folder))
        patch.delenv("CHUNKRT_MODELS", raising=False)
        yield folder


@dataclass(frozen=True)
class Finished:
    """What a command left: its exit status, and all that it wrote."""

    status: int
    out: str
    err: str


@pytest.fixture
def command(monkeypatch, capsys):
    """A function that calls `chunkrt` with arguments, and perhaps text on its standard input."""

    def call(*arguments, stdin=""):
        monkeypatch.setattr(sys, "argv", ["chunkrt", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        try:
            main()
            status = 0
        except SystemExit as stop:
            status = stop.code or 0
        written = capsys.readouterr()
        return Finished(status, written.out, written.err)

    return call
