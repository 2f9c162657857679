"""Display of progress, and the progress that a prefill reports."""

import io
import sys
from types import SimpleNamespace

import pytest
from fake_backend import wait_until
from fixture_checkpoints import checkpoint
from rich.console import Console

import chunkrt
from chunkrt import progress as shown
from chunkrt.errors import ConfigError
from chunkrt.progress import ShownProgress, find_progress

GGUF = checkpoint("llama_biased_gguf")


@pytest.fixture
def clock(monkeypatch):
    """Return a clock in seconds, which the test advances."""
    now = [100.0]
    monkeypatch.setattr(shown.time, "monotonic", lambda: now[0])
    return now


def test_progress_without_a_terminal_prints_a_line_every_ten_seconds(clock, capsys):
    progress = ShownProgress()
    for done in range(0, 4096, 128):
        progress("prefill", done, 4096)
        clock[0] += 2
    progress("prefill", 4096, 4096)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "prefill: 640 of 4,096 tokens, 64 tokens/s, 54 s left"
    assert lines[1] == "prefill: 1,280 of 4,096 tokens, 64 tokens/s, 44 s left"
    assert len(lines) == 6


def test_progress_shows_nothing_for_short_work(clock, capsys):
    with ShownProgress() as progress:
        for what in ("compiling", "prefill"):
            for done in range(10):
                progress(what, done, 10)
                clock[0] += 0.9
    assert capsys.readouterr().err == ""


def test_progress_in_a_terminal_shows_a_bar_and_removes_it(clock, monkeypatch):
    screen = io.StringIO()
    real = Console
    monkeypatch.setattr(
        "rich.console.Console", lambda **_: real(file=screen, force_terminal=True, width=80, legacy_windows=False)
    )
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with ShownProgress() as progress:
        progress("prefill", 0, 1000)
        clock[0] += 0.5
        progress("prefill", 50, 1000)
        assert screen.getvalue() == ""
        clock[0] += 1.5
        progress("prefill", 200, 1000)
        wait_until(lambda: "200/1000" in screen.getvalue())
        assert "100 tokens/s, 8 s left" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K")


@pytest.mark.parametrize("options", [{}, {"threads": 2, "policy": "sequential"}, {"npu": "off"}])
def test_prefill_reports_progress_of_each_chunk(options):
    told = []
    with chunkrt.load(GGUF, chunk_length=8, **options) as engine, engine.session() as session:
        expected = engine.session().prefill(list(range(50))).logits.tobytes()
        result = session.prefill(list(range(50)), progress=lambda *told_of: told.append(told_of))
        assert result.logits.tobytes() == expected
        steps, (last,) = told[:-1], told[-1:]
        assert [(what, total) for what, _, total in steps] == [("prefill", 50)] * 7
        assert sorted(done for _, done, _ in steps) == [done for _, done, _ in steps]
        assert (steps[-1][1], last) == (50, ("", 0, 0))
        num_told = len(told)
        session.prefill([1])
        assert len(told) == num_told


def test_cancelled_prefill_ends_its_progress(monkeypatch):
    with chunkrt.load(GGUF, chunk_length=8) as engine, engine.session() as session:
        told = []

        def cancel(what, done, total):
            told.append((what, done, total))
            session.cancel()

        with pytest.raises(chunkrt.ChunkrtError, match="cancelled"):
            session.prefill(list(range(120)), progress=cancel)
        assert told[-1] == ("", 0, 0)
        assert session.position == 0


def test_progress_option_is_true_or_a_function(monkeypatch):
    assert isinstance(find_progress(True), ShownProgress)
    assert find_progress(None) is find_progress(False)
    with pytest.raises(ConfigError, match="progress is 3, expected True, or a function"):
        chunkrt.load(GGUF, progress=3)
    assert sys.stderr is not None


def test_progress_needs_only_a_stream_that_can_be_written(clock, monkeypatch):
    """A program may replace stderr by an object with few methods."""
    written = []
    monkeypatch.setattr("sys.stderr", SimpleNamespace(write=written.append, flush=bool))
    with ShownProgress() as progress:
        progress("prefill", 0, 1000)
        clock[0] += 60
        progress("prefill", 500, 1000)
    assert "prefill" in "".join(written)
