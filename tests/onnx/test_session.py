"""The loop that drives an exported window: prompts, tokens after them, generation; and the export command."""

import errno
import json
import os
from dataclasses import replace

import numpy as np
import onnx
import pytest
from fixture_checkpoints import checkpoint, expected_logits, input_ids
from one_line import expect_one_line
from onnx_models import FAMILIES, planned
from random_folders import load_on, write_folder

from chunkrt.checkpoints.checkpoint import open_checkpoint
from chunkrt.errors import ConfigError, ModelError
from chunkrt.onnx import exporting
from chunkrt.onnx.exporting import WindowSettings, save_model, window_model
from chunkrt.onnx.window_session import OnnxSession
from chunkrt.tokenizer import Tokenizer
from chunkrt.tokenizer.huggingface_folder import read_folder


@pytest.fixture
def exported(tmp_path):
    """Return a function that exports a fixture: name and settings to a path."""

    def export(name, **settings):
        chosen = WindowSettings(**{"sequence": 96, "context": 100, "dtype": "fp32", **settings})
        path = tmp_path / f"{name}.{chosen.window}.{chosen.keys}.{chosen.context}.{chosen.dtype}.onnx"
        save_model(window_model(planned(name), chosen), path, external_data=True)
        return path

    return export


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("keys", ["pre-rope", "post-rope"])
@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_of_any_length_and_tokens_after_them(exported, name, keys):
    """10 tokens run in two windows, the first of which is padded; then a window and a token; after a reset all
    again."""
    session = OnnxSession(exported(name, window=8, keys=keys), exported(name, window=1, keys=keys), threads=2)
    tokens, expected = input_ids(name), expected_logits(name)
    for _ in range(2):
        first, then = session.run(tokens[:10]), session.run(tokens[10:19])
        assert session.position == 19
        np.testing.assert_allclose(np.concatenate([first, then]), expected[:19], rtol=0, atol=1e-4)
        session.reset()
        assert session.position == 0


def test_generation_equals_the_engines_greedy_text(tmp_path, command):
    """It is run through the command line, and compared with chunkrt in float on another backend."""
    folder = write_folder(tmp_path / "tiny")
    for window in (8, 1):
        path = tmp_path / f"w{window}.onnx"
        done = command("export", folder, "-o", path, "--window", window, "--context", 64, "--dtype", "fp32")
        assert (done.status, done.out) == (0, "")
        assert f"w{window}.onnx: 0 MB" in done.err
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    session = OnnxSession(tmp_path / "w8.onnx", tmp_path / "w1.onnx", threads=1)
    generated = list(session.generate(prompt, 20))
    with load_on("reference", folder) as engine:
        decoder = engine.session()
        decoder.prefill(prompt)
        expected = [piece.token_id for piece in decoder.generate(max_new_tokens=20)]
    assert generated == expected
    session.reset()
    assert list(session.generate(prompt, 20, eos_ids={expected[3]})) == expected[: expected.index(expected[3])]


def test_generation_continues_after_the_sequence_is_full(exported):
    session = OnnxSession(exported("llama_gqa", window=1, sequence=16, context=16), threads=1)
    tokens = list(session.generate(input_ids("llama_gqa")[:10], 30))
    assert len(tokens) == 30
    assert session.position == 39


def test_keys_after_rope_end_with_the_models_context(exported):
    session = OnnxSession(exported("llama_gqa", window=1, sequence=16, context=16, keys="post-rope"), threads=1)
    session.run([5] * 128)
    with pytest.raises(ConfigError, match=r"129 tokens exceed the model's context of 128.*pre-rope"):
        session.run([5])


def test_mismatched_files_are_refused(exported, tmp_path):
    eight, one = exported("llama_gqa", window=8), exported("llama_gqa", window=1)
    alone = OnnxSession(eight, threads=1)
    alone.run(input_ids("llama_gqa")[:8])
    with pytest.raises(
        ConfigError, match=r"after position 8, 1 tokens are not a multiple of the window of 8.*--window 1"
    ):
        alone.run([1])
    with pytest.raises(ConfigError, match="no tokens to run"):
        alone.run([])
    with pytest.raises(ConfigError, match="has a window of 8, expected 1"):
        OnnxSession(one, eight)
    with pytest.raises(ConfigError, match="do not have the same caches"):
        OnnxSession(eight, exported("llama_gqa", window=1, context=99))
    with pytest.raises(ModelError, match=r"the file .*nothing\.onnx does not exist"):
        OnnxSession(tmp_path / "nothing.onnx")
    (tmp_path / "broken.onnx").write_bytes(eight.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"ONNX Runtime cannot load .*broken.onnx"):
        OnnxSession(tmp_path / "broken.onnx")
    model = onnx.load(eight)
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "foreign.onnx")
    with pytest.raises(ModelError, match="not a fixed window"):
        OnnxSession(tmp_path / "foreign.onnx")


def test_export_for_genai_writes_all_needed_files(tmp_path, command):
    folder = write_folder(tmp_path / "tiny", head_dim=16, eos_token_id=[2, 7], bos_token_id=1)
    (folder / "tokenizer_config.json").write_text("{}")
    output = tmp_path / "genai" / "model.onnx"
    assert command("export", folder, "-o", output, "--dynamic", "--dtype", "fp32", "--external-data").status == 0
    written = {path.name for path in output.parent.iterdir()}
    assert written == {"model.onnx", "model.onnx.data", "genai_config.json", "tokenizer_config.json"}
    config = json.loads((output.parent / "genai_config.json").read_text())["model"]
    assert (config["type"], config["vocab_size"], config["context_length"]) == ("llama", 61, 64)
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, [2, 7], 2)
    decoder = config["decoder"]
    assert (decoder["filename"], decoder["hidden_size"], decoder["head_size"]) == ("model.onnx", 36, 16)
    heads = [decoder[key] for key in ("num_attention_heads", "num_key_value_heads", "num_hidden_layers")]
    assert heads == [4, 2, 2]
    other = command("export", folder, "-o", output.with_name("other.onnx"), "--dynamic")
    assert other.status == 1
    assert "genai_config.json exists already and belongs to another model" in other.err


def test_folders_tokenizer_is_copied(tmp_path, command):
    folder = write_folder(tmp_path / "tiny", head_dim=16)
    (folder / "special_tokens_map.json").write_text('{"a": 1}')
    output = tmp_path / "genai" / "model.onnx"
    assert command("export", folder, "-o", output, "--dynamic").status == 0
    assert (output.parent / "special_tokens_map.json").read_text() == '{"a": 1}'


def test_gguf_tokenizer_becomes_a_folders(tmp_path, command):
    """It is read again as a Hugging Face folder, with the same result; its template begins chats, whereas a GGUF file's
    may not."""
    source = open_checkpoint(checkpoint("qwen3_gguf"))
    ours = Tokenizer.from_source(source)
    assert command("export", checkpoint("qwen3_gguf"), "-o", tmp_path / "d.onnx").status == 0
    read = Tokenizer(*read_folder(tmp_path, {}))
    assert replace(read.settings, chat_template=None) == replace(ours.settings, chat_adds_bos=False, chat_template=None)
    assert read.settings.chat_template == (
        None if (t := ours.settings.chat_template) is None else "{{- bos_token }}" + t
    )
    text = "a b <eos> 0"
    assert read.encode(text, add_special=True, parse_special=True) == ours.encode(
        text, add_special=True, parse_special=True
    )


def test_static_subgraphs_from_the_command_line(tmp_path, command):
    done = command("export", checkpoint("lfm2"), "--static-subgraphs", tmp_path / "parts", "--window", 16)
    assert done.status == 0
    files = sorted((tmp_path / "parts").iterdir())
    assert f"{len(files)} ONNX files written" in done.err
    assert len(files) == len(planned("lfm2").plan.static_subgraphs)
    graph = onnx.load(files[0]).graph
    assert [d.dim_value for d in graph.input[0].type.tensor_type.shape.dim][:2] == [1, 16]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to write; name a file with -o, or a folder with --static-subgraphs"),
        (["-o", "decoder.bin"], "expected a name that ends with .onnx"),
        (["-o", "there.onnx"], "there.onnx exists already"),
        (["-o", "d.onnx", "--window", "99", "--context", "50"], "--window is 99 and --sequence 50"),
        (["-o", "d.onnx", "--sequence", "60", "--context", "50"], "the caches cannot hold the sequence"),
        (["-o", "d.onnx", "--context", "0"], "--window is 32 and --sequence 0"),
        (["-o", "d.onnx", "--sequence", "0"], "--window is 32 and --sequence 0"),
        (["-o", "d.onnx", "--context", "999", "--sequence", "200"], "longer than the model's context of 128"),
        (["-o", "d.onnx", "--dynamic", "--context", "129"], "--context is 129, longer than the model's context of 128"),
        (["-o", "d.onnx", "--dynamic", "--keys", "pre-rope"], "--dynamic caches keys after RoPE"),
        (["-o", "d.onnx", "--dynamic", "--window", "8"], "--dynamic accepts any number of rows; omit --window"),
        (["-o", "d.onnx", "--dynamic"], "export a fixed window"),
        (["--static-subgraphs", "p", "--dynamic"], "--dynamic needs -o; name a file"),
    ],
)
def test_wrong_arguments_print_one_line(tmp_path, monkeypatch, command, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.onnx").write_bytes(b"")
    expect_one_line(command("export", checkpoint("llama_gqa"), *arguments), message, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["there.onnx"]


def test_unwritable_output_is_reported_before_computation(tmp_path, monkeypatch, command):
    def fail(*arguments, **options):
        raise AssertionError("it is computed first")

    file, there = tmp_path / "file", tmp_path / "parts" / "1_static.0.onnx"
    file.touch()
    there.parent.mkdir()
    there.touch()
    monkeypatch.setattr(exporting, "check_float16", fail)
    for option, path, message in (
        ("-o", file / "d.onnx", f"cannot write {file / 'd.onnx'}: {file} is not a folder"),
        ("-o", tmp_path / f"{'d' * 250}.onnx", os.strerror(errno.ENAMETOOLONG)),
        ("--static-subgraphs", file / "parts", f"{file / 'parts' / there.name}: {file} is not a folder"),
        ("--static-subgraphs", there.parent, f"{there} exists already"),
    ):
        expect_one_line(command("export", checkpoint("llama_gqa"), option, path), message)


def test_engine_directory_is_not_exported(tmp_path, command):
    folder = tmp_path / "engine"
    assert command("compile", checkpoint("llama_gqa"), "-o", folder).status == 0
    expect_one_line(command("export", folder, "-o", tmp_path / "d.onnx"), "give its checkpoint", 1)


def test_window_of_the_complete_context(exported):
    """No cached slot is kept: the window is the complete context."""
    path = exported("llama_gqa", window=70, sequence=70, context=70)
    logits = OnnxSession(path, threads=1).run(input_ids("llama_gqa"))
    np.testing.assert_allclose(logits, expected_logits("llama_gqa"), rtol=0, atol=1e-4)


@pytest.mark.parametrize("tokens", [[], [-1], [104 * 1000], [1.5], [[1, 2]], "12"])
def test_invalid_tokens_are_one_error_and_change_nothing(exported, tokens):
    session = OnnxSession(exported("llama_gqa", window=1), threads=1)
    with pytest.raises(ConfigError, match="token"):
        session.run(tokens)
    assert session.position == 0


def test_step_of_another_decoder_is_refused(exported):
    with pytest.raises(ConfigError, match="exports of different decoders"):
        OnnxSession(exported("llama_gqa", window=8), exported("qwen3", window=1))


def test_unavailable_provider_is_an_error(exported):
    with pytest.raises(ConfigError, match=r"no provider 'Nope' here; available: .*CPUExecutionProvider"):
        OnnxSession(exported("llama_gqa", window=1), providers=["Nope"])


@pytest.mark.parametrize("text", ["{", "[]", '{"form": "window"}'])
def test_damaged_metadata_is_one_error(exported, text):
    path = exported("llama_gqa", window=1)
    model = onnx.load(path, load_external_data=False)
    (setting,) = (prop for prop in model.metadata_props if prop.key == "chunkrt.export")
    setting.value = text
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=r"chunkrt export|export it again"):
        OnnxSession(path)
