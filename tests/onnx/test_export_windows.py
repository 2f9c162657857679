"""Several windows with shared weights, and logits of the last row: Transformers' logits of the fixtures are the
reference."""

import numpy as np
import onnx
import pytest
from fixture_checkpoints import checkpoint, expected_logits, input_ids
from one_line import expect_one_line

from chunkrt.compile.compiler import plan_checkpoint
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
