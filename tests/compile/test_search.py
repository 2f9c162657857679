"""The searches for schemes: on losses that are known beforehand, and the cache of their results."""

import dataclasses
import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from fixture_checkpoints import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from chunkrt.compile import scheme_search as choose_module
from chunkrt.compile.calibrate import WINDOW_LENGTH, cached_calibration
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.compile.scheme_search import (
    NEGLIGIBLE,
    NUM_WINDOWS,
    SEARCH_WINDOW_LENGTH,
    Choice,
    cached_choice,
    choose,
    held_out,
)
from chunkrt.compile.trials import Loss
from chunkrt.errors import ConfigError, QuantizationError
from chunkrt.quant.scheme import Recipe, Scheme

GGUF = checkpoint("llama_biased_gguf")
W8A8 = Scheme(name="w8a8", weight_bits=8, activations="static", wide=("head",))
DEPTH = 320


class AdditiveLosses:
    """Losses that add up, in integer millionths of a nat. `linears`: name -> (in 8 bits, shadowed, columns).

    A linear in 16 bits loses in_16_bits, and with 4-bit weights its value in with_4_bits or, without one, a nat.
    """

    def __init__(self, linears, in_16_bits=0, with_4_bits=None, depth=DEPTH):
        self.figures = {**linears, "head": (0, 0, 7)}
        self.linears = dict.fromkeys(self.figures)
        self.in_16_bits = in_16_bits
        self.with_4_bits = with_4_bits or {}
        self.multiply_adds = {name: depth * columns for name, (_, _, columns) in self.figures.items()}
        shapes = {name: SimpleNamespace(shape=(depth, columns)) for name, (_, _, columns) in self.figures.items()}
        self.plan = SimpleNamespace(tensors=shapes)
        self.trials = []

    def reach(self, name):
        return 2.0 * len(name)

    def of(self, scheme, only=None):
        self.trials.append((scheme, only))
        return Loss(kl=self.total(scheme, self.linears if only is None else only) / 1e6, perplexity_ratio=1.5)

    def total(self, scheme, names):
        return sum(self.of_one(scheme, name) for name in names)

    def of_one(self, scheme, name):
        if name == "head":
            return 0
        if scheme.activation_bits_of(name) == 16:
            return self.in_16_bits if scheme.weight_bits_of(name) == 8 else self.with_4_bits.get(name, 10**6)
        assert scheme.weight_bits_of(name) == 8
        return self.figures[name][scheme.is_shadowed(name)]

    @property
    def wholes(self):
        return [scheme for scheme, only in self.trials if only is None]


FOUR = {"a": (100, 10, 30), "b": (4000, 500, 20), "c": (900, 850, 10), "d": (2000, 100, 40)}


def shadows(choice):
    return [linear.weight for linear in choice.linears if linear.has_shadow]


def wides(choice):
    return [linear.weight for linear in choice.linears if linear.activation_bits == 16]


def fours(choice):
    return [linear.weight for linear in choice.linears if linear.weight_bits == 4]


def test_search_uses_the_fewest_shadows():
    """The total is 7000: d and b gain most, 3500 and 1900; then a, 90; then c, 50."""
    for budget, expected in ((7e-3, []), (3.5e-3, ["b"]), (3.499e-3, ["b", "d"]), (1.55e-3, ["a", "b", "d"])):
        choice = choose(AdditiveLosses(FOUR), W8A8, "shadow", budget)
        assert shadows(choice) == expected
        assert choice.scheme == replace(W8A8, shadowed=tuple(expected))
        assert choice.loss.kl <= choice.budget == budget


def test_shadow_that_increases_the_loss_is_never_used():
    losses = AdditiveLosses({"a": (1000, 200, 1), "b": (1000, 1200, 1)})
    choice = choose(losses, W8A8, "shadow", 1.2e-3)
    assert shadows(choice) == ["a"]
    assert all(not scheme.is_shadowed("b") for scheme in losses.wholes)


def test_search_maximises_8_bits_then_minimises_shadows():
    """Shadows are used where they gain: c 850 / 10 columns, b 500 / 20, d 100 / 40, a 10 / 30. All shadows: 1460."""
    choice = choose(AdditiveLosses(FOUR), W8A8, "mixed", 0.7e-3)
    assert (wides(choice), shadows(choice)) == (["c"], ["b", "d"])  # 610 with a's, 700 without
    assert choice.scheme == replace(W8A8, wide=("head", "c"), shadowed=("b", "d"))
    choice = choose(AdditiveLosses(FOUR), W8A8, "mixed", 0.2e-3)
    assert (wides(choice), shadows(choice)) == (["b", "c"], ["d"])  # 110 with a's, 200 without
    choice = choose(AdditiveLosses(FOUR), W8A8, "mixed", 7e-3)
    assert choice.scheme == W8A8


def test_16_bit_linears_have_4_bit_weights_within_the_budget():
    """b and c stay in 16 bits, 110 with shadows for d alone and a's 100: 90 are left. Per column b loses less."""
    for depth, b, c, expected in ((320, 40, 60, ["b"]), (320, 40, 50, ["b", "c"]), (320, 95, 90, []), (300, 0, 0, [])):
        losses = AdditiveLosses(FOUR, with_4_bits={"b": b, "c": c}, depth=depth)
        choice = choose(losses, W8A8, "mixed", 0.29e-3)
        assert (wides(choice), shadows(choice)) == (["b", "c"], ["d"])
        assert fours(choice) == expected
        assert choice.scheme.weight_bits_of("head") == 8


@given(
    linears=st.lists(
        st.tuples(st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 50), st.integers(0, 500)),
        min_size=1,
        max_size=12,
    ),
    budget=st.integers(100, 30_000),
    search=st.sampled_from(["shadow", "mixed"]),
)
def test_bisection_equals_counting_on_additive_losses(linears, budget, search):
    with_4_bits = {f"w{index:02}": figures[3] for index, figures in enumerate(linears)}
    linears = {f"w{index:02}": figures[:3] for index, figures in enumerate(linears)}
    losses = AdditiveLosses(linears, in_16_bits=1, with_4_bits=with_4_bits)
    names = [name for name in losses.linears if name != "head"]
    measured = [n for n in names if losses.figures[n][0] > NEGLIGIBLE * budget / len(names)]
    alone = {n: losses.figures[n][0] / 1e6 for n in names}
    gain = {n: alone[n] - losses.figures[n][1] / 1e6 for n in measured}
    gain = {name: value for name, value in gain.items() if value > 0}

    def first(order, scheme_at):
        counts = (count for count in range(len(order) + 1) if losses.total(scheme_at(count), names) <= budget)
        return next(counts, None)

    def scheme_of(wide, shadowed):
        return replace(W8A8, wide=("head", *wide), shadowed=tuple(n for n in shadowed if n not in wide))

    wide = []
    if search == "mixed":
        worst = sorted(names, key=lambda n: -(alone[n] - gain.get(n, 0)) / losses.figures[n][2])
        wide = worst[: first(worst, lambda count: scheme_of(worst[:count], gain))]
    order = sorted((name for name in gain if name not in wide), key=lambda n: -gain[n])
    count = first(order, lambda count: scheme_of(wide, order[:count]))
    if count is None:
        with pytest.raises(QuantizationError, match="above the budget"):
            choose(losses, W8A8, search, budget / 1e6)
        return
    kept = sorted(
        (n for n in names if n in wide),
        key=lambda n: (-(with_4_bits[n] / 1e6) / losses.multiply_adds[n], wide.index(n)),
    )
    left = budget - losses.total(scheme_of(wide, order[:count]), names)
    spent = (sum(with_4_bits[n] - 1 for n in kept[most:]) for most in range(len(kept) + 1))
    narrowed = kept[next(most for most, more in enumerate(spent) if more <= left) :]
    choice = choose(losses, W8A8, search, budget / 1e6)
    assert (set(wides(choice)), set(shadows(choice))) == (set(wide), set(order[:count]))
    assert set(fours(choice)) == set(narrowed)
    assert choice.loss.kl == pytest.approx(losses.total(choice.scheme, names) / 1e6)


@given(seed=st.integers(0, 10_000), search=st.sampled_from(["shadow", "mixed"]), number=st.integers(1, 40))
def test_chosen_scheme_was_measured_within_the_budget(seed, search, number):
    """Losses of complete schemes go up and down along the order; only the most careful one is certain to be within."""

    class Erratic(AdditiveLosses):
        def of(self, scheme, only=None):
            if only is not None:
                return super().of(scheme, only)
            self.trials.append((scheme, None))
            is_most_careful = len(scheme.wide) > number if search == "mixed" else len(scheme.shadowed) == number
            is_most_careful = is_most_careful and scheme.weight_bits == 8
            sizes = (len(scheme.wide), len(scheme.shadowed), len(scheme.weights_of_8_bits))
            drawn = np.random.default_rng([seed, *sizes]).uniform(0, 2)
            return Loss(kl=1.0 if is_most_careful else float(drawn), perplexity_ratio=1.0)

    losses = Erratic({f"w{index:02}": (10**6 + index, 10, 5) for index in range(number)})
    choice = choose(losses, W8A8, search, 1.0)
    assert choice.loss.kl <= 1.0
    assert choice.scheme in losses.wholes
    assert choice.loss == losses.of(choice.scheme)
    assert (choice.loss.kl, len(shadows(choice))) in [(point.kl, point.num_shadows) for point in choice.frontier]


@pytest.mark.parametrize("search", ["shadow", "mixed"])
def test_work_is_bounded_and_no_scheme_is_measured_twice(search):
    number, told = 120, []
    losses = AdditiveLosses({f"w{index:03}": (1000 + index, 10, 5) for index in range(number)}, in_16_bits=1)
    choose(losses, W8A8, search, 0.02 if search == "shadow" else 3e-4, progress=lambda *counts: told.append(counts))
    assert len(losses.trials) <= 3 * number + 3 * number.bit_length() + 9
    assert len(set(losses.wholes)) == len(losses.wholes)
    assert told == sorted(told)
    assert told[0][0] == 0
    assert told[-1][0] == told[-1][1]
    assert len({total for _, total in told}) == (1 if search == "shadow" else 2)


@pytest.mark.parametrize(("search", "remedy"), [("shadow", "use `scheme='mixed'`"), ("mixed", "raise the budget")])
def test_unattainable_budget(search, remedy):
    losses = AdditiveLosses({"a": (900, 800, 3), "b": (900, 700, 3)}, in_16_bits=400)
    least = {"shadow": 0.0015, "mixed": 0.0008}[search]
    with pytest.raises(QuantizationError) as caught:
        choose(losses, W8A8, search, 0.0005)
    assert str(caught.value) == (
        f"the most careful choice still has a mean KL divergence of {least} on the calibration text, above the budget "
        f"of 0.0005; {remedy}"
    )


def test_equals_are_taken_in_the_plans_order():
    linears = dict.fromkeys(["z", "m", "a", "k"], (1000, 100, 8))
    assert choose(AdditiveLosses(linears), W8A8, "shadow", 2.2e-3).scheme.shadowed == ("z", "m")
    assert choose(AdditiveLosses(linears), W8A8, "mixed", 2e-4).scheme.wide == ("head", "z", "m")


def test_negligible_loss_is_not_measured_with_a_shadow():
    losses = AdditiveLosses({"a": (50, 0, 4), "b": (2000, 10, 4)})
    choice = choose(losses, W8A8, "shadow", 2e-3)
    assert [linear.kl_shadowed for linear in choice.linears] == [None, 1e-5]
    assert [only for scheme, only in losses.trials if scheme.shadowed == ("*",)] == [["b"]]
    assert shadows(choice) == ["b"]


def test_every_figure_of_a_choice():
    choice = choose(AdditiveLosses(FOUR), W8A8, "mixed", 0.7e-3)
    chosen, without = choice.linears[1], choice.linears[2]
    assert dataclasses.asdict(chosen) == {
        "weight": "b",
        "reach": 2.0,
        "kl": 0.004,
        "kl_shadowed": 0.0005,
        "activation_bits": 8,
        "weight_bits": 8,
        "has_shadow": True,
        "multiply_adds": 320 * 20,
        "shadow_bytes": 10 * 20 * 4,  # a row of 32 stays in float32
        "shadow_multiply_adds": pytest.approx(0.005 * 320 * 20),
    }
    assert (without.activation_bits, without.shadow_bytes, without.shadow_multiply_adds) == (16, 0, 0)
    assert [linear.weight for linear in choice.linears] == ["a", "b", "c", "d"]
    shares = [point.share_in_8_bits for point in choice.frontier]
    assert shares == sorted(shares, reverse=True)
    assert (shares[0], shares[-1]) == (pytest.approx(100 / 107), 0)  # the LM head is never in 8 bits
    point, tried = (next(p for p in choice.frontier if (p.num_shadows, p.num_with_4_bits) == (2, n)) for n in (0, 1))
    assert (point.share_in_8_bits, point.kl) == (pytest.approx(90 / 107), pytest.approx(7e-4))
    assert tried.kl > choice.budget


def test_json_round_trip():
    choice = choose(AdditiveLosses(FOUR), replace(W8A8, equalisation=0.5), "mixed", 0.7e-3)
    assert Choice.from_dict(json.loads(json.dumps(choice.to_dict()))) == choice


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def planned():
    return plan_checkpoint(GGUF, {})


TEXT = np.random.default_rng(7).integers(0, 128, 200)
RECIPE = Recipe(scheme=replace(W8A8, wide=("lm_head.weight",), column_grids=("*",)), search="mixed", budget=0.002)


def calibration_of(planned, token_ids=TEXT, **settings):
    return cached_calibration(planned, GGUF, model="tiny", token_ids=token_ids, **settings)[0]


def test_choice_is_made_once(home, planned, monkeypatch, caplog):
    calibration, told = calibration_of(planned), []
    made, path = cached_choice(planned, GGUF, RECIPE, calibration, progress=lambda done, total: told.append(done))
    assert told
    assert path.parent == home / "calibrations"
    assert made.loss.kl <= made.budget == RECIPE.budget
    content = path.read_bytes()
    path.unlink()
    again, _ = cached_choice(planned, GGUF, RECIPE, calibration)
    assert (again, path.read_bytes()) == (made, content), "the same search found something else"
    monkeypatch.setattr(choose_module, "choose", lambda *_, **__: pytest.fail("it was in the cache"))
    assert cached_choice(planned, GGUF, RECIPE, calibration) == (made, path)
    assert not caplog.records


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"scheme": []}', "half", "\udcff"], ids=ascii)
def test_damaged_choice_is_made_again(home, planned, caplog, damage):
    calibration = calibration_of(planned)
    made, path = cached_choice(planned, GGUF, RECIPE, calibration)
    content = path.read_bytes()
    damaged = content[: len(content) // 2] if damage == "half" else damage.encode("utf-8", "surrogateescape")
    path.write_bytes(damaged)
    with caplog.at_level(logging.WARNING):
        assert cached_choice(planned, GGUF, RECIPE, calibration) == (made, path)
    (message,) = caplog.messages
    assert message.startswith(f"{path} is damaged (")
    assert message.endswith("); choosing schemes again")
    assert path.read_bytes() == content


def test_other_recipes_and_other_texts_have_other_files(home, planned, monkeypatch):
    fixed = choose(AdditiveLosses(FOUR), W8A8, "mixed", 7e-4)
    monkeypatch.setattr(choose_module, "choose", lambda *_, **__: fixed)
    cases = [
        (RECIPE, {}),
        (replace(RECIPE, budget=0.003), {}),
        (replace(RECIPE, search="shadow"), {}),
        (replace(RECIPE, scheme=replace(RECIPE.scheme, float_outputs=("*",))), {}),
        (RECIPE, {"token_ids": TEXT[:100]}),
        (RECIPE, {"method": "absmax"}),
        (replace(RECIPE, scheme=replace(RECIPE.scheme, equalisation=0.5)), {"equalisation": 0.5}),
    ]
    paths = {cached_choice(planned, GGUF, recipe, calibration_of(planned, **s))[1] for recipe, s in cases}
    assert len(paths) == len(cases)


@given(size=st.integers(4, 9000), context_length=st.integers(8, 1024))
def test_search_measures_on_text_that_made_no_grid(size, context_length):
    """Tokens are numbered, so that each shows its position."""
    kept, windows = held_out(np.arange(size), context_length)
    seen = np.concatenate(windows)
    assert not np.intersect1d(kept, seen).size
    assert kept.size >= seen.size >= 2
    assert (np.diff(kept) > 0).all()
    assert 1 <= len(windows) <= NUM_WINDOWS
    assert [window[0] for window in windows] == sorted({window[0] for window in windows})
    for window in windows:
        assert 2 <= window.size <= min(SEARCH_WINDOW_LENGTH, context_length)
        assert (np.diff(window) == 1).all()
    assert kept.size >= size // 2 - 1


def test_long_text_holds_out_an_eighth_of_its_windows():
    kept, windows = held_out(np.arange(16 * WINDOW_LENGTH), 4096)
    assert kept.size == 14 * WINDOW_LENGTH
    held = [window * WINDOW_LENGTH + half for window in (7, 15) for half in (0, SEARCH_WINDOW_LENGTH)]
    assert [window[0] for window in windows] == held


def test_text_too_short_for_a_search_is_an_error(home, planned):
    with pytest.raises(
        ConfigError, match="the calibration text has 3 tokens, but a search for schemes needs at least 4"
    ):
        cached_choice(planned, GGUF, RECIPE, calibration_of(planned, TEXT[:3]))
