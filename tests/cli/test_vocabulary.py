"""Tests of conventions of all commands: names of devices, MODEL, help texts and exit statuses."""

import json
import os
import re
import subprocess
import sys

import click
import pytest
from fixture_checkpoints import checkpoint

from chunkrt.cli import COMMANDS, find_command
from chunkrt.cli.command import MOST_SHOWN, GroupedCommand

GGUF = checkpoint("llama_biased_gguf")
DEVICE_NAMES = ("sd8gen3", "8gen3", "SM8650", "Snapdragon 8 Gen 3")


def command_of(name):
    return find_command(name)


@pytest.mark.parametrize("name", DEVICE_NAMES)
def test_device_has_the_same_names_in_all_commands(command, name):
    simulated = command("simulate", "qwen1.5-1.8b", "--device", name, "-p", 32, "--chunk", 32, "--json")
    assert json.loads(simulated.out)[0]["device"] == "Snapdragon 8 Gen 3"
    fitted = command("fit", GGUF, "--device", name, "--json")
    assert json.loads(fitted.out)["soc"]["name"] == "SM8650"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_shows_ten_options_and_help_all_the_rest(command, name):
    found = command_of(name)
    options = [p for p in found.params if isinstance(p, click.Option)]
    shown, full = command(name, "--help"), command(name, "--help-all")
    assert shown.status == 0
    if not isinstance(found, GroupedCommand):
        assert len(options) <= MOST_SHOWN
        return
    assert full.status == 0
    rows = {
        line.split()[0].rstrip(",") for line in shown.out.partition("Options:")[2].splitlines() if line[:3] == "  -"
    }
    if len(options) > MOST_SHOWN:
        assert len(rows) <= MOST_SHOWN + 2
        assert shown.out.count("--help-all") == 1
    else:
        assert "--help-all" not in shown.out
        assert len(rows) == len(options) + 1
    for option in options:
        assert option.hidden or re.search(rf"(?:^|[ ,]){re.escape(option.opts[0])}[ ,\n]", full.out, re.MULTILINE)


def test_help_of_run_fits_a_screen_of_50_lines(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert len(command("run", "--help").out.splitlines()) <= 50


def test_every_option_has_a_help_text_that_is_a_sentence():
    commands = [command_of(name) for name in COMMANDS]
    commands += [sub for found in commands for sub in getattr(found, "commands", {}).values()]
    for option in (p for found in commands for p in found.params if isinstance(p, click.Option)):
        text = (option.help or "").partition("  [default")[0].strip()
        assert text[:1].isupper() or text.startswith(("UTF-8", "8-bit")), option.opts
        assert text.endswith((".", ")")), option.opts


def test_fit_exits_with_3_if_a_model_does_not_fit(command):
    assert command("fit", GGUF, "--soc", "8gen3").status == 0
    assert command("fit", GGUF, "--soc", "8gen3", "--ram", "0.0001").status == 3
    assert command("fit", GGUF, "--soc", "8gen9").status == 1
    assert command("fit", GGUF).status == 2


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("words", ["run smol", "bench smol", "run -m smol"])
def test_shell_completes_names_of_models(words):
    arguments = f"chunkrt {words}".split()
    environment = os.environ | {
        "_CHUNKRT_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(arguments),
        "COMP_CWORD": str(len(arguments) - 1),
    }
    ran = subprocess.run(
        [sys.executable, "-c", "from chunkrt.cli import main; main()"], env=environment, capture_output=True, text=True
    )
    assert "plain,smollm2-135m-instruct" in ran.stdout.splitlines()
