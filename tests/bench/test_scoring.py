"""`bench/scoring.py`: items, rounds and figures; and chunkrt's three methods on a tiny model. No other runtime is
needed.
"""

import json
import sys

import numpy as np
import pytest
from bench_modules import peers
from click.testing import CliRunner
from fixture_checkpoints import checkpoint

import chunkrt

GGUF = checkpoint("llama_biased_gguf")


class Fake:
    """Takes a fixed time for an item, computes every row, and prefers longer endings by `better`."""

    def __init__(self, seconds, better=1.0, fails_at=None):
        self.seconds, self.better, self.fails_at, self.asked = seconds, better, fails_at, []

    def score(self, pairs):
        self.asked.append(pairs)
        if len(self.asked) - 1 == self.fails_at:
            raise peers("process").ContenderError("no memory")
        num_rows = sum(len(context) + len(ending) - 1 for context, ending in pairs)
        scores = [self.better * len(ending) for _, ending in pairs]
        seconds = self.seconds * len(pairs) / 4
        return {"scores": scores, "rows": num_rows, "padded": 2 * num_rows, "seconds": seconds}


@pytest.fixture
def short_items(monkeypatch):
    """The tiny model holds 128 tokens."""
    monkeypatch.setattr(peers("scoring"), "CONTEXT_TOKENS", (30, 60))
    monkeypatch.setattr(peers("scoring"), "ENDING_TOKENS", (5, 20))


def item(*lengths):
    return [([1, 2, 3], list(range(length))) for length in lengths]


def test_items_have_a_context_and_four_endings_of_which_the_first_follows():
    text = list(range(1000))
    items = peers("scoring").items_of(text, 50, np.random.default_rng(0))
    assert len(items) == 50
    for pairs in items:
        assert len(pairs) == 4
        contexts = {tuple(context) for context, _ in pairs}
        assert len(contexts) == 1
        assert 60 <= len(pairs[0][0]) <= 120
        assert all(5 <= len(ending) <= 30 and ending == sorted(ending) for _, ending in pairs)
        assert pairs[0][1][0] == pairs[0][0][-1] + 1


def test_the_least_rows_are_the_beginnings_that_differ():
    least_rows = peers("scoring").least_rows
    assert least_rows([([1, 2, 3], [4])]) == 3
    assert least_rows([([1, 2, 3], [4, 5]), ([1, 2, 3], [4, 6]), ([1, 2, 3], [7])]) == 4
    assert least_rows([([1, 2], [3, 4]), ([1, 2, 3], [4, 5]), ([9, 2], [3])]) == 4 + 2


def test_rounds_take_turns_after_a_warm_up_and_skip_failed_contenders():
    contenders = {"ours": Fake(0.5), "theirs": Fake(1.0, better=-1.0), "none": Fake(1.0, fails_at=1)}
    pauses, rounds = [], [[item(1, 2, 3, 4)], [item(4, 3, 2, 1), item(1, 2, 3, 4)]]
    found = peers("scoring").measure_scoring(contenders, rounds, [item(1, 1, 1, 1)], pauses.append)
    assert found["ours"].rates == [2.0, 2.0]
    assert found["ours"].num_rows == 3 * (3 * 4 + 6)
    assert (found["none"].failure, found["none"].rates) == ("no memory", [])
    assert [len(contender.asked) for contender in contenders.values()] == [3, 3, 2]
    table = peers("scoring").to_markdown(found, 27)
    assert "| ours | 2 (2 - 2) | 1 (1 - 1) | 2.000 | 4.000 | 3 of 3 | 0 |" in table
    assert "| theirs | 1 (1 - 1) | 2 (2 - 2) | 2.000 | 4.000 | 0 of 3 | 8 |" in table
    assert "- none failed: no memory" in table


def test_chunkrts_three_methods_agree_and_differ_in_rows(tmp_path, short_items):
    scoring, process = peers("scoring"), peers("process")
    items = scoring.items_of(np.random.default_rng(1).integers(0, 100, 300).tolist(), 3, np.random.default_rng(0))
    pairs = [pair for pairs in items for pair in pairs]
    with chunkrt.load(GGUF, context_length=80, prefix_cache="off") as engine:
        expected = [score.log_probability for score in engine.score(pairs)]
    rows = {}
    for contender in scoring.contenders_for(["w8a8-dynamic"], scoring.WAYS)[:3]:
        with process.ContenderProcess(
            contender, python=sys.executable, model=GGUF, threads=1, context_length=80, log=tmp_path / "log"
        ) as running:
            answer = running.score(pairs)
        assert answer["scores"] == expected
        assert answer["padded"] == answer["rows"]
        rows[contender.options["way"]] = answer["rows"]
    assert rows["together"] == rows["item by item"] == sum(len(i[0][0]) - 1 + sum(len(e) for _, e in i) for i in items)
    assert rows["pair by pair"] == sum(len(context) + len(ending) - 1 for context, ending in pairs)
    assert scoring.least_rows(pairs) <= rows["together"] <= 1.1 * scoring.least_rows(pairs)


def test_the_command(tmp_path, short_items):
    text, samples = tmp_path / "text.txt", tmp_path / "samples.json"
    text.write_text("the cat saw a dog " * 100, "utf-8")
    arguments = [str(GGUF), "--text", str(text), "--items", "3", "--rounds", "2", "--no-peer", "--way", "together"]
    arguments += ["--way", "pair by pair", "--peers-dir", str(tmp_path), "--json", str(samples), "--threads", "1"]
    ended = CliRunner().invoke(peers("scoring").scoring, arguments)
    assert ended.exit_code == 0, ended.output
    assert "| chunkrt w8a8-dynamic, together | " in ended.output
    assert "3 of 3" in ended.output
    found = json.loads(samples.read_text("utf-8"))
    assert len(found["found"]["chunkrt w8a8-dynamic, pair by pair"]["rates"]) == 2
    assert found["conditions"]["least possible rows"] > 0


@pytest.mark.parametrize(
    ("text", "more", "said"),
    [
        ("too short", [], "too few to draw items from"),
        ("long " * 900, ["--items", "2", "--rounds", "3"], "2 items cannot be divided over 3 rounds"),
        ("long " * 900, ["--way", "sideways"], "'sideways' is not one of"),
    ],
)
def test_scoring_reports_invalid_input_in_one_line(tmp_path, text, more, said):
    (tmp_path / "text.txt").write_text(text, "utf-8")
    arguments = [str(GGUF), "--text", str(tmp_path / "text.txt"), "--no-peer", "--peers-dir", str(tmp_path), *more]
    ended = CliRunner().invoke(peers("scoring").scoring, arguments)
    assert ended.exit_code
    assert said in ended.output
