"""Tests of `chunkrt calibrate --merge`: it equals one calibration on all files."""

import json

import numpy as np
import pytest
from fixture_checkpoints import checkpoint
from one_line import expect_one_line
from random_folders import write_folder

import chunkrt
from chunkrt.compile.calibrate import WINDOW_LENGTH
from chunkrt.quant.calibration import METHODS, Calibration

CONTEXT = 64
LENGTHS = (2 * CONTEXT, CONTEXT, CONTEXT + 9)
"""All but the last are a number of complete windows."""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    assert CONTEXT <= WINDOW_LENGTH
    return write_folder(tmp_path_factory.mktemp("random") / "model", max_position_embeddings=CONTEXT)


@pytest.fixture
def parts(tmp_path, model):
    """Return files of token ids, whose values differ."""
    rng, vocab_size = np.random.default_rng(5), json.loads((model / "config.json").read_text())["vocab_size"]
    paths = []
    for index, length in enumerate(LENGTHS):
        ids = rng.integers(vocab_size * index // 3, vocab_size * (index + 1) // 3, length)
        paths.append(tmp_path / f"ids{index}.npy")
        np.save(paths[-1], ids)
    return paths


def made(command, tmp_path, model, ids, *options):
    """Return the calibration of a model on files of ids, as a file."""
    path = tmp_path / f"{'+'.join(each.stem for each in ids)}{''.join(map(str, options))}.npz"
    files = [part for each in ids for part in ("--ids", each)]
    num_tokens = sum(np.load(each).size for each in ids)
    finished = command("calibrate", model, *files, "--tokens", num_tokens, "-o", path, *options)
    assert (finished.status, finished.err) == (0, "")
    return path


def equal(one, two):
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], two[name], strict=True)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", [(), ("--rotate",)], ids=["plain", "rotated"])
def test_merged_calibration_equals_that_of_all_files(command, tmp_path, model, parts, method, options):
    options = ("--method", method, *options)
    files = [made(command, tmp_path, model, [part], *options) for part in parts]
    out = tmp_path / "merged.npz"
    finished = command("calibrate", "--merge", *files, "-o", out)
    assert (finished.status, finished.err) == (0, "")
    assert finished.out.splitlines()[-1] == f"saved to {out}"
    merged, whole = Calibration.load(out), Calibration.load(made(command, tmp_path, model, parts, *options))
    for field in ("peaks", "limits", "shadow_limits", "column_peaks", "channel_peaks", "histograms"):
        equal(getattr(merged, field), getattr(whole, field))
    alone = [Calibration.load(file) for file in files]
    assert all(merged.peaks != each.peaks and merged.limits != each.limits for each in alone)
    for field in ("model", "weights", "method", "equalisation", "is_rotated"):
        assert getattr(merged, field) == getattr(whole, field)
    assert merged.token_ids.tolist() == [token for part in parts for token in np.load(part)]


@pytest.mark.parametrize("options", [{"scheme": "w8a16"}, {"scheme": "w8a8", "shadow": "all", "equalisation": "off"}])
def test_merged_calibration_compiles_to_the_model_of_all_files(command, tmp_path, model, parts, options):
    """It holds no measurements for shadows, which are made again on its tokens."""
    files = [made(command, tmp_path, model, [part]) for part in parts]
    command("calibrate", "--merge", *files, "-o", tmp_path / "merged.npz")
    logits = []
    for calibration in (tmp_path / "merged.npz", made(command, tmp_path, model, parts), files[0]):
        with chunkrt.load(model, threads=1, calibration=calibration, **options) as engine, engine.session() as session:
            logits.append(session.prefill([5, 6, 7, 8], logits="all").logits)
    np.testing.assert_array_equal(logits[0], logits[1])
    assert (logits[0] != logits[2]).any()


def test_merge_refuses_calibrations_of_different_settings(command, tmp_path, model, parts, monkeypatch):
    first = made(command, tmp_path, model, parts[:1])
    equalised = [made(command, tmp_path, model, [part], "--equalise", 0.5) for part in parts[:2]]
    other = tmp_path / "other.npz"
    command("calibrate", checkpoint("llama_biased_gguf"), "-o", other)
    with monkeypatch.context() as patched:
        patched.setattr("chunkrt.quant.calibration.FORMAT", 5)
        old = made(command, tmp_path, model, parts[1:2], "--tokens", 60)
    for second, message in [
        (other, f"{other} was made for {checkpoint('llama_biased_gguf')} with other weights than {first}"),
        (made(command, tmp_path, model, parts[1:2], "--method", "absmax"), "differ in the method: mse and absmax"),
        (made(command, tmp_path, model, parts[1:2], "--rotate"), "differ in rotation: False and True"),
        (equalised[0], "differ in equalisation: None and 0.5"),
        (old, "its format is 5, expected 6"),
        (tmp_path / "nowhere.npz", "nowhere.npz"),
    ]:
        finished = command("calibrate", "--merge", first, second, "-o", tmp_path / "out.npz")
        expect_one_line(finished, message, status=1)
    finished = command("calibrate", "--merge", *equalised, "-o", tmp_path / "out.npz")
    expect_one_line(
        finished,
        "were equalised on different texts, so their weights differ; merge calibrations made with --equalise off",
        status=1,
    )
    assert not (tmp_path / "out.npz").exists()


def test_merge_refuses_other_arguments(command, tmp_path, model, parts):
    first, second = (made(command, tmp_path, model, [part]) for part in parts[:2])
    out = ("-o", tmp_path / "out.npz")
    for arguments, message, status in [
        (("--merge", first, second), "--merge needs a file to write; give it with -o FILE", 1),
        (("--merge", first, *out), "expected at least two different files", 1),
        (("--merge", first, first, *out), "expected at least two different files", 1),
        (("--merge", first, second, *out, "--method", "mse"), "--method has no effect with --merge", 1),
        (("--merge", first, second, *out, "--scheme", "w8a8"), "--scheme has no effect with --merge", 1),
        ((model, second, *out), "is a second argument; give one model, or --merge", 2),
    ]:
        expect_one_line(command("calibrate", *arguments), message, status=status)


def test_merge_json_names_the_files(command, tmp_path, model, parts):
    files = [made(command, tmp_path, model, [part]) for part in parts]
    out = tmp_path / "merged.npz"
    summary = json.loads(command("calibrate", "--merge", *files, "-o", out, "--json").out)
    assert summary["merged"] == [{"path": str(f), "tokens": n} for f, n in zip(files, LENGTHS, strict=True)]
    assert (summary["tokens"], summary["path"]) == (sum(LENGTHS), str(out))
