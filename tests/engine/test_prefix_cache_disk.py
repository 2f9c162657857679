"""The prefix cache on disk: hits are correct after any damage, and the budget always holds."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from threading import Event
from typing import IO, Any

import numpy as np
import pytest
import xxhash
from fake_backend import wait_until
from filelock import FileLock, Timeout
from fixture_checkpoints import NAMES, ONE_OF_EACH_STATE, checkpoint, input_ids
from random_folders import write_folder

import chunkrt
from chunkrt.engine.engine import Engine
from chunkrt.engine.prefix_cache import block_file, disk, folder, opening
from chunkrt.engine.prefix_cache.block_file import read_header
from chunkrt.engine.prefix_cache.folder import entries, is_part
from chunkrt.errors import ConfigError

LAYERS = {
    "caches": {},
    "window": {"model_type": "mistral", "sliding_window": 40},
}
NUM_TOKENS = 600
TOKENS = [(7 * i + i // 50) % 60 for i in range(NUM_TOKENS)]
BUDGET = 100_000
SMALL = {"prefix_cache_disk": BUDGET, "attention_math": "float32"}
"""Options with which a file fits the budget; bfloat16 caches pad heads to 32 dimensions."""


@pytest.fixture(scope="module", params=LAYERS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {"max_position_embeddings": 2048, **LAYERS[request.param]}
    return write_folder(tmp_path_factory.mktemp("models") / request.param, **config)


def load(model: Path, **options: object) -> Engine:
    return chunkrt.load(model, **{"npu": "native", "scheme": "w8a8-dynamic", "threads": 1, **options})


@pytest.fixture(scope="module")
def truth(model: Path) -> np.ndarray:
    with load(model) as engine:
        return engine.session().prefill(TOKENS).logits


@pytest.fixture(scope="module")
def filled_once(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all files of the tokens: two of 256 and one of 64."""
    folder = tmp_path_factory.mktemp("filled") / "cache"
    with load(model, prefix_cache=folder) as engine:
        engine.session().prefill(TOKENS)
    assert len(entries(folder)) == 3
    return folder


@pytest.fixture
def filled(filled_once: Path, tmp_path: Path) -> Path:
    """A copy of it, which a test may damage."""
    return Path(shutil.copytree(filled_once, tmp_path / "cache"))


class Lines(logging.Handler):
    """Handler that collects messages to the user."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def lines() -> Iterator[list[str]]:
    handler = Lines()
    logging.getLogger().addHandler(handler)
    yield handler.messages
    logging.getLogger().removeHandler(handler)


def cached_tokens(model: Path, cache: Path, truth: np.ndarray, **options: object) -> int:
    """Return the number of tokens that a new engine gets from the folder, after checking its logits."""
    with load(model, prefix_cache=cache, **options) as engine:
        result = engine.session().prefill(TOKENS)
    np.testing.assert_array_equal(result.logits, truth)
    assert result.num_cached + result.num_tokens == NUM_TOKENS
    return result.num_cached


def second_file(cache: Path) -> Path:
    """Return the file of the tokens from 256 on, without which later files are useless."""
    return next(path for path in entries(cache) if read_header(path).start == 256)


def test_names_depend_on_everything_that_bits_depend_on(
    model: Path, filled: Path, truth: np.ndarray, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(model) as engine:
        other_math = "bfloat16" if engine.attention_math == "float32" else "float32"
    for options in ({"cache_dtype": "float32"}, {"attention_math": other_math}):
        with load(model, prefix_cache=filled, **options) as engine:
            assert engine.session().prefill(TOKENS).num_cached == 0
    assert cached_tokens(model, filled, truth, context_length=1000, chunk_length=64) == 576
    monkeypatch.setattr(opening, "native_digest", lambda: "other kernels")
    assert cached_tokens(model, filled, truth) == 0
    assert lines == []


@pytest.mark.sampled(name=ONE_OF_EACH_STATE)
@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_state_is_restored(name: str, tmp_path: Path) -> None:
    options = {"context_length": 120, "chunk_length": 32}
    tokens = input_ids(name) * 8
    with load(checkpoint(name), **options) as plain:
        truth = plain.session().prefill(tokens[:110]).logits
    for num_cached in (0, 96):
        with load(checkpoint(name), prefix_cache=tmp_path, **options) as engine:
            result = engine.session().prefill(tokens[:110])
        np.testing.assert_array_equal(result.logits, truth)
        assert result.num_cached == num_cached


def test_memory_smaller_than_the_disk(model: Path, filled: Path, truth: np.ndarray) -> None:
    assert cached_tokens(model, filled, truth, prefix_cache_memory=50_000) < 576


def check_miss(model: Path, cache: Path, truth: np.ndarray, lines: list[str], path: Path) -> None:
    """Check that a file is not used, and that one line reports it."""
    assert cached_tokens(model, cache, truth) <= 256
    assert len(lines) == 1
    assert lines[0].startswith(f"the prefix cache cannot use {path} (")


FIELDS = {
    "magic": 0,
    "format": 8,
    "length of the header": 12,
    "header": 20,
    "tokens": 400,
    "arrays": -9000,
    "last array": -100,
    "checksum": -3,
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("field", FIELDS)
def test_flipped_byte_is_a_miss(model: Path, filled: Path, truth: np.ndarray, lines: list[str], field: str) -> None:
    path = second_file(filled)
    data = bytearray(path.read_bytes())
    data[FIELDS[field]] ^= 0x10
    path.write_bytes(data)
    check_miss(model, filled, truth, lines, path)
    assert cached_tokens(model, filled, truth) == 576  # it has been written again


def with_header(data: bytes, **changed: object) -> bytes:
    """Return a file with a changed header and a correct checksum."""
    length = int.from_bytes(data[12:16], "little")
    header = json.loads(data[16 : 16 + length])
    assert changed.keys() <= header.keys()
    text = json.dumps(header | changed).encode()
    content = data[:12] + len(text).to_bytes(4, "little") + text + data[16 + length : -16]
    return content + xxhash.xxh3_128_digest(content)


@pytest.mark.sampled(model=["window"])
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"engine": "0" * 64},
        {"parent": "0" * 64},
        {"start": 0},
        {"start": -256},
        {"tokens": [0] * 256},
        {"tokens": []},
        {"rings": []},
        {"rings": [True] * 9},
        {"recurrent": [300, 300]},
        {"recurrent": [256]},
        {"recurrent": [-1]},
        {"rings": "all"},
        {"tokens": [1.5] * 256},
        {"model": None},
        {"scheme": 3},
    ],
    ids=str,
)
def test_header_of_other_contents_is_a_miss(
    model: Path, filled: Path, truth: np.ndarray, lines: list[str], changed: dict[str, object]
) -> None:
    """Its checksum is correct: each field is checked by itself."""
    path = second_file(filled)
    path.write_bytes(with_header(path.read_bytes(), **changed))
    if changed:
        check_miss(model, filled, truth, lines, path)
    else:
        assert cached_tokens(model, filled, truth) == 576


@pytest.mark.slow
def test_any_flipped_byte_is_a_miss(model: Path, filled: Path, truth: np.ndarray, lines: list[str]) -> None:
    path, random = second_file(filled), Random(0)
    whole = path.read_bytes()
    for count in range(1, 200):
        data = bytearray(whole)
        data[random.randrange(len(data) if count % 2 else 2000)] ^= 1 << random.randrange(8)
        path.write_bytes(data)
        assert cached_tokens(model, filled, truth) <= 256
        assert len(lines) == count


@pytest.mark.sampled(model=["window"])
@pytest.mark.parametrize("length", [0, 5, 16, 300, 5000, -1])
def test_truncated_file_is_a_miss(model: Path, filled: Path, truth: np.ndarray, lines: list[str], length: int) -> None:
    path = second_file(filled)
    path.write_bytes(path.read_bytes()[:length])
    check_miss(model, filled, truth, lines, path)


def test_another_format_is_a_miss(
    model: Path, filled: Path, truth: np.ndarray, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_file, "FORMAT", 2)
    assert cached_tokens(model, filled, truth) <= 256
    assert ["its format is 1, expected 2" in line for line in lines] == [True]


def test_full_disk_costs_one_line(
    model: Path, tmp_path: Path, truth: np.ndarray, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(file: object, **_: object) -> None:
        file.write(b"x" * 1000)  # type: ignore[attr-defined]
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("chunkrt.engine.prefix_cache.disk.write_block", fails)
    with load(model, prefix_cache=tmp_path) as engine:
        for _ in range(3):
            np.testing.assert_array_equal(engine.session().prefill(TOKENS).logits, truth)
        assert engine.stats().cached_tokens > 0
    assert not entries(tmp_path)
    assert lines == [
        f"the prefix cache cannot write to {tmp_path} (No space left on device); it continues in memory",
    ]


def test_unwritable_folder_costs_one_line(
    model: Path, filled: Path, truth: np.ndarray, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(FileLock, "acquire", refuses)
    assert cached_tokens(model, filled, truth) == 576
    with load(model, prefix_cache=filled) as engine:
        engine.session().prefill(TOKENS[::-1])
    assert lines == [f"the prefix cache cannot write to {filled} (Read-only file system); it continues in memory"]


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "Permission denied"), MemoryError(), Timeout("lock")])
def test_failed_write_is_tried_again(
    model: Path, tmp_path: Path, truth: np.ndarray, lines: list[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    with load(model, prefix_cache=tmp_path) as engine:
        with monkeypatch.context() as patched:
            patched.setattr("chunkrt.engine.prefix_cache.disk.write_block", fails)
            engine.session().prefill(TOKENS[::-1])
            wait_until(lambda: lines)
            assert all(map(is_part, entries(tmp_path)))
        # The first prompt is saved in parts: the thread may try its later parts during and after the check.
        engine.session().prefill(TOKENS)
    assert len(lines) == 1
    assert cached_tokens(model, tmp_path, truth) == 576


def test_temporarily_unreadable_file_is_kept(
    model: Path, filled: Path, truth: np.ndarray, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    files = entries(filled)
    with monkeypatch.context() as patched:
        patched.setattr("chunkrt.engine.prefix_cache.disk.read_block", refuses)
        assert cached_tokens(model, filled, truth) == 0
    assert lines == [f"the prefix cache cannot read from {filled} (Too many open files); it continues in memory"]
    assert files.keys() <= entries(filled).keys()
    assert cached_tokens(model, filled, truth) == 576


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not replace an open file")
def test_file_replaced_during_reading_is_read_in_its_old_version(
    model: Path, filled: Path, truth: np.ndarray, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = {path: path.read_bytes() for path in entries(filled)}
    opens = Path.open

    def open_and_replace(path: Path, *arguments: Any, **options: Any) -> IO[Any]:
        file = opens(path, *arguments, **options)
        if data := contents.pop(path, None):
            (filled / "other").write_bytes(data + b"longer")
            (filled / "other").replace(path)
        return file

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", open_and_replace)
        assert cached_tokens(model, filled, truth) == 576
    assert contents == {}
    assert lines == []


def test_writer_thread_starts_after_an_interrupted_start(
    model: Path, tmp_path: Path, truth: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: object) -> None:
        raise KeyboardInterrupt

    with load(model, prefix_cache=tmp_path) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(disk.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.session().prefill(TOKENS[:64])
        engine.session().prefill(TOKENS)
    assert cached_tokens(model, tmp_path, truth) == 576


@pytest.fixture
def blocking(monkeypatch: pytest.MonkeyPatch) -> tuple[Event, Event]:
    """Two events: a disk is read, and it may answer."""
    is_reading, may_read, read = Event(), Event(), disk.read_block

    def reads(*arguments: Any) -> object:
        is_reading.set()
        assert may_read.wait(30), "the thread that lets it read cannot go on"
        return read(*arguments)

    monkeypatch.setattr(disk, "read_block", reads)
    return is_reading, may_read


@pytest.mark.parametrize("act", ["prefill", "score"])
def test_event_loop_continues_while_a_disk_is_read(
    model: Path, filled: Path, truth: np.ndarray, blocking: tuple[Event, Event], act: str
) -> None:
    """The loop itself releases the disk: a look-up within the loop would wait forever."""
    is_reading, may_read = blocking

    async def main(engine: Engine) -> None:
        async with await engine.asession() as session:
            acts = {
                "prefill": lambda: session.aprefill(TOKENS),
                "score": lambda: session.ascore(TOKENS[:-1], TOKENS[-1:]),
            }
            working = asyncio.create_task(acts[act]())
            while not is_reading.is_set():
                await asyncio.sleep(0.01)
                if working.done():
                    break
            assert not working.done()
            may_read.set()
            result = await working
            if act == "prefill":
                assert result.num_cached == 576
                np.testing.assert_array_equal(result.logits, truth)

    with load(model, prefix_cache=filled) as engine:
        asyncio.run(main(engine))
        assert engine.stats().cached_tokens > 0


def test_task_cancelled_while_a_disk_is_read_leaves_the_session_unchanged(
    model: Path, filled: Path, truth: np.ndarray, blocking: tuple[Event, Event]
) -> None:
    is_reading, may_read = blocking

    async def main(engine: Engine) -> None:
        async with await engine.asession() as session:
            working = asyncio.create_task(session.aprefill(TOKENS))
            while not is_reading.is_set():
                await asyncio.sleep(0.01)
            working.cancel()
            await asyncio.sleep(0)
            may_read.set()
            with pytest.raises(asyncio.CancelledError):
                await working
            assert session.position == 0
            result = await session.aprefill(TOKENS)
            assert result.num_cached == 576
            np.testing.assert_array_equal(result.logits, truth)

    with load(model, prefix_cache=filled) as engine:
        asyncio.run(main(engine))


def test_prefixes_queued_before_the_thread_started_are_written_at_the_end(
    model: Path, tmp_path: Path, truth: np.ndarray, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: object) -> None:
        raise RuntimeError("can't start new thread")

    with load(model, prefix_cache=tmp_path) as engine, monkeypatch.context() as patched:
        patched.setattr(disk.Thread, "start", fails)
        np.testing.assert_array_equal(engine.session().prefill(TOKENS).logits, truth)
    assert len(lines) == 1
    assert cached_tokens(model, tmp_path, truth) == 576


def test_prompt_beyond_the_waiting_bytes_is_not_written(
    model: Path, tmp_path: Path, truth: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, writes = Event(), threading.Semaphore(0)

    def waits(*arguments: object, **options: object) -> None:
        writes.release()
        assert may_write.wait(60)
        block_file.write_block(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("chunkrt.engine.prefix_cache.disk.write_block", waits)
    monkeypatch.setattr(disk, "MOST_WAITING_BYTES", 1)
    monkeypatch.setattr(disk, "MOST_NAMES", 2)
    with load(model, prefix_cache=tmp_path) as engine:
        engine.session().prefill(TOKENS)
        assert writes.acquire(timeout=60)
        engine.session().prefill(TOKENS[::-1])  # there is no room for it
        may_write.set()
        later = iter(range(200, 500))
        wait_until(lambda: engine.session().prefill(TOKENS[next(later) :]).num_tokens and len(entries(tmp_path)) > 3)
    written = {read_header(path).tokens[:32] for path in entries(tmp_path)}
    assert tuple(TOKENS[::-1][:32]) not in written
    assert cached_tokens(model, tmp_path, truth) >= 512


def test_close_does_not_wait_for_nodes_that_are_saved_meanwhile(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the first writing thread must not end a second one in its place."""
    saved, save, may_write, is_closing = list[tuple[Any, ...]](), disk.DiskStore.save, Event(), Event()

    class Writer(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            is_closing.set()
            super().join(timeout)

    def note(*arguments: Any) -> None:
        saved.append(arguments)
        save(*arguments)

    def waits(*arguments: Any, **options: Any) -> None:
        assert may_write.wait(60)
        block_file.write_block(*arguments, **options)

    monkeypatch.setattr(disk, "Thread", Writer)
    monkeypatch.setattr(disk.DiskStore, "save", note)
    monkeypatch.setattr(disk, "write_block", waits)
    with load(model, prefix_cache=tmp_path) as engine:
        engine.session().prefill(TOKENS)
        store, *others = saved[0]
        closing = threading.Thread(target=store.close, daemon=True)
        closing.start()
        assert is_closing.wait(60)
        save(store, *others)
        may_write.set()
        closing.join(60)
        assert not closing.is_alive()


def test_prefix_cache_that_is_not_a_folder_is_rejected(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="which is not a folder; choose memory, disk, off or a folder"):
        load(model, prefix_cache=tmp_path / "file")


def test_budget_holds_and_recently_used_files_stay(model: Path, tmp_path: Path) -> None:
    random = Random(0)
    others = [[random.randrange(60) for _ in range(300)] for _ in range(6)]
    with load(model, prefix_cache=tmp_path, **SMALL) as engine:
        for prompt in others:
            engine.session().prefill(prompt)
    files = entries(tmp_path)
    assert 0 < sum(stat.st_size for stat in files.values()) <= BUDGET
    with load(model, prefix_cache=tmp_path, **SMALL) as engine:
        assert engine.session().prefill(others[-1]).num_cached >= 256
        assert engine.session().prefill(others[0]).num_cached == 0


def test_other_files_in_the_folder_are_ignored(model: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x" * 2 * BUDGET)
    with load(model, prefix_cache=tmp_path, **SMALL) as engine:
        engine.session().prefill(TOKENS)
    assert len(entries(tmp_path)) > 0
    folder.clear(tmp_path)
    assert not entries(tmp_path)
    assert (tmp_path / "thesis.txt").exists()


PROGRAM = """
import json, os, signal, sys, threading
from itertools import count
from random import Random
import chunkrt
from chunkrt.engine.prefix_cache import block_file, folder

model, cache, options, *numbers = sys.argv[1:]
seed, rounds, last_line = map(int, numbers)
random, lines = Random(seed), count(1)

def trace(frame, event, argument):
    if frame.f_code.co_filename not in (folder.__file__, block_file.__file__):
        return None
    if event == "line" and next(lines) == last_line:
        os.kill(os.getpid(), signal.SIGKILL)
    return trace

if last_line:
    threading.settrace(trace)  # the thread that writes
with chunkrt.load(
    model, npu="native", scheme="w8a8-dynamic", threads=1, prefix_cache=cache, **json.loads(options)
) as engine:
    print("ready", flush=True)
    for _ in range(rounds):
        start = random.randrange(4)
        prompt = [(7 * i + start) % 60 for i in range(random.randrange(100, 600))]
        with engine.session() as session:
            session.prefill(prompt)
print("done", flush=True)
"""


MOST_LINES = 1000
"""Lines in which a process writes a few files."""


def start(model: Path, cache: Path, seed: int, rounds: int, last_line: int = 0) -> subprocess.Popen[str]:
    """Start a process that writes files. If `last_line` is not 0, it kills itself at that line of its writing."""
    arguments = [model, cache, json.dumps(SMALL), seed, rounds, last_line]
    return subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )


def assert_sound(model: Path, cache: Path) -> None:
    """Check that the budget holds, no file is damaged, and hits give the right logits."""
    assert sum(stat.st_size for stat in entries(cache).values()) <= BUDGET
    for begin in range(4):
        prompt = [(7 * i + begin) % 60 for i in range(520)]
        with load(model, prefix_cache=cache, **SMALL) as engine, load(model, attention_math="float32") as plain:
            found, truth = engine.session().prefill(prompt), plain.session().prefill(prompt)
            np.testing.assert_array_equal(found.logits, truth.logits)
    assert not any(map(is_part, entries(cache)))
    assert sum(stat.st_size for stat in entries(cache).values()) <= BUDGET


@pytest.mark.sampled(model=["window"])
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
@pytest.mark.parametrize("times", [1, pytest.param(200, marks=pytest.mark.slow)])
def test_process_killed_while_it_writes(model: Path, tmp_path: Path, lines: list[str], times: int) -> None:
    """Half of the processes are killed after a random time, and half at a random line, because a slow machine writes
    nothing in that time.
    """
    random, num_half_written, num_whole = Random(times), 0, 0
    for seed in range(times):
        last_line = random.randint(1, MOST_LINES) if seed % 2 else 0
        with start(model, tmp_path, seed, 10**6, last_line) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                if last_line:
                    process.wait(timeout=120)
                else:
                    time.sleep(random.uniform(0, 0.3))
            finally:
                process.kill()  # it would not end by itself
        left = entries(tmp_path)
        assert sum(stat.st_size for stat in left.values()) <= BUDGET
        num_half_written += any(map(is_part, left))
        num_whole += not all(map(is_part, left))
        if seed % 20 == times % 20 or seed == times - 1:
            assert_sound(model, tmp_path)
    print(f"{times} killed: {num_half_written} left a half-written file, {num_whole} found or left whole ones")
    assert times < 200 or (num_half_written > 0 and num_whole > 0)
    assert lines == []


@pytest.mark.sampled(model=["caches"])
def test_two_processes_share_a_folder(model: Path, tmp_path: Path, lines: list[str]) -> None:
    processes = [start(model, tmp_path, seed, 40) for seed in range(2)]
    for process in processes:
        out, _ = process.communicate(timeout=120)
        assert (process.returncode, out) == (0, "ready\ndone\n")
    assert_sound(model, tmp_path)
    assert lines == []
