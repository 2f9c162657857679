"""State: capacity, rewinding, forking, and files that are complete or rejected."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_backend import CONTEXT, make_plan
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from chunkrt.errors import ConfigError, ModelError
from chunkrt.graph.plan import Tensor
from chunkrt.runtime.state import State
from chunkrt.runtime.state_tensors import CacheDtype

PLAN = make_plan()


def filled(num_tokens: int, capacity: int = 32, dtype: CacheDtype = "float32", seed: int = 0) -> State:
    """Return a state with noise everywhere, of which `num_tokens` positions count."""
    state = State(PLAN, capacity, dtype)
    random = np.random.default_rng(seed)
    for array in state.tensors.values():
        array[:] = random.normal(size=array.shape)
    state.advance(num_tokens)
    return state


def prefixes(state: State) -> list[list[float]]:
    return [array[:, : state.position].ravel().tolist() for array in state.tensors.values()]


@pytest.mark.parametrize(("dtype", "item_bytes"), [("float32", 4), ("float16", 2)])
def test_caches_are_zero_aligned_and_of_the_requested_type(dtype: CacheDtype, item_bytes: int) -> None:
    state = State(PLAN, 20, dtype)
    assert list(state.tensors) == ["cache.0", "cache.1"]
    for array in state.tensors.values():
        assert array.shape == (1, 20, 3)
        assert array.dtype == dtype
        assert array.ctypes.data % 64 == 0
        assert not array.any()
    assert state.num_bytes == 2 * 20 * 3 * item_bytes
    assert state.position == 0


def test_int8_caches_have_room_for_the_scales() -> None:
    state = State(PLAN, 20, "int8")
    assert {(array.shape, array.dtype.name) for array in state.tensors.values()} == {((1, 20, 3 + 4), "int8")}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which pages of an array are there")
def test_memory_is_reserved_and_not_committed() -> None:
    tensor = Tensor(name="cache.0", dtype="float32", shape=(64, "P", 128), kind="state")
    plan = replace(PLAN, context_length=2**15, tensors={**PLAN.tensors, "cache.0": tensor})
    state = State(plan, 2**15)
    assert state.num_bytes > 2**30
    cache = state.tensors["cache.0"]
    assert committed_pages(cache) == 0
    cache[7, 100] = 1
    assert 1 <= committed_pages(cache) <= 2**21 // mmap.PAGESIZE  # one page, or a huge one


AFTER_MUCH_WAS_FREED = """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD: freed memory stays with the process
    assert libc.mallopt(parameter, 2**31 - 1)
libc.free(libc.malloc(3 * 2**29))
import test_state
test_state.test_memory_is_reserved_and_not_committed()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the test configures glibc to keep freed memory")
def test_memory_is_not_taken_from_freed_blocks() -> None:
    command = [sys.executable, "-c", AFTER_MUCH_WAS_FREED]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    finished = subprocess.run(command, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


def committed_pages(array: NDArray[np.float32]) -> int:
    """Return the number of committed pages completely inside the array."""
    first = -(-array.ctypes.data // mmap.PAGESIZE)
    count = (array.ctypes.data + array.nbytes) // mmap.PAGESIZE - first
    found = (ctypes.c_ubyte * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    start, size = ctypes.c_void_p(first * mmap.PAGESIZE), ctypes.c_size_t(count * mmap.PAGESIZE)
    assert libc.mincore(start, size, found) == 0, ctypes.get_errno()
    return int((np.frombuffer(found, np.uint8) & 1).sum())


@pytest.mark.parametrize("capacity", [0, -1, CONTEXT + 1])
def test_capacity_outside_the_context_is_rejected(capacity: int) -> None:
    with pytest.raises(ConfigError, match=f"a state cannot hold {capacity} positions; the model takes 1 to {CONTEXT}"):
        State(PLAN, capacity)


def test_unknown_dtype_is_rejected() -> None:
    with pytest.raises(ConfigError, match="caches cannot be 'float64'"):
        State(PLAN, 8, "float64")  # type: ignore[arg-type]


def test_cache_of_another_shape_is_rejected() -> None:
    odd = Tensor(name="cache.0", dtype="float32", shape=("P", 3), kind="state")
    plan = replace(PLAN, tensors={**PLAN.tensors, "cache.0": odd})
    with pytest.raises(ModelError, match=r"state 'cache.0' has shape \('P', 3\)"):
        State(plan, 8)


def test_rewind_goes_back_and_rejects_other_positions() -> None:
    state = filled(10)
    state.rewind(10)
    state.rewind(4)
    assert state.position == 4
    for position in (5, -1):
        with pytest.raises(ConfigError, match=f"cannot rewind to position {position}; .* 0 to 4"):
            state.rewind(position)
    assert state.position == 4


def test_advance_stops_at_the_capacity() -> None:
    state = filled(30)
    with pytest.raises(ConfigError, match="3 tokens do not fit at position 30 of a state of 32"):
        state.advance(3)
    state.advance(2)
    assert state.position == 32


def test_fork_has_the_prefix_and_its_own_memory() -> None:
    state = filled(10)
    fork = state.fork()
    assert (fork.position, fork.capacity, fork.dtype) == (10, 32, "float32")
    assert prefixes(fork) == prefixes(state)
    for name, array in fork.tensors.items():
        assert not array[:, 10:].any()
        assert not np.shares_memory(array, state.tensors[name])


@pytest.mark.parametrize("num_tokens", [0, 1, 32])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_load_restores_the_prefix(tmp_path: Path, num_tokens: int, dtype: CacheDtype) -> None:
    state = filled(num_tokens, dtype=dtype)
    state.save(tmp_path / "prefix.state")
    for capacity in (32, 64):
        other = filled(3, capacity, dtype, seed=1)
        other.load(tmp_path / "prefix.state")
        assert other.position == num_tokens
        assert prefixes(other) == prefixes(state)
    assert [path.name for path in tmp_path.iterdir()] == ["prefix.state"]


def test_a_saved_file_is_numpys_own_format(tmp_path: Path) -> None:
    state = filled(5)
    state.save(tmp_path / "prefix.npz")
    with np.load(tmp_path / "prefix.npz") as file:
        assert int(file["position"]) == 5
        np.testing.assert_array_equal(file["cache.1"], state.tensors["cache.1"][:, :5])


def test_save_to_an_unwritable_path_fails(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot save the state to"):
        filled(5).save(tmp_path / "missing" / "file")


def test_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "prefix"
    filled(5).save(path)
    whole = path.read_bytes()

    def fill_the_disk(*args: object, **kwargs: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("numpy.lib.format.write_array", fill_the_disk)
    with pytest.raises(ConfigError, match="no space left"):
        filled(9).save(path)
    assert [(entry, entry.read_bytes()) for entry in tmp_path.iterdir()] == [(path, whole)]


def check_refused(state: State, path: Path, message: str) -> None:
    position, before = state.position, prefixes(state)
    with pytest.raises(ModelError, match=message):
        state.load(path)
    assert state.position == position
    assert prefixes(state) == before


def test_files_that_do_not_fit_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "prefix"
    filled(20).save(path)
    check_refused(filled(3, capacity=16), path, "it contains 20 positions, but the capacity of the state is 16")
    check_refused(filled(3, dtype="float16"), path, r"float32 \(1, 20, 3\), not float16")
    check_refused(State(make_plan(3), 32), path, "its 5 tensors do not match the 6 tensors of this decoder; .*cache.2")
    wide = Tensor(name="cache.1", dtype="float32", shape=(2, "P", 3), kind="state")
    plan = replace(PLAN, tensors={**PLAN.tensors, "cache.1": wide})
    check_refused(State(plan, 32), path, r"'cache.1' is float32 \(1, 20, 3\), not float32 \(2, 20, 3\)")
    check_refused(filled(3), tmp_path / "missing", "cannot load a state from .*No such file")
    check_refused(filled(3), tmp_path, "cannot load a state from")
    path.write_text("hello")
    check_refused(filled(3), path, "not a zip file")


def with_member(path: Path, change: Callable[[bytes], bytes]) -> Path:
    """Write a file of 20 positions with a change in its member cache.1."""
    filled(20).save(path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members["cache.1.npy"] = change(members["cache.1.npy"])
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def test_header_that_exceeds_the_file_is_rejected(tmp_path: Path) -> None:
    path = with_member(tmp_path / "prefix", lambda data: data[:-4])
    check_refused(filled(3), path, "'cache.1' has 236 bytes")


@pytest.mark.parametrize("num_bytes", [1 << 26, pytest.param(1 << 28, marks=pytest.mark.slow)])
def test_file_that_would_inflate_is_rejected_first(tmp_path: Path, num_bytes: int) -> None:
    path = with_member(tmp_path / "prefix", lambda data: data + bytes(num_bytes))
    tracemalloc.start()
    check_refused(filled(3), path, "inflate to more than 1 times its size")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 22


def test_duplicate_name_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "prefix"
    filled(20).save(path)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("cache.1.npy", archive.read("cache.1.npy"))
    check_refused(filled(3), path, "a name occurs twice in it")


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (1, 20, 3",  # does not end: TokenError
        b"{'descr': 5, 'fortran_order': False, 'shape': (1, 20, 3), }",
        b"{'descr': [('a', 1, 2, 3, 4)], 'fortran_order': False, 'shape': (1, 20, 3), }",
        b"{'descr': '<f4', 'fortran_order': 0, 'shape': 7, }",
        b"(" * 9000,
        b"\x00" * 100,
    ],
    ids=["endless", "number", "fields", "types", "deep", "zeros"],
)
def test_invalid_header_is_rejected(tmp_path: Path, header: bytes) -> None:
    start = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little")
    path = with_member(tmp_path / "prefix", lambda data: start + header + data[-240:])
    check_refused(filled(3), path, "cannot load a state from")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_are_rejected_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "prefix"
    saved = filled(4)
    saved.save(path)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans(), label="truncate"):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(content))
    state = filled(3, seed=1)
    before = prefixes(state)
    try:
        state.load(path)
    except ModelError:
        assert (state.position, prefixes(state)) == (3, before)
    else:
        assert (state.position, prefixes(state)) == (4, prefixes(saved))
