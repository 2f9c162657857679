"""Tests of every option of every command with odd values: each is accepted, or refused in one line."""

import shutil

import click
import pytest
from chat_model import write_chat_model
from fixture_checkpoints import checkpoint
from one_line import expect_one_line

from chunkrt.cli import COMMANDS, find_command

GGUF = checkpoint("llama_biased_gguf")
VALUES = ("many", "-1", "0", "nan", "inf", "1e400", str(10**20), "", "1,,2", "\u0663", "/dev/full/x", "folder", "empty")
"""Odd values; files among them are created in the working directory."""
SHORT = {
    "run": (GGUF, "-p", "a b", "-n", 1),
    "chat": ("chat_model", "-n", 1),
    "bench": (GGUF, "-p", 2, "-n", 1, "-r", 1),
    "trace": ("trace.json",),
    "report": ("trace.json", "-o", "made.html"),
    "calibrate": (GGUF, "-o", "made.npz", "--text", "text.txt"),
    "eval": (GGUF, "--text", "text.txt"),
    "fit": (GGUF, "--soc", "8gen3"),
    "simulate": (GGUF, "--device", "8gen3", "-p", 8),
    "tune": (GGUF, "--device", "8gen3", "-o", "made.toml", "-p", 8),
    "profile": (GGUF, "-o", "made.toml"),
    "compile": (GGUF, "-o", "made"),
    "export": (GGUF, "-o", "made.onnx"),
    "models": (),
    "pull": ("smol",),
    "cache": (),
    "doctor": (),
    "device-test": (GGUF, "-o", "made.json"),
}
"""Arguments that make a command short; other commands only need a model."""
WORK = {
    "bench": "chunkrt.cli.bench.measure",
    "profile": "chunkrt.cli.profile.measure_profile",
    "tune": "chunkrt.cli.tune.search",
    "serve": "chunkrt.server.listening.listen",
}
"""Commands that take too long for this test."""


class WouldWork(BaseException):
    """Return True if all options were accepted."""


def options():
    """Return (command and subcommand, flag) for all options with a value."""
    for name in COMMANDS:
        found = find_command(name)
        is_group = isinstance(found, click.Group)
        for each in found.commands.values() if is_group else (found,):
            words = (name, each.name) if is_group else (name,)
            for option in each.params:
                if isinstance(option, click.Option) and not option.is_flag:
                    yield words, max(option.opts, key=len)


CASES = list(options())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Create the working directory, with the files that commands read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a b c d e f g h " * 20)
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch()
    return tmp_path


@pytest.mark.sampled(every=17)
@pytest.mark.parametrize(("words", "flag"), CASES, ids=[f"{'-'.join(words)}{flag}" for words, flag in CASES])
def test_option_value_is_accepted_or_refused_in_one_line(command, folder, monkeypatch, words, flag):
    name = words[0]
    if name == "chat":
        write_chat_model(folder / "chat_model")
    if name in ("trace", "report"):
        assert command("run", GGUF, "-p", "a b", "-n", 1, "--trace", "trace.json").status == 0
    if name in WORK:

        def work(*_, **__):
            raise WouldWork

        monkeypatch.setattr(WORK[name], work)
    for value in VALUES:
        try:
            finished = command(*words, *SHORT.get(name, (GGUF,)), f"{flag}={value}", stdin="a\n")
        except WouldWork:
            continue
        assert finished.status in (0, 1, 2, 3)
        assert "Traceback" not in finished.err
        if finished.status in (1, 2):
            expect_one_line(finished, "")
        shutil.rmtree("made", ignore_errors=True)
