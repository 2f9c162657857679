"""Files that processes share: complete or absent, one writer at a time, no remains of killed processes."""

import errno
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from fake_backend import make_plan
from filelock import FileLock
from fixture_checkpoints import checkpoint, input_ids

import chunkrt
from chunkrt import files
from chunkrt.checkpoints.checkpoint import map_file
from chunkrt.engine_directory.store import WeightStore
from chunkrt.errors import OutOfMemoryError
from chunkrt.files import cached_entry, map_read_only, only_writer, remove, written_aside
from chunkrt.quant.calibration import Calibration
from chunkrt.quant.folding import Folding
from chunkrt.runtime.state import State
from chunkrt.runtime.trace.file import write_trace
from chunkrt.runtime.trace.timeline import draw


def test_written_aside_serialises_writers_of_one_path(tmp_path, waiting):
    """The second writer must not delete the unfinished file of the first."""
    writing = threading.Event()

    def first():
        with written_aside(tmp_path / "out") as aside:
            aside.write_text("first")
            writing.set()
            assert waiting.wait(60)

    def second():
        assert writing.wait(60)
        with written_aside(tmp_path / "out") as aside:
            assert (tmp_path / "out").read_text() == "first"
            aside.write_text("second")

    with ThreadPoolExecutor(2) as threads:
        for attempt in [threads.submit(first), threads.submit(second)]:
            attempt.result()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"out": "second"}


def test_locked_does_not_report_short_waits(tmp_path, caplog, monkeypatch):
    asked = threading.Event()

    class Asked(FileLock):
        def acquire(self, *arguments, **options):
            asked.set()
            return super().acquire(*arguments, **options)

    def second():
        with files.locked(tmp_path / "lock", "working"):
            pass

    monkeypatch.setattr(files, "SILENT_SECONDS", 60)
    with ThreadPoolExecutor(1) as threads:
        with files.locked(tmp_path / "lock", "working"):
            monkeypatch.setattr("filelock.FileLock", Asked)
            waiting = threads.submit(second)
            assert asked.wait(60)
        waiting.result()
    assert not caplog.records


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="this system has no /proc, in which no file can be made")
def test_lock_that_cannot_be_made_is_an_error(caplog, monkeypatch):
    """The process would wait for a writer that does not exist."""
    monkeypatch.setattr(files, "SILENT_SECONDS", 0.1)
    with pytest.raises(FileNotFoundError), written_aside(Path("/proc/out")):
        pass
    assert not caplog.records


def test_written_aside_acquires_a_removed_lock_again(tmp_path):
    """Each of many writers reads the result of the previous one, in any order of waiting."""
    (tmp_path / "count").write_text("0")

    def add(_):
        with written_aside(tmp_path / "count") as aside:
            aside.write_text(str(int((tmp_path / "count").read_text()) + 1))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(add, range(40)))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"count": "40"}


def test_written_aside_syncs_all_files_before_the_rename(tmp_path, monkeypatch):
    steps, fsync, replace = [], os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: steps.append(os.fstat(file).st_ino) or fsync(file))
    monkeypatch.setattr(Path, "replace", lambda path, target: steps.append(target) or replace(path, target))
    with written_aside(tmp_path / "engine") as aside:
        (aside / "npu").mkdir(parents=True)
        for name in ("plan.json", "npu/context.bin"):
            (aside / name).write_text("{}")
    written = {path.stat().st_ino for path in (tmp_path / "engine").rglob("*") if path.is_file()}
    assert (set(steps[:2]), steps[2:]) == (written, [tmp_path / "engine"])


DIE = """
import os, sys
from pathlib import Path
from chunkrt.files import written_aside
with written_aside(Path(sys.argv[1])) as aside:
    aside.mkdir()
    (aside / "weights").write_text("half")
    os.kill(os.getpid(), int(sys.argv[2]))
"""


@pytest.mark.parametrize("path", ["file/entry", "file/folder/entry"])
def test_written_aside_below_a_file_says_that_it_is_no_folder(tmp_path, path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="Not a directory"), written_aside(tmp_path / path):
        pass


def test_written_aside_replaces_an_empty_folder(tmp_path):
    (tmp_path / "engine").mkdir()
    with written_aside(tmp_path / "engine") as aside:
        aside.mkdir()
        (aside / "file").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]
    assert (tmp_path / "engine" / "file").read_text() == "new"


def test_written_aside_does_not_replace_a_folder_with_files(tmp_path):
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "file").write_text("old")
    with pytest.raises(OSError), written_aside(tmp_path / "engine") as aside:  # noqa: PT011, its text is the system's
        aside.mkdir()
    assert (tmp_path / "engine" / "file").read_text() == "old"


def test_written_aside_replaces_a_mapped_file(tmp_path):
    """The mapping keeps its contents. Windows cannot replace the file, but the next attempt removes the renamed one."""
    path = tmp_path / "block[1]"
    path.write_bytes(b"1" * 5000)
    mapped = map_read_only(path)
    for text in (b"2", b"3"):
        with written_aside(path) as aside:
            aside.write_bytes(text)
        assert path.read_bytes() == text
        assert mapped[:] == b"1" * 5000
    mapped.close()
    with written_aside(path) as aside:
        aside.write_bytes(b"4")
    assert [path.name for path in tmp_path.iterdir()] == ["block[1]"]


def test_remove_takes_a_folder_with_a_mapped_file(tmp_path):
    """Windows cannot delete the file: it is renamed until the next writer comes."""
    folder = tmp_path / "engines" / "one"
    (folder / "npu").mkdir(parents=True)
    for name in ("plan", "npu/weights"):
        (folder / name).write_bytes(b"1" * 5000)
    mapped = map_read_only(folder / "npu" / "weights")
    remove(folder)
    assert not folder.exists()
    with written_aside(folder) as aside:
        aside.mkdir()
    assert mapped[:] == b"1" * 5000
    mapped.close()
    with only_writer(folder.parent, "testing"):
        pass
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.skipif(sys.platform == "win32", reason="signals end no process by themselves on Windows")
@pytest.mark.parametrize("number", ["SIGKILL", "SIGTERM", "SIGHUP"])
def test_written_aside_removes_remains_of_a_killed_process(tmp_path, number):
    died = subprocess.run([sys.executable, "-P", "-c", DIE, tmp_path / "out", str(int(signal.Signals[number]))])
    assert died.returncode == -signal.Signals[number]
    assert (tmp_path / ".out.part" / "weights").exists()
    with written_aside(tmp_path / "out") as aside:
        aside.mkdir()
        assert not any(aside.iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def a_record():
    records = []
    with chunkrt.load(checkpoint("llama_mha"), npu="off") as engine:
        session = engine.session()
        session.on_run = records.append
        session.prefill(input_ids("llama_mha")[:3])
    return records[0]


def save_a_calibration(path):
    arrays = {
        name: {}
        for name in ("peaks", "limits", "shadow_limits", "column_peaks", "channel_peaks", "shadowed_column_peaks")
    }
    Calibration(
        model="toy",
        weights="",
        token_ids=np.arange(3),
        method="mse",
        equalisation=None,
        is_rotated=False,
        folding=Folding(),
        hot_channels={},
        histograms={},
        **arrays,
    ).save(path)


SAVERS = {
    "state.npz": State(make_plan(), 8).save,
    "calibration.npz": save_a_calibration,
    "trace.json": lambda path: write_trace(path, [a_record()], "toy"),
    "picture.svg": lambda path: draw(a_record(), path),
}


@pytest.mark.parametrize("name", SAVERS)
def test_savers_remove_remains_of_a_killed_save(tmp_path, name):
    path = tmp_path / name
    SAVERS[name](path)
    path.unlink()

    def killed(*_):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:  # as after kill -9: no cleanup
        patch.setattr(Path, "replace", killed)
        patch.setattr(Path, "unlink", lambda path, missing_ok=False: None)
        with pytest.raises(KeyboardInterrupt):
            SAVERS[name](path)
    assert any(left.name.startswith(f".{name}") for left in tmp_path.iterdir())
    SAVERS[name](path)
    assert [left.name for left in tmp_path.iterdir()] == [name]


def test_cached_entry_yields_an_existing_entry_and_removes_a_damaged_one(tmp_path, caplog):
    path, made = tmp_path / "cache" / "entry", []

    def entry():
        with cached_entry(path, "counting", lambda path: int(path.read_text())) as found:
            if found is None:
                with written_aside(path) as aside:
                    aside.write_text("17")
                made.append(path)
        return found

    assert [entry(), entry()] == [None, 17]
    assert (len(made), caplog.messages) == (1, [])
    path.write_text("x")
    assert [entry(), entry()] == [None, 17]
    assert caplog.messages == [f"{path} is damaged (invalid literal for int() with base 10: 'x'); counting again"]
    assert (len(made), path.read_text()) == (2, "17")


def no_room(*_, **__):
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


@pytest.mark.parametrize("read", [map_file, WeightStore.open], ids=["checkpoint", "engine directory"])
def test_readers_report_a_lack_of_memory_not_damage(tmp_path, monkeypatch, read):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(bytes(3_000_000))
    monkeypatch.setattr("mmap.mmap", no_room)
    with pytest.raises(OutOfMemoryError, match=r"too little memory to map .*, which takes 3 MB"):
        read(path)


def test_cached_entry_keeps_an_entry_after_a_memory_error(tmp_path):
    path = tmp_path / "entry"
    path.write_text("whole")

    def read(path):
        raise MemoryError

    with pytest.raises(MemoryError), cached_entry(path, "making", read):
        pytest.fail("the entry is made again")
    assert path.read_text() == "whole"


def test_calibration_load_reports_a_lack_of_memory(tmp_path, monkeypatch):
    save_a_calibration(path := tmp_path / "calibration.npz")

    def load(*_, **__):
        raise MemoryError("no 8 bytes")

    monkeypatch.setattr(np, "load", load)
    with pytest.raises(OutOfMemoryError, match="too little memory to read the calibration"):
        Calibration.load(path)


@pytest.mark.parametrize("what", ["chunkrt.engine.loaded.open_weights", "chunkrt.engine.loaded.State"])
def test_load_and_session_report_a_lack_of_memory(monkeypatch, what):
    def fail(*_, **__):
        raise MemoryError("cannot allocate 8000 bytes")

    monkeypatch.setattr(what, fail)
    with pytest.raises(
        OutOfMemoryError, match=r"too little memory (to load|for a context).*cannot allocate 8000 bytes"
    ):
        chunkrt.load(checkpoint("llama_mha")).session()


def test_bytes_below_counts_regular_files_and_ignores_removed_folders(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one").write_bytes(b"123")
    (tmp_path / "two").write_bytes(b"45")
    (tmp_path / "link").symlink_to("nowhere")
    assert files.bytes_below(tmp_path) == 5
    assert files.bytes_below(tmp_path / "two") == 2
    assert files.bytes_below(tmp_path / "absent") == 0
    scandir = os.scandir

    def vanish(path):
        if path == str(tmp_path / "a"):  # removed after it was listed
            (tmp_path / "a" / "one").unlink()
            (tmp_path / "a").rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanish)
    assert files.bytes_below(tmp_path) == 2
