"""The switches of operators: their meaning in every combination, and the invalid ones."""

from itertools import chain, combinations

import pytest

from chunkrt.backends.switches import Switches
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.settings import read_settings
from chunkrt.errors import ConfigError

WORDS = ("all", "none", "+add", "-add", "+mul", "-mul")
COMBINATIONS = list(chain.from_iterable(combinations(WORDS, count) for count in range(len(WORDS) + 1)))


def contradicts(words):
    return any({left, right} <= set(words) for left, right in (("all", "none"), ("+add", "-add"), ("+mul", "-mul")))


@pytest.mark.parametrize("words", COMBINATIONS, ids=",".join)
@pytest.mark.parametrize("default", ["all", "none"])
def test_every_combination(words, default):
    if contradicts(words):
        with pytest.raises(ConfigError, match="contradict each other; remove one of them"):
            Switches.parse(words)
        return
    switches = Switches.parse(words)
    for name in ("add", "mul", "tanh"):
        base = "none" if "none" in words else "all" if "all" in words else default
        is_on = f"-{name}" not in words and (f"+{name}" in words or base == "all")
        assert (switches.why_off(name, default=default) == "") == is_on
        assert switches.names(name) == (not {f"+{name}", f"-{name}"}.isdisjoint(words))


@pytest.mark.parametrize("words", [words for words in COMBINATIONS if words and not contradicts(words)], ids=",".join)
def test_commas_repetition_and_order_make_no_difference(words):
    expected = Switches.parse(words)
    forms = [",".join(words), [", ".join(reversed(words))], (",".join(words[:2]), *words[2:], words[0])]
    assert all(Switches.parse(form) == expected for form in forms)


def test_reason_for_off_quotes_the_switch():
    assert Switches.parse("-add").why_off("add") == "switched off by `ops='-add'`"
    assert Switches.parse("none").why_off("add") == "switched off by `ops='none'`"
    assert Switches.parse(None).why_off("add", default="none") == "off by default with `npu='reference'`"


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ("all,none", "'all' and 'none' contradict each other"),
        (("+add", "mul,-add"), r"'mul' is not a switch; .* write \+mul to switch it on, -mul to switch it off"),
        ("+add,-add", r"\+add and -add contradict each other"),
        ("", "'' is not a switch; expected all, none, "),
        ("all,,+add", "'' is not a switch"),
        ("+", r"'\+' is not a switch"),
        (7, "ops is 7, expected text such as"),
        ((7,), r"ops is \(7,\), expected text such as"),
    ],
)
def test_invalid_switches_are_refused(ops, message):
    with pytest.raises(ConfigError, match=message):
        EngineOptions(ops=ops)


def test_unknown_and_required_operators_are_refused_by_name():
    known = ("add", "all_reduce", "rms_norm")
    with pytest.raises(ConfigError, match=r"unknown operator 'rmsnorm'; did you mean 'rms_norm'[?] there are: add, "):
        Switches.parse("none,+rmsnorm").check(known, ())
    with pytest.raises(ConfigError, match="'all_reduce' requires its form and cannot be switched off"):
        Switches.parse("-all_reduce").check(known, ("all_reduce",))
    Switches.parse("none,+all_reduce,-add").check(known, ("all_reduce",))


def test_settings_file_has_them_as_text_or_as_a_list(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text('ops = ["none", "+linear"]\n')
    assert Switches.parse(read_settings(path)["ops"]) == Switches.parse("none,+linear")
    path.write_text('ops = "-rope"\n')
    assert read_settings(path) == {"ops": "-rope"}
    path.write_text('ops = "all,none"\n')
    with pytest.raises(ConfigError, match=r"settings.toml: ops: 'all' and 'none'"):
        read_settings(path)
