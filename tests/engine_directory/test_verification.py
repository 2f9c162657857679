"""Weights that are too large to be hashed before a model is loaded: no run uses them before they are verified."""

import json
import shutil
import signal
import sys
import threading
from random import Random

import pytest
from fixture_checkpoints import checkpoint
from gates import wait_until_waiting

import chunkrt
from chunkrt.engine_directory import manifest, verification
from chunkrt.engine_directory.manifest import FAST_HASH, MANIFEST, PLAN, WEIGHTS, fingerprint
from chunkrt.engine_directory.verification import Verification
from chunkrt.errors import ConfigError, ModelError

MESSAGE = r"weights\.safetensors has changed since the model was compiled; compile it again"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An engine directory whose weights count as large, in a cache of its own."""
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))
    with chunkrt.load(checkpoint("llama_gqa")) as engine:
        shutil.copytree(engine.folder, tmp_path / "engine")
    path = tmp_path / "engine" / PLAN
    limit = path.stat().st_size
    assert (tmp_path / "engine" / WEIGHTS).stat().st_size > limit
    for module in (manifest, verification):
        monkeypatch.setattr(module, "HASHED_WHEN_READ", limit)
    return tmp_path / "engine"


def record_fast_hash(folder):
    about = json.loads((folder / MANIFEST).read_text())
    about["files"][WEIGHTS][1] = manifest.digest(folder / WEIGHTS, FAST_HASH)
    (folder / MANIFEST).write_text(json.dumps(about))


@pytest.mark.parametrize("is_fast", [False, True], ids=["SHA-256", "XXH3"])
def test_whole_weights_run(folder, is_fast):
    if is_fast:
        record_fast_hash(folder)
    with chunkrt.load(folder) as engine:
        engine.session().prefill([1, 2, 3])


@pytest.mark.parametrize("is_fast", [False, True], ids=["SHA-256", "XXH3"])
@pytest.mark.parametrize("seed", range(5))
def test_no_run_uses_a_byte_that_was_flipped(folder, is_fast, seed):
    if is_fast:
        record_fast_hash(folder)
    content = bytearray((folder / WEIGHTS).read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    content[Random(seed).randrange(header, len(content))] ^= 1 << seed
    (folder / WEIGHTS).write_bytes(content)
    with chunkrt.load(folder) as engine:
        session = engine.session()
        for _ in range(2):
            with pytest.raises(ModelError, match=MESSAGE):
                session.prefill([1, 2, 3])


def test_large_files_are_recorded_with_the_fast_hash(tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path))
    monkeypatch.setattr(manifest, "HASHED_WHEN_READ", 1000)
    with chunkrt.load(checkpoint("llama_gqa"), scheme="float", npu="reference") as engine:
        found = engine.loaded.manifest.files[WEIGHTS]
        assert found == (
            (engine.folder / WEIGHTS).stat().st_size,
            manifest.digest(engine.folder / WEIGHTS, FAST_HASH),
        )
        assert found[1].startswith("xxh3_128:")


def test_digests_are_those_of_the_functions(tmp_path):
    (tmp_path / "file").write_bytes(b"a")
    of_a = "a96faf705af16834e6c632b61e964e1f"  # XXH3's own test vector
    assert manifest.digest(tmp_path / "file", FAST_HASH) == f"xxh3_128:{of_a}"
    assert manifest.digest(tmp_path / "file", "") == fingerprint(tmp_path / "file")[1]


def test_closing_does_not_wait_for_the_verification(folder, monkeypatch):
    begun = []

    def slow(path, algorithm, is_stopped):
        begun.append(path)
        while not is_stopped():
            pass
        return ""

    monkeypatch.setattr(verification, "digest", slow)
    engine = chunkrt.load(folder)
    engine.close()
    assert begun


def test_failed_load_stops_the_verification(folder, monkeypatch):
    ended = []

    def slow(path, algorithm, is_stopped):
        while not is_stopped():
            pass
        ended.append(path)
        return ""

    monkeypatch.setattr(verification, "digest", slow)
    with pytest.raises(ConfigError, match="context_length"):
        chunkrt.load(folder, context_length=10**9)
    assert ended


@pytest.mark.skipif(sys.platform == "win32", reason="a thread cannot be sent a signal")
def test_verification_wait_can_be_repeated_after_an_interrupt(folder, monkeypatch):
    """This holds for any thread that gets the signal: the wait reports the real error instead of success."""
    here, goes_on = threading.get_ident(), threading.Event()

    def held(path, algorithm, is_stopped):
        wait_until_waiting(here, Verification.wait)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        assert goes_on.wait(60)
        return "another"

    monkeypatch.setattr(verification, "digest", held)
    verified = Verification(folder, manifest.read_manifest(folder))
    with pytest.raises(KeyboardInterrupt):
        verified.wait()
    assert not verified.is_done
    goes_on.set()
    with pytest.raises(ModelError, match=MESSAGE):
        verified.wait()


def test_verification_raises_unexpected_errors_of_its_thread(folder, monkeypatch):
    def fail(*_):
        raise MemoryError("no room for a piece")

    monkeypatch.setattr(verification, "digest", fail)
    with chunkrt.load(folder) as engine, pytest.raises(MemoryError, match="no room for a piece"):
        engine.session().prefill([1, 2, 3])


def test_without_large_files_there_is_no_thread(monkeypatch):
    monkeypatch.setattr(verification, "Thread", None)
    with chunkrt.load(checkpoint("llama_gqa")) as engine:
        engine.session().prefill([1, 2, 3])
