"""One vocabulary for all commands: names of devices, how MODEL is given, what --help shows first, exit statuses."""

import importlib
import json
import os
import subprocess
import sys

import click
import pytest
from fixture_checkpoints import checkpoint

from chunkrt.cli import COMMANDS
from chunkrt.cli.command import FEW, GROUPS, GroupedCommand

GGUF = checkpoint("llama_biased_gguf")
DEVICE_NAMES = ("sd8gen3", "8gen3", "SM8650", "Snapdragon 8 Gen 3")


def command_of(name):
    return getattr(importlib.import_module(f"chunkrt.cli.{name}"), name)


@pytest.mark.parametrize("name", DEVICE_NAMES)
def test_a_device_has_all_of_its_names_everywhere(command, name):
    simulated = command("simulate", "qwen1.5-1.8b", "--device", name, "-p", 32, "--chunk", 32, "--json")
    assert json.loads(simulated.out)[0]["device"] == "Snapdragon 8 Gen 3"
    fitted = command("fit", GGUF, "--device", name, "--json")
    assert json.loads(fitted.out)["soc"]["name"] == "SM8650"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_options_are_grouped_with_the_most_used_first(command, name):
    shown = command(name, "--help")
    assert shown.status == 0
    found = command_of(name)
    options = [p for p in found.params if isinstance(p, click.Option)]
    if isinstance(found, GroupedCommand) and found._first:
        assert shown.out.count("\nMost used:\n") == 1
        assert set(found._first) <= {option.name for option in options}
        assert len(found._first) == 5
        if name in ("run", "chat", "bench"):
            assert [line.split()[0] for line in shown.out.partition("\nOther:\n")[2].splitlines()] == ["-v,", "-h,"]
    else:
        assert len(options) <= FEW


def test_groups_name_options_that_there_are():
    names = {p.name for name in COMMANDS for p in command_of(name).params}
    grouped = [name for group in GROUPS.values() for name in group]
    assert len(set(grouped)) == len(grouped)
    assert set(grouped) <= names


def test_a_negative_answer_has_a_status_of_its_own(command):
    assert command("fit", GGUF, "--soc", "8gen3").status == 0
    assert command("fit", GGUF, "--soc", "8gen3", "--ram", "0.0001").status == 3
    assert command("fit", GGUF, "--soc", "8gen9").status == 1
    assert command("fit", GGUF).status == 2


@pytest.mark.parametrize("words", ["run smol", "bench smol", "run -m smol"])
def test_a_shell_completes_names_of_models(words):
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
