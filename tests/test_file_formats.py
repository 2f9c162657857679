"""Checks of files before they are read: regular files, bounded depth, and archives of bounded size."""

import os
import threading
import zipfile
from collections.abc import Callable

import pytest
from fixture_checkpoints import checkpoint
from random_folders import write_folder

import chunkrt
from chunkrt.checkpoints.catalogue.entry import read_entry
from chunkrt.engine.settings import read_settings
from chunkrt.errors import ChunkrtError, ConfigError, ModelError
from chunkrt.files import check_archive, parse_json, read_toml
from chunkrt.graph.placement import read_placement
from chunkrt.quant.calibration import Calibration
from chunkrt.simulate.profile import read_profile
from chunkrt.simulate.shape import read_shape

DEEP = "x = " + "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize("read", [read_entry, read_settings, read_placement, read_profile, read_shape])
def test_toml_reader_refuses_deep_nesting(read, tmp_path):
    (tmp_path / "file.toml").write_text(DEEP)
    with pytest.raises(ConfigError, match=r"file\.toml.*nested too deeply"):
        read(tmp_path / "file.toml")


def test_json_reader_refuses_deep_nesting_and_invalid_numbers():
    assert parse_json('{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}
    for text in ("[" * 100_000, "NaN", "[Infinity]", '{"a": -Infinity}'):
        with pytest.raises(ValueError, match=r"nested too deeply|is not JSON"):
            parse_json(text)


def refusal_of(call: Callable[..., object], *arguments: object) -> str:
    """Return the message of the error that a call raises; it would never return if it read a pipe."""
    found = []

    def run():
        try:
            call(*arguments)
        except ChunkrtError as error:
            found.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert found
    return found[0]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_load_refuses_a_pipe_as_a_file(name, tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))  # a cache without an engine of this folder
    folder = write_folder(tmp_path / "model")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert "expected a regular file" in refusal_of(chunkrt.load, folder)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_calibration_load_refuses_a_pipe(tmp_path):
    folder, pipe = write_folder(tmp_path / "model"), tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "expected a regular file" in refusal_of(Calibration.load, pipe)
    assert "expected a regular file" in refusal_of(lambda: chunkrt.load(folder, scheme="w8a8", calibration=pipe))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_load_session_refuses_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with chunkrt.load(write_folder(tmp_path / "model")) as engine:
        assert "expected a regular file" in refusal_of(engine.load_session, tmp_path / "pipe")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_toml_reader_refuses_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "file.toml")
    with pytest.raises(OSError, match="expected a regular file"):
        read_toml(tmp_path / "file.toml")


def test_archive_reader_limits_the_compression_ratio(tmp_path):
    path = tmp_path / "file.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(10**6))
    with zipfile.ZipFile(path) as archive:
        with pytest.raises(ValueError, match="inflate to more than 16 times"):
            check_archive(archive, ratio=16)
        check_archive(archive, ratio=2000)


@pytest.mark.parametrize("value", ["false", "true", 0, 1, [], {}])
@pytest.mark.parametrize("key", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
def test_config_refuses_a_switch_that_is_not_boolean(key, value, tmp_path):
    with pytest.raises(ModelError, match=f"{key} is .*expected true or false"):
        chunkrt.load(write_folder(tmp_path / "model", **{key: value}))


def test_load_limits_chunks_in_flight():
    for number in (0, 257, 10**9):
        with pytest.raises(ConfigError, match=r"`chunks_in_flight` is 0|chunks in flight, expected 1 to 256"):
            chunkrt.load(checkpoint("llama_gqa"), chunks_in_flight=number)
