"""Two processes that compile into one folder, each with a cache of its own: the lock lies beside the folder."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from fixture_checkpoints import checkpoint

from chunkrt import files
from chunkrt.engine.deploy import compile_engine
from chunkrt.engine.options import EngineOptions
from chunkrt.errors import ConfigError


def test_of_two_compilations_into_one_folder_the_second_is_told_that_it_is_there(tmp_path, monkeypatch):
    """Before, it deleted what the first was writing."""
    output = tmp_path / "out"
    writing, waiting = threading.Event(), threading.Event()
    monkeypatch.setattr(files, "_tell_of_waiting", lambda doing: waiting.set())
    monkeypatch.setattr(files, "SILENT_SECONDS", 0)

    def first():
        with files.written_aside(output) as aside:
            aside.mkdir()
            (aside / "engine.json").write_text("{}")
            writing.set()
            assert waiting.wait(60)

    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(first)
        assert writing.wait(60)
        with pytest.raises(ConfigError, match="out exists already"):
            compile_engine(str(checkpoint("llama_mha")), output, EngineOptions(npu="native"), socs=[], chunk_lengths=[])
        other.result()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in output.iterdir()] == ["engine.json"]
