"""Tests of tables, which are not wrapped in a pipe and wrap their last column in a narrow terminal."""

import os
import shutil
import sys

import pytest

from chunkrt.cli.output import print_table

ROWS = [("name", "uses", "why"), ("a", "12", "one two three four five six seven"), ("bb", "3", "short")]
WHOLE = ["name  uses  why", "a       12  one two three four five six seven", "bb       3  short"]


@pytest.fixture
def printed(monkeypatch, capsys):
    def of(columns):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: columns is not None, raising=False)
        monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((columns or 1, 24)))
        print_table(ROWS, right=["uses"])
        return capsys.readouterr().out.splitlines()

    return of


@pytest.mark.parametrize("columns", [None, 200, 45])
def test_table_is_not_wrapped_if_it_fits_or_in_a_pipe(printed, columns):
    assert printed(columns) == WHOLE


def test_last_column_wraps_in_a_narrow_terminal(printed):
    folded = "a       12  one two three four five six", "            seven"
    assert printed(40) == [WHOLE[0], *folded, WHOLE[2]]


def test_last_column_goes_below_in_a_very_narrow_terminal(printed):
    lines = printed(20)
    assert lines == [WHOLE[0], "a       12", "    one two three", "    four five six", "    seven", WHOLE[2]]
    assert all(len(line) <= 20 for line in lines)
