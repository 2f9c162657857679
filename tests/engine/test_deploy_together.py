"""Two processes that compile into one folder, each with its own cache: the lock file is next to the folder."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from fixture_checkpoints import checkpoint

from chunkrt import files
from chunkrt.engine.deploy import compile_engine
from chunkrt.engine.options import EngineOptions
from chunkrt.errors import ConfigError


def test_second_compilation_into_one_folder_is_an_error(tmp_path, monkeypatch):
    """Earlier versions deleted the first one's files."""
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
