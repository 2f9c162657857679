"""Fixtures of all tests: a cache apart from the user's, and the command line, called in this process."""

import gc
import io
import os
import signal
import sys
import threading
from collections import Counter
from dataclasses import dataclass

import pytest
from filelock import FileLock, Timeout
from hypothesis import settings

from chunkrt import files
from chunkrt.cli import main
from chunkrt.engine import options

signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in background processes
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and child processes of tests would inherit that
settings.register_profile("any machine", deadline=None, max_examples=20)
settings.register_profile("slow", deadline=None, max_examples=300)
settings.load_profile("any machine")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark cases outside the sample of a test with `sampled` as slow; `make test` skips them."""
    num_cases = Counter()
    for item in items:
        if mark := item.get_closest_marker("sampled"):
            kept = dict(mark.kwargs)
            every = kept.pop("every", 1)
            if any(item.callspec.params[argument] not in values for argument, values in kept.items()):
                item.add_marker("slow")
                continue
            if num_cases[item.function] % every:
                item.add_marker("slow")
            num_cases[item.function] += 1


def pytest_collection():
    """Disable the garbage collector during collection, which creates many objects that stay."""
    gc.disable()


def pytest_collection_finish():
    """Freeze all objects, so that the garbage collector searches only objects that tests create."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory):
    """Set CHUNKRT_HOME for the whole run, so that processes share compiled checkpoints."""
    run = tmp_path_factory.getbasetemp()
    folder = (run.parent if "PYTEST_XDIST_WORKER" in os.environ else run) / "home"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHUNKRT_HOME", str(folder))
        patch.setenv("HF_HUB_CACHE", str(folder / "hub"))
        patch.delenv("CHUNKRT_MODELS", raising=False)
        yield folder


@pytest.fixture(scope="session", autouse=True)
def without_prefix_cache():
    """Disable the prefix cache, so that tests compute all tokens; tests of the cache enable it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "DEFAULT_PREFIX_CACHE", "off")
        yield


@dataclass(frozen=True)
class Finished:
    """Exit status and output of a command."""

    status: int
    out: str
    err: str


@pytest.fixture
def command(monkeypatch, capsys):
    """Return a function that calls `chunkrt` with arguments and optional text on standard input."""

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


@pytest.fixture
def waiting(monkeypatch):
    """Return an event that is set when a thread waits for a lock file that another one holds."""
    event = threading.Event()

    class WatchedLock(FileLock):
        def acquire(self, *arguments, **options):
            try:
                return super().acquire(*arguments, **options)
            except Timeout:
                event.set()
                raise

    monkeypatch.setattr("filelock.FileLock", WatchedLock)
    monkeypatch.setattr(files, "SILENT_SECONDS", 0)
    return event
