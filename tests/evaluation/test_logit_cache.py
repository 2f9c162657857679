"""The base's logits on disk: same figures with and without them, within the limit, and no damaged entries."""

import logging
import os

import numpy as np
import pytest
from damaged_files import flip_a_bit, make_empty, truncate
from fixture_checkpoints import checkpoint, input_ids

import chunkrt
from chunkrt.errors import ConfigError
from chunkrt.evaluation.baseline import Baseline, base_options, rounded
from chunkrt.evaluation.logit_cache import BasePiece, LogitCache
from chunkrt.evaluation.text import evaluate_text

NAME = "llama_gqa"
TOKENS = input_ids(NAME)
WINDOWS = [TOKENS[:24], TOKENS[24:48], TOKENS[46:]]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "logits"


@pytest.fixture(scope="module")
def engine():
    with chunkrt.load(checkpoint(NAME), npu="native") as engine:
        yield engine


def evaluate(engine, *, windows=WINDOWS, cache_limit=10**6, scheme="float"):
    """Return the comparison, and the numbers of windows read, computed and not kept."""
    options = base_options(scheme)
    with Baseline(
        str(checkpoint(NAME)), options, windows, cache_limit=cache_limit, progress=lambda what, done, total: None
    ) as base:
        found = evaluate_text(engine, windows, base).comparison
        return found, (base.num_read, base.num_computed, base.num_not_kept)


def test_the_second_time_nothing_is_computed(engine, monkeypatch):
    first, counts = evaluate(engine)
    assert counts == (0, 3, 0)
    monkeypatch.setattr("chunkrt.evaluation.baseline.Engine", None)  # not even loaded
    assert evaluate(engine) == (first, (3, 0, 0))


def test_without_a_cache_the_figures_are_the_same(engine, folder):
    kept, _ = evaluate(engine)
    assert evaluate(engine, cache_limit=0) == (kept, (3, 0, 0))  # existing entries are used
    for path in folder.iterdir():
        path.unlink()
    assert evaluate(engine, cache_limit=0) == (kept, (0, 3, 3))
    assert list(folder.iterdir()) == []


def test_another_scheme_and_other_tokens_are_other_entries(engine):
    evaluate(engine)
    assert evaluate(engine, scheme="w8a8-dynamic")[1] == (0, 3, 0)
    assert evaluate(engine, windows=[TOKENS[:25]])[1] == (0, 1, 0)
    assert evaluate(engine, windows=[WINDOWS[1]])[1] == (1, 0, 0)


def test_windows_that_do_not_fit_are_computed_every_time(engine, folder):
    evaluate(engine, windows=WINDOWS[:1])
    (entry,) = folder.glob("*.npz")
    limit = int(2.5 * entry.stat().st_size)
    entry.unlink()
    first, counts = evaluate(engine, cache_limit=limit)
    assert counts == (0, 3, 1)
    assert evaluate(engine, cache_limit=limit) == (first, (2, 1, 1))
    assert sum(path.stat().st_size for path in folder.iterdir()) <= limit


def test_entries_of_other_evaluations_make_room_oldest_first(engine, folder):
    for age, window in enumerate(WINDOWS[:2]):
        evaluate(engine, windows=[window])
        newest = max(folder.glob("*.npz"), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (age, age))
    old, newer = sorted(folder.glob("*.npz"), key=lambda path: path.stat().st_mtime_ns)
    evaluate(engine, windows=WINDOWS[2:], cache_limit=int(2.5 * old.stat().st_size))
    assert not old.exists()
    assert newer.exists()
    assert len(list(folder.glob("*.npz"))) == 2


def replace_by_another(path):
    np.savez(path, logits=np.zeros((3, 4), np.float16), surprisals=np.zeros(3, np.float32))


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, make_empty, replace_by_another])
def test_damaged_entries_are_computed_again(engine, folder, damage, caplog):
    whole, _ = evaluate(engine)
    path = min(folder.glob("*.npz"))
    damage(path)
    with caplog.at_level(logging.WARNING, "chunkrt"):
        assert evaluate(engine) == (whole, (2, 1, 0))
    assert f"{path} is damaged" in caplog.text
    assert "computing it again" in caplog.text
    assert evaluate(engine) == (whole, (3, 0, 0))


def test_an_interrupted_entry_leaves_nothing(folder):
    def pieces():
        yield BasePiece(logits=np.zeros((2, 8), np.float16), surprisals=np.zeros(2, np.float32))
        raise KeyboardInterrupt

    cache = LogitCache(folder, 10**6, ["key"])
    with pytest.raises(KeyboardInterrupt):
        cache.write("key", 4, 8, pieces())
    assert list(folder.iterdir()) == []
    assert cache.open("key", 4, 8) is None


def test_a_folder_that_cannot_be_written(folder):
    folder.parent.mkdir(parents=True)
    folder.write_text("in the way")
    piece = BasePiece(logits=np.zeros((4, 8), np.float16), surprisals=np.zeros(4, np.float32))
    with pytest.raises(ConfigError, match=r"cannot keep logits in .*--cache-limit 0"):
        LogitCache(folder, 10**6, ["key"]).write("key", 4, 8, [piece])


def test_rounding_costs_little_divergence():
    """A divergence of 0.003 is resolved to far better than 1 %, and the likeliest token stays."""
    random = np.random.default_rng(0)
    base = random.normal(0, 4, (200, 4096)).astype(np.float32) + 20
    model = base + random.normal(0, 0.08, base.shape).astype(np.float32)

    def mean_divergence(p, q):
        p, q = (x.astype(np.float64) for x in (p, q))
        log_p, log_q = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (p, q))
        return (np.exp(log_p) * (log_p - log_q)).sum(axis=1).mean()

    exact = mean_divergence(base, model)
    assert 0.002 < exact < 0.004
    assert mean_divergence(rounded(base), model) == pytest.approx(exact, rel=2e-4)
    assert (rounded(base).argmax(axis=1) == base.argmax(axis=1)).all()
    assert rounded(np.array([[0, -1e9]], np.float32)).tolist() == [[0, -65504]]
