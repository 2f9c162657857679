"""What peers have and chunkrt has not is refused with one line that says what to use."""

import pytest

from chunkrt.cli.peers import INSTEAD


@pytest.mark.parametrize("name", INSTEAD)
def test_a_habit_is_answered(command, name):
    arguments = ("run", "a-model", name, "x") if name.startswith("-") else (name,)
    finished = command(*arguments)
    assert (finished.status, finished.out, finished.err) == (2, "", f"chunkrt: there is no {name}: {INSTEAD[name]}\n")


def test_others_are_told_where_to_look(command):
    assert command("embed").err.endswith("(see `chunkrt --help`)\n")
    assert command("run", "a-model", "--nothing").err.endswith("(see `chunkrt run --help`)\n")
