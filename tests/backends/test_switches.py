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
        switch = switches.find(name, f"model.layers.0.{name}")
        assert (switch is not None) == (not {f"+{name}", f"-{name}"}.isdisjoint(words))
        assert (not switch.is_off if switch else not switches.why_off(default=default)) == is_on


@pytest.mark.parametrize("words", [words for words in COMBINATIONS if words and not contradicts(words)], ids=",".join)
def test_commas_repetition_and_order_make_no_difference(words):
    expected = Switches.parse(words)
    forms = [",".join(words), [", ".join(reversed(words))], (",".join(words[:2]), *words[2:], words[0])]
    for found in map(Switches.parse, forms):
        assert found.base == expected.base
        assert set(found.switches) == set(expected.switches)


def test_switch_of_a_module_precedes_a_general_one_and_the_last_pattern_decides():
    switches = Switches.parse("model.layers.*.norm.rms_norm=acme/native,-rms_norm,model.layers.1.*.rms_norm=other,none")
    nodes = {
        name: switches.find("rms_norm", f"{name}.output") for name in ("model.layers.0.norm", "model.layers.1.norm")
    }
    assert nodes["model.layers.0.norm"].forms == ("acme", "native")
    assert nodes["model.layers.1.norm"].forms == ("other",)
    assert switches.find("rms_norm", "model.norm.output").is_off
    assert switches.find("add", "model.layers.0.norm.output") is None


def test_reason_for_off_quotes_the_switch():
    assert Switches.parse("-add").find("add", "sum").reason == "switched off by `ops='-add'`"
    assert Switches.parse("add=acme").find("add", "sum").reason == "chosen by `ops='add=acme'`"
    assert Switches.parse("none").why_off() == "switched off by `ops='none'`"
    assert Switches.parse(None).why_off(default="none") == "off by default with `npu='reference'`"


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
    known, required = ("add", "all_reduce", "rms_norm"), {"all_reduce": "link"}

    def check(text):
        Switches.parse(text).check(known, lambda operator: ("native", "reference", "link"), required)

    with pytest.raises(ConfigError, match=r"unknown operator 'rmsnorm'; did you mean 'rms_norm'[?] there are: add, "):
        check("none,+rmsnorm")
    with pytest.raises(ConfigError, match="unknown form of add 'nativ'; did you mean 'native'"):
        check("add=nativ")
    with pytest.raises(ConfigError, match="the operator 'all_reduce' requires its form 'link', so -all_reduce has no"):
        check("-all_reduce")
    check("none,+all_reduce,-add,rms_norm=native/reference")


def test_settings_file_has_them_as_text_or_as_a_list(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text('ops = ["none", "+linear"]\n')
    assert Switches.parse(read_settings(path)["ops"]) == Switches.parse("none,+linear")
    path.write_text('ops = "-rope"\n')
    assert read_settings(path) == {"ops": "-rope"}
    path.write_text('ops = "all,none"\n')
    with pytest.raises(ConfigError, match=r"settings.toml: ops: 'all' and 'none'"):
        read_settings(path)
