"""Several windows with shared weights, logits of the last row, batches, and whole sequences without caches:
Transformers' logits of the fixtures are the reference."""

import json

import numpy as np
import onnx
import pytest
from fixture_checkpoints import checkpoint, expected_logits, input_ids
from float64_llama import float64_logits
from one_line import expect_one_line
from onnx_models import FAMILIES
from random_folders import write_folder

from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.errors import ConfigError
from chunkrt.onnx.importing import verify
from chunkrt.onnx.window_session import OnnxSession

WIDE = ("--sequence", "96", "--context", "100", "--dtype", "fp32")


def weights_of(path):
    """Return the place of each stored tensor in the file of weights, by name."""
    model = onnx.load(path, load_external_data=False)
    return {t.name: {e.key: e.value for e in t.external_data} for t in model.graph.initializer if t.external_data}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", ["llama_tied", "gemma2", "qwen3_next"])
def test_windows_of_one_call_share_their_weights(tmp_path, command, name):
    done = command("export", checkpoint(name), "-o", tmp_path / "d.onnx", "--window", "8,1", *WIDE, "--logits", "last")
    assert (done.status, done.out) == (0, "")
    paths = [tmp_path / f"d.window{window}.onnx" for window in (8, 1)]
    assert {path.name for path in tmp_path.glob("*.onnx*")} == {"d.onnx.data", *(path.name for path in paths)}
    places = [weights_of(path) for path in paths]
    shared = [name for name in places[0] if name in places[1]]
    names = [n for n, tensor in plan_checkpoint(checkpoint(name), {}).plan.tensors.items() if tensor.kind == "weight"]
    assert len({*names} & {*shared}) > 4
    assert all(places[0][weight] == places[1][weight] for weight in {*names} & {*shared})
    spans = {(place["offset"], place["length"]) for file in places for place in file.values()}
    assert sum(int(length) for _, length in spans) == (tmp_path / "d.onnx.data").stat().st_size
    session = OnnxSession(*paths, threads=1)
    tokens, expected = input_ids(name), expected_logits(name)
    for end in (10, 18, 19):
        np.testing.assert_allclose(
            session.run(tokens[session.position : end]), expected[end - 1 : end], rtol=0, atol=1e-4
        )


def test_export_with_the_last_logits_is_imported(tmp_path, command):
    path = tmp_path / "d.onnx"
    assert command("export", checkpoint("llama_tied"), "-o", path, *WIDE, "--logits", "last").status == 0
    found = plan_checkpoint(path, {})
    assert verify(found.source, found.plan, found.load) < 1e-4


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("keys", ["pre-rope", "post-rope"])
@pytest.mark.parametrize("opset", ["18", "23"])
@pytest.mark.parametrize("name", [*FAMILIES, "gpt_oss", "gemma2", "bamba", "qwen2_moe"])
def test_sequences_of_a_batch_are_independent(tmp_path, command, name, opset, keys):
    """Prompts of different lengths, then 8 tokens each, then one."""
    options = ["--window", "8,1", "--batch", "3", *WIDE, "--opset", opset, "--keys", keys]
    assert command("export", checkpoint(name), "-o", tmp_path / "d.onnx", *options).status == 0
    session = OnnxSession(*(tmp_path / f"d.window{window}.onnx" for window in (8, 1)), threads=2)
    tokens, expected = input_ids(name), expected_logits(name)
    lengths = (5, 19, 11)
    for count in (0, 8, 1):
        begins = session.positions
        ends = [begin + count for begin in begins] if count else lengths
        found = session.run([tokens[begin:end] for begin, end in zip(begins, ends, strict=True)])
        assert session.positions == tuple(ends)
        for logits, begin, end in zip(found, begins, ends, strict=True):
            np.testing.assert_allclose(logits, expected[begin:end], rtol=0, atol=1e-4)
    with pytest.raises(ConfigError, match="the same number of tokens; 2 is the most"):
        session.run([[1], [1, 2], [1]])
    with pytest.raises(ConfigError, match="the export runs 3 sequences at once; pass a list of tokens for each"):
        session.run([1, 2, 3])
    with pytest.raises(ConfigError, match="the export runs 3 sequences at once; call run"):
        list(session.generate([1], 1))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("logits", ["all", "last"])
@pytest.mark.parametrize("batch", ["1", "2"])
@pytest.mark.parametrize("name", [*FAMILIES, "bamba"])
def test_whole_sequences_need_no_cache(tmp_path, command, name, batch, logits):
    path = tmp_path / "d.onnx"
    options = ["--no-cache", "--sequence", "40", "--dtype", "fp32", "--batch", batch, "--logits", logits]
    assert command("export", checkpoint(name), "-o", path, *options).status == 0
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert [value.name for value in model.graph.input] == ["input_ids", "attention_mask"]
    assert [value.name for value in model.graph.output] == ["logits"]
    session = OnnxSession(path, threads=2)
    tokens, expected = input_ids(name), expected_logits(name)
    for begin, end in ((0, 30), (30, 31), (31, 40)):
        part = tokens[begin:end]
        found = [session.run(part)] if batch == "1" else session.run([part, part])
        for each in found:
            rows = expected[end - 1 : end] if logits == "last" else expected[begin:end]
            np.testing.assert_allclose(each, rows, rtol=0, atol=1e-4)
    with pytest.raises(ConfigError, match="41 tokens exceed the sequence of 40 of an export with --no-cache"):
        session.run([1] if batch == "1" else [[1], [1]])
    session.reset()
    found = session.run(tokens[:4] if batch == "1" else [tokens[:4], tokens[:3]])
    np.testing.assert_allclose(
        found[-1] if batch == "1" else found[-1][-1], expected[3 if batch == "1" else 2], atol=1e-4
    )


@pytest.mark.parametrize("opset", ["14", "23"])
@pytest.mark.parametrize(("first", "sinks"), [(10, 4), (16, 4), (3, 2), (13, 1)])
def test_sinks_stay_while_later_tokens_slide(tmp_path, command, opset, first, sinks):
    """In one layer, keys and values depend on their token alone, so the logits are those of a prompt that consists of
    the sinks and the last tokens. The reference is a decoder in float64.
    """
    config = {"num_hidden_layers": 1, "attention_bias": False, "head_dim": 10}
    folder = write_folder(tmp_path / "one", **config)
    options = ["--window", "4,1", "--context", "16", "--sinks", str(sinks), "--dtype", "fp32", "--opset", opset]
    assert command("export", folder, "-o", tmp_path / "d.onnx", *options).status == 0
    session = OnnxSession(*(tmp_path / f"d.window{window}.onnx" for window in (4, 1)), threads=1)
    decoder, config = plan_checkpoint(folder, {}), json.loads((folder / "config.json").read_text())
    tensors = decoder.plan.tensors.values()
    weights = {t.name: decoder.load(t.name).astype(np.float64) for t in tensors if t.kind == "weight"}
    tokens = np.random.default_rng(first).integers(0, 61, 60).tolist()
    for end in (first, first + 1, first + 9, first + 13, first + 14, first + 41):
        logits = session.run(tokens[session.position : end])[-1]
        seen = tokens[:end] if end <= 16 else tokens[:sinks] + tokens[end - (16 - sinks) : end]
        expected = float64_logits(config, weights, seen)[-1]
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", [*FAMILIES, "gpt_oss"])
def test_sinks_change_nothing_before_the_caches_are_full(tmp_path, command, name):
    options = ["--window", "8", "--context", "96", "--sinks", "4", "--dtype", "fp32"]
    assert command("export", checkpoint(name), "-o", tmp_path / "d.onnx", *options).status == 0
    logits = OnnxSession(tmp_path / "d.onnx", threads=2).run(input_ids(name))
    np.testing.assert_allclose(logits, expected_logits(name), rtol=0, atol=1e-4)


@pytest.mark.parametrize("option", [("--batch", "2"), ("--no-cache",)])
def test_imports_of_other_forms_are_refused(tmp_path, command, option):
    path = tmp_path / "d.onnx"
    assert command("export", checkpoint("llama_gqa"), "-o", path, *option).status == 0
    done = command("compile", path, "-o", tmp_path / "engine")
    expect_one_line(done, f"d.onnx was exported with {' '.join(option)}; use the checkpoint")


def test_export_without_a_cache_takes_no_step(tmp_path, command):
    path = tmp_path / "d.onnx"
    assert command("export", checkpoint("llama_gqa"), "-o", path, "--no-cache", "--sequence", "8").status == 0
    with pytest.raises(ConfigError, match="was exported with --no-cache, which takes no step"):
        OnnxSession(path, path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["-o", "d.onnx", "--dynamic", "--logits", "last"],
            "--logits needs a fixed window; omit --logits or --dynamic",
        ),
        (["--static-subgraphs", "p", "--logits", "last"], "--logits needs -o; name a file"),
        (["--static-subgraphs", "p", "--window", "32,1"], "--static-subgraphs has one window; choose one of 32, 1"),
        (["-o", "d.onnx", "--window", "99,1", "--context", "50"], "--window is 99 and --sequence 50"),
        (["-o", "d.onnx", "--no-cache", "--window", "8"], "--no-cache runs whole sequences; omit --window"),
        (["-o", "d.onnx", "--no-cache", "--context", "8"], "--no-cache runs whole sequences; omit --context"),
        (["-o", "d.onnx", "--batch", "0"], "--batch is 0, expected 1 to 65536"),
        (["-o", "d.onnx", "--dynamic", "--batch", "2"], "--batch needs a fixed window; omit --batch or --dynamic"),
        (["--static-subgraphs", "p", "--batch", "2"], "--batch needs -o; name a file"),
        (["-o", "d.onnx", "--sinks", "-1"], "--sinks is -1, expected at least 0"),
        (["-o", "d.onnx", "--sinks", "4", "--no-cache"], "omit --sinks or --no-cache"),
        (["-o", "d.onnx", "--sinks", "4", "--keys", "post-rope"], "--sinks needs keys before RoPE; omit --keys"),
        (["-o", "d.onnx", "--sinks", "4", "--batch", "2"], "--sinks takes one sequence; omit --sinks or --batch"),
        (["-o", "d.onnx", "--sinks", "4", "--sequence", "40"], "--sinks needs them to be equal"),
        (["-o", "d.onnx", "--sinks", "9", "--context", "40"], "--window 32, more than the 40 slots of the caches"),
        (["-o", "d.onnx", "--sinks", "4", "--dynamic"], "--sinks needs a fixed window; omit --sinks or --dynamic"),
        (["-o", "d.onnx", "--window", "8,0"], "--window is 0, expected at least 1"),
        (["-o", "there.onnx", "--window", "8,1"], "there.window1.onnx exists already"),
    ],
)
def test_wrong_combinations_print_one_line(tmp_path, monkeypatch, command, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.window1.onnx").write_bytes(b"")
    expect_one_line(command("export", checkpoint("llama_gqa"), *arguments), message)
    assert [path.name for path in tmp_path.iterdir()] == ["there.window1.onnx"]


@pytest.mark.parametrize(("window", "message"), [("8,8", "names a window twice"), ("8,x", "is not a whole number")])
def test_invalid_windows_are_usage_errors(command, window, message):
    done = command("export", checkpoint("llama_gqa"), "-o", "d.onnx", "--window", window)
    assert done.status == 2
    assert message in done.err
