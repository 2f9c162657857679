"""Stop strings end a text before them, for any pieces of the text, and lose none of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkrt.engine.sampling import StopStrings
from chunkrt.errors import ConfigError

letters = st.text(alphabet="abc", max_size=12)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3)


def stream(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    """Return all text that comes out, and True if it stopped."""
    watcher, out, stopped = StopStrings(stops), "", False
    for piece in pieces:
        text, stopped = watcher.push(piece)
        out += text
    return out + watcher.flush(), stopped


@given(stops=stop_lists, pieces=st.lists(letters, max_size=8))
def test_text_ends_where_the_first_match_is_complete(stops, pieces):
    text = "".join(pieces)
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert stream(stops, pieces) == (text, False)
        return
    longest = max((stop for stop in stops if text[: min(ends)].endswith(stop)), key=len)
    assert stream(stops, pieces) == (text[: min(ends) - len(longest)], True)


@given(stops=stop_lists, pieces=st.lists(letters, max_size=8))
def test_only_possible_stop_strings_are_withheld(stops, pieces):
    watcher, emitted, taken = StopStrings(stops), "", ""
    for piece in pieces:
        text, stopped = watcher.push(piece)
        if stopped:
            return
        emitted, taken = emitted + text, taken + piece
        held = taken.removeprefix(emitted)
        assert emitted + held == taken
        assert held == "" or any(len(held) < len(stop) and stop.startswith(held) for stop in stops)


def test_no_text_comes_after_a_stop():
    watcher = StopStrings(["END"])
    assert watcher.push("one EN") == ("one ", False)
    assert watcher.push("D two") == ("", True)
    assert watcher.push(" three") == ("", True)
    assert watcher.flush() == ""


@pytest.mark.parametrize("stops", ["stop", ["a", ""], [1]])
def test_stops_that_are_not_a_list_of_strings_are_an_error(stops):
    with pytest.raises(ConfigError, match="stop strings"):
        StopStrings(stops)
