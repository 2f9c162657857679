"""`chunkrt eval --text`: figures against plain NumPy and Transformers' logits, windows, and refused input."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from fixture_checkpoints import NAMES, checkpoint, expected_logits, input_ids
from hypothesis import given
from hypothesis import strategies as st
from one_line import expect_one_line

import chunkrt
from chunkrt.engine import scoring
from chunkrt.engine.scoring import piece_lengths, score_tokens
from chunkrt.engine.session import Session
from chunkrt.errors import ConfigError, ModelError
from chunkrt.evaluation.baseline import divergences
from chunkrt.evaluation.text import TextPart, cut_windows, evaluate_text, spread

GGUF, FOLDER = checkpoint("llama_biased_gguf"), checkpoint("llama_gqa")
FLOAT16_KL = 5e-6
"""Nats: the largest effect of float16 on the divergence of a token here."""
STORY = "Es war einmal eine kleine Geschichte, die niemand zu Ende erzählte. " * 20


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "logits"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "story.txt"
    path.write_text(STORY, "utf-8")
    return path


def softmax(logits):
    weights = np.exp(logits.astype(np.float64))
    return weights / weights.sum(axis=1, keepdims=True)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("name", NAMES)
def test_perplexity_is_that_of_transformers_logits(name):
    tokens = input_ids(name)
    with chunkrt.load(checkpoint(name), npu="reference", scheme="float") as engine:
        figures = evaluate_text(engine, [tokens], None)
    chosen = softmax(expected_logits(name))[np.arange(len(tokens) - 1), tokens[1:]]
    assert figures.perplexity == pytest.approx(np.prod(chosen ** (-1 / chosen.size)), rel=1e-4)
    assert (figures.num_tokens, figures.comparison) == (len(tokens) - 1, None)


def test_every_figure_against_numpy(command, text):
    """Two windows, two schemes, all by hand."""
    finished = command(
        "eval", GGUF, "--text", text, "--npu", "reference", "--window", 64, "--windows", 2, "--part", "2/2", "--json"
    )
    assert (finished.status, finished.err) == (0, "")
    found = json.loads(finished.out)["text"]
    with chunkrt.load(GGUF, npu="reference") as engine, chunkrt.load(GGUF, npu="reference", scheme="float") as base:
        ids = engine.tokenizer.encode(STORY, add_special=False, parse_special=False)
        ids = ids[len(ids) // 2 :]
        bos = [engine.tokenizer.settings.bos_id] if engine.tokenizer.settings.add_bos else []
        step = 64 - len(bos)
        number = len(ids) // step
        chosen = [[*bos, *ids[i * step : (i + 1) * step]] for i in (number // 4, 3 * number // 4)]
        p, q = (
            np.concatenate([softmax(e.session().prefill(w, logits="all").logits)[:-1] for w in chosen])
            for e in (base, engine)
        )
    rows, following = np.arange(len(p)), np.concatenate([w[1:] for w in chosen])
    kl = (p * np.log(p / q)).sum(axis=1)
    expected = {
        "perplexity": np.exp(-np.log(p[rows, following]).mean()),
        "ratio": np.exp((np.log(p[rows, following]) - np.log(q[rows, following])).mean()),
        "mean_kl": kl.mean(),
        "kl_99": np.quantile(kl, 0.99),
        "largest_kl": kl.max(),
        "top_1": (p.argmax(axis=1) == q.argmax(axis=1)).mean(),
    }
    assert found["figures"]["comparison"] == pytest.approx(expected, rel=1e-3, abs=FLOAT16_KL)
    assert found["figures"]["perplexity"] == pytest.approx(expected["ratio"] * expected["perplexity"], rel=1e-5)
    assert found["figures"]["num_tokens"] == 2 * 63
    assert (found["part"], found["windows"], found["window_length"]) == ("2/2", 2, 64)
    assert (found["base"]["scheme"], found["base"]["backend"], found["base"]["computed"]) == ("float", "onnxrt", 2)


def test_report_as_text_has_the_same_figures(command, text):
    arguments = ("eval", GGUF, "--text", text, "--npu", "native", "--window", 64, "--windows", 2)
    figures = json.loads(command(*arguments, "--json").out)["text"]["figures"]
    out = command(*arguments).out
    assert f"{GGUF}: w8a8-dynamic on native, chunks of 128" in out
    assert "part 1/1: 2 of" in out
    assert "float on onnxrt; 2 windows from the cache, 0 computed" in out
    assert f"{figures['perplexity']:.4f}" in out
    assert f"{figures['comparison']['mean_kl']:.5f}  nats" in out


def test_a_model_that_is_its_own_base(command, text):
    arguments = ("--text", text, "--npu", "native", "--base", "w8a8-dynamic", "--window", 64, "--windows", 1)
    comparison = json.loads(command("eval", GGUF, *arguments, "--json").out)["text"]["figures"]["comparison"]
    assert comparison["ratio"] == pytest.approx(1, abs=1e-6)
    assert comparison["top_1"] == 1
    assert comparison["largest_kl"] < 1e-6


def test_pieces_change_nothing(monkeypatch):
    name = "llama_gqa"
    with chunkrt.load(checkpoint(name), npu="native", chunk_length=8) as engine:
        whole = evaluate_text(engine, [input_ids(name)], None)
        monkeypatch.setattr(scoring, "PIECE_BYTES", 16 * 4 * engine.plan.vocab_size)
        monkeypatch.setattr(scoring, "BLOCK_VALUES", 3 * engine.plan.vocab_size)
        assert evaluate_text(engine, [input_ids(name)], None).perplexity == whole.perplexity


def test_pieces_are_refused_where_positions_depend_on_the_length(monkeypatch):
    with chunkrt.load(checkpoint("phi3_longrope_long"), npu="native", chunk_length=8) as engine:
        limit = engine.plan.long_context_from
        tokens = input_ids("phi3_longrope_long")
        assert len(tokens) > limit + 1
        evaluate_text(engine, [tokens], None)  # one piece
        monkeypatch.setattr(scoring, "PIECE_BYTES", 16 * 4 * engine.plan.vocab_size)
        evaluate_text(engine, [tokens[: limit + 1]], None)
        with pytest.raises(ConfigError, match=f"choose a `window` of at most {limit + 1}"):
            evaluate_text(engine, [tokens[: limit + 2]], None)


@given(st.integers(1, 300), st.integers(1, 5_000_000), st.integers(1, 64))
def test_pieces_cover_a_window(num_tokens, vocab_size, chunk_length):
    lengths = piece_lengths(num_tokens, vocab_size, chunk_length)
    assert sum(lengths) == num_tokens
    assert all(length > 1 for length in lengths) or num_tokens == 1 or chunk_length == 1
    assert all(length % chunk_length == 0 for length in lengths[:-1])


def test_divergence_of_extreme_logits():
    """A token is likeliest in one and impossible in the other; float32 exponentials would overflow and underflow."""
    base, model = np.array([[1000, 0, 0]], np.float32), np.array([[0, 1000, 0]], np.float32)
    assert divergences(base, model) == pytest.approx([1000])
    assert divergences(base, base) == [0]
    assert divergences(np.array([[0, -65504]], np.float16), np.zeros((1, 2), np.float32)) == pytest.approx([np.log(2)])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite(value):
    with (
        pytest.raises(ModelError, match="not finite"),
        np.errstate(invalid="ignore"),
    ):
        score_tokens(np.array([[0, value, 1]], np.float32), np.array([0]))


@given(st.integers(0, 200), st.integers(1, 7))
def test_parts_make_up_the_text(num_tokens, count):
    tokens = list(range(num_tokens))
    parts = [TextPart.parse(f"{i}/{count}").of(tokens) for i in range(1, count + 1)]
    assert [token for part in parts for token in part] == tokens
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.integers(2, 200), st.integers(3, 20), st.sampled_from([None, 7]))
def test_windows_make_up_the_text(num_tokens, length, bos_id):
    windows = cut_windows(list(range(num_tokens)), length, bos_id=bos_id)
    start = [] if bos_id is None else [bos_id]
    assert all(window[: len(start)] == start and 2 <= len(window) <= length for window in windows)
    covered = [token for window in windows for token in window[len(start) :]]
    lost = [] if bos_id is not None or (num_tokens % length) != 1 else [num_tokens - 1]
    assert covered + lost == list(range(num_tokens))


def test_windows_are_spread_evenly():
    windows = [[i, i] for i in range(10)] + [[10]]
    assert [w[0] for w in spread(windows, 2)] == [2, 7]
    assert [w[0] for w in spread(windows, 10)] == list(range(10))
    assert len(spread(windows, None)) == 10
    assert len(spread([[i, i] for i in range(100)], None)) == 16
    with pytest.raises(ConfigError, match="11 windows were requested, but the text has 10"):
        spread(windows, 11)


LINES = [
    ((), "nothing to evaluate; give --text FILE, --hellaswag FILE or --lambada FILE"),
    (("--text", "nowhere.txt"), "cannot read the text from nowhere.txt: No such file"),
    (("--text", "."), "cannot read the text from .: Is a directory"),
    (("--text", GGUF), "is not UTF-8"),
    (("--text", "story.txt", "--part", "3/2"), "the part is '3/2', expected K/N with K from 1 to N"),
    (("--text", "story.txt", "--part", "half"), "the part is 'half', expected K/N"),
    (("--text", "story.txt", "--part", "0/2"), "the part is '0/2', expected K/N"),
    (("--text", "story.txt", "--windows", "0"), "--windows is '0', expected a number, at least 1, or all"),
    (("--text", "story.txt", "--windows", "many"), "--windows is 'many', expected a number"),
    (("--text", "story.txt", "--windows", "9999"), "9999 windows were requested"),
    (("--text", "story.txt", "--window", "1"), "the window is 1, expected at least 2"),
    (("--text", "story.txt", "--window", "9999"), "--window is 9999, more than the context length of"),
    (("--text", "story.txt", "--cache-limit", "-1"), "--cache-limit is -1, expected a number of GB, 0 or more"),
    (("--text", "story.txt", "--cache-limit", "nan"), "--cache-limit is nan, expected a number of GB"),
    (("--text", "story.txt", "--limit", "0"), "--limit is 0, expected at least 1"),
    (("--text", "empty.txt"), "there are too few tokens to evaluate (0); give a longer text"),
    (("--text", "story.txt", "--part", "1/99999"), "there are too few tokens to evaluate (0)"),
    (("--text", "story.txt", "--base-model", "nowhere.gguf"), "there is no file or folder nowhere.gguf"),
]


@pytest.mark.parametrize(("arguments", "message"), LINES)
def test_wrong_command_is_refused_in_one_line(command, arguments, message, text, monkeypatch):
    monkeypatch.chdir(text.parent)
    (text.parent / "empty.txt").write_text("")
    window = () if "--window" in arguments else ("--window", 64)
    expect_one_line(command("eval", GGUF, "--npu", "native", *window, *arguments), message, status=1)


def test_windows_are_no_longer_than_a_small_context_by_themselves(command, text):
    found = command("eval", GGUF, "--text", text, "--npu", "native", "--base", "none", "--windows", 1, "--json")
    assert json.loads(found.out)["text"]["window_length"] == 128


def test_a_base_with_other_tokens():
    with (
        chunkrt.load(GGUF, npu="native") as engine,
        pytest.raises(ConfigError, match="the base other has a vocabulary of 7, the model has one of 128"),
    ):
        evaluate_text(engine, [[1, 2]], SimpleNamespace(vocab_size=7, model="other"))


def test_unknown_base_scheme_is_refused(command, text):
    expect_one_line(command("eval", GGUF, "--text", text, "--base", "float64"), "'float64' is not one of", status=2)


def test_a_model_without_a_tokenizer(command, text):
    expect_one_line(command("eval", FOLDER, "--text", text, "--window", 64), "has no tokenizer", status=1)


def test_engine_directory_needs_a_base_model(command, text, tmp_path):
    assert command("compile", GGUF, "-o", tmp_path / "engine", "--scheme", "w8a8-dynamic").status == 0
    arguments = (
        "eval",
        tmp_path / "engine",
        "--npu",
        "native",
        "--text",
        text,
        "--window",
        64,
        "--windows",
        1,
        "--json",
    )
    expect_one_line(command(*arguments), "give its original checkpoint with --base-model (it was called", status=1)
    alone = json.loads(command(*arguments, "--base", "none").out)["text"]
    beside = json.loads(command(*arguments, "--base-model", GGUF).out)["text"]
    itself = json.loads(command(*arguments, "--base", "w8a8-dynamic").out)["text"]
    assert alone["base"] is None
    assert alone["figures"]["perplexity"] == beside["figures"]["perplexity"]
    assert beside["figures"]["comparison"]["mean_kl"] > 0
    assert itself["figures"]["comparison"]["top_1"] == 1


def test_ctrl_c(command, text, cache, monkeypatch):
    def interrupt(self, prompt, **_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "prefill", interrupt)
    finished = command("eval", GGUF, "--text", text, "--npu", "native", "--window", 64)
    assert (finished.status, finished.out, finished.err.strip()) == (130, "", "interrupted")
    assert list(cache.glob("*")) == []
