"""Tests that commands and options of other tools are refused with their equivalent."""

import pytest

from chunkrt.cli.peers import INSTEAD


@pytest.mark.parametrize("name", INSTEAD)
def test_names_of_other_tools_print_an_equivalent(command, name):
    arguments = ("run", "a-model", name, "x") if name.startswith("-") else (name,)
    finished = command(*arguments)
    kind = "option" if name.startswith("-") else "command"
    shown = name if kind == "option" else repr(name)
    assert (finished.status, finished.out, finished.err) == (
        2,
        "",
        f"chunkrt: no such {kind} {shown}: {INSTEAD[name]}\n",
    )


def test_unknown_names_point_to_help(command):
    assert command("embed").err.endswith("(see `chunkrt --help`)\n")
    assert command("run", "a-model", "--nothing").err.endswith("(see `chunkrt run --help`)\n")
