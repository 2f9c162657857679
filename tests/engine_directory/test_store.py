"""A damaged store is reported for any damage; it never returns missing arrays."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkrt.engine_directory.store import StoredArray, WeightStore
from chunkrt.engine_directory.weights import WeightWriter
from chunkrt.errors import ModelError

PACKED = StoredArray(name="linear", dtype="int8", shape=(2, 1, 16, 4), logical_shape=(3, 20))
SCALE = StoredArray(name="linear.scale", dtype="float32", shape=(20,), logical_shape=(20,))
TABLE = StoredArray(name="table", dtype="float16", shape=(5, 3), logical_shape=(5, 3))
ENTRIES = (PACKED, SCALE, TABLE)


def write(path):
    with path.open("wb") as file:
        writer = WeightWriter(file, ENTRIES)
        for entry in ENTRIES:
            writer.write(np.arange(np.prod(entry.shape)).reshape(entry.shape).astype(entry.dtype))
    return path


@pytest.fixture
def stored(tmp_path):
    return write(tmp_path / "weights.safetensors")


def with_header(path, change):
    """Rewrite the header with the result of `change`, or with its change in place."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = json.dumps(change(header) or header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return path


def test_store_returns_written_arrays(stored):
    store = WeightStore.open(stored)
    store.check(ENTRIES)
    np.testing.assert_array_equal(store.array("table"), np.arange(15, dtype=np.float16).reshape(5, 3))
    packed, scale = store.packed_linear("linear")
    assert (packed.shape, scale.shape) == ((2, 1, 16, 4), (20,))
    assert store.linear("linear")[0].shape == (3, 20)
    assert store.num_bytes == 128 + 80 + 30
    with pytest.raises(ValueError, match="read-only"):
        store.array("table")[0] = 1


@given(st.integers(0, 1 << 12))
def test_a_truncated_store_is_damaged(tmp_path_factory, size):
    stored = write(tmp_path_factory.mktemp("store") / "weights")
    data = stored.read_bytes()
    stored.write_bytes(data[: size % len(data)])
    with pytest.raises(ModelError, match="is damaged"):
        WeightStore.open(stored)


@pytest.mark.parametrize(
    "damage",
    [
        lambda header: [1],
        lambda header: "header",
        lambda header: {"__metadata__": None, "table": header["table"]},
        lambda header: header.pop("__metadata__") and None,
        lambda header: header["__metadata__"].update(linear="[3"),
        lambda header: header["__metadata__"].update(linear=3),
        lambda header: header["table"].update(dtype="F64"),
        lambda header: header["table"].update(shape=[5, 1 << 60]),
        lambda header: header["table"].update(shape=[-5, 3]),
        lambda header: header["table"].update(shape=[-1]),
        lambda header: header["table"].update(shape=None),
        lambda header: header["table"].update(shape=["5", 3]),
        lambda header: header["table"].update(data_offsets=[1 << 40, 1 << 41]),
        lambda header: header["table"].update(data_offsets=[-64, 0]),
        lambda header: header["table"].update(data_offsets=[]),
        lambda header: header.update(table=[]),
    ],
)
def test_store_refuses_invalid_headers(stored, damage):
    with pytest.raises(ModelError, match=r"weights.safetensors is damaged \(.+\); delete its folder and compile"):
        WeightStore.open(with_header(stored, damage))


def test_a_header_of_an_impossible_length(stored):
    stored.write_bytes((1 << 63).to_bytes(8, "little") + stored.read_bytes()[8:])
    with pytest.raises(ModelError, match="is damaged"):
        WeightStore.open(stored)


def test_store_refuses_a_missing_file(tmp_path):
    with pytest.raises(ModelError, match=r"is damaged \(.*No such file"):
        WeightStore.open(tmp_path / "weights")


def test_a_file_that_cannot_be_read_is_not_called_damaged(tmp_path):
    (tmp_path / "weights").mkdir()
    with pytest.raises(ModelError, match=r"^cannot read \S+weights: (Is a directory|Permission denied)$"):
        WeightStore.open(tmp_path / "weights")


@pytest.mark.skipif(sys.platform != "win32", reason="other systems do not lock files that are open")
def test_a_file_that_another_program_uses_is_not_called_damaged(stored):
    import ctypes

    read, open_existing = 0x80000000, 3  # GENERIC_READ, OPEN_EXISTING
    create = ctypes.WinDLL("kernel32").CreateFileW
    create.restype = ctypes.c_void_p
    handle = create(str(stored), read, 0, None, open_existing, 0, None)
    try:
        with pytest.raises(ModelError, match=r"a program uses the file; close it first$"):
            WeightStore.open(stored)
    finally:
        ctypes.WinDLL("kernel32").CloseHandle(ctypes.c_void_p(handle))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda header: header.pop("linear.scale") and None, r"linear.scale is missing, expected float32 \[20\]"),
        (lambda header: header["table"].update(shape=[3, 5]), r"table is float16 \[3, 5\], expected float16 \[5, 3\]"),
        (lambda header: header["table"].update(dtype="I8"), r"table is int8 \[5, 3\], expected float16"),
        (lambda header: header["__metadata__"].update(linear="[4, 20]"), r"linear is"),
    ],
)
def test_store_refuses_arrays_of_another_plan(stored, damage, message):
    store = WeightStore.open(with_header(stored, damage))
    with pytest.raises(ModelError, match=message):
        store.check(ENTRIES)


def resident_bytes(path):
    """Return the resident bytes of a mapped file in this process."""
    mapping, found = "", 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first:
            mapping = rest[-1]
        elif first == "Rss:" and mapping == str(path):
            found += 1024 * int(rest[0])
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not report which pages are in memory")
def test_store_releases_pages_and_reads_them_again(tmp_path):
    path, size = tmp_path / "weights.safetensors", 2**23
    values = np.arange(size, dtype=np.int8)
    with path.open("wb") as file:
        entry = StoredArray(name="large", dtype="int8", shape=(size,), logical_shape=(size,))
        WeightWriter(file, [entry]).write(values)
    store = WeightStore.open(path)
    np.testing.assert_array_equal(store.array("large"), values)
    assert resident_bytes(path) > size // 2
    store.forget_pages()
    assert resident_bytes(path) == 0
    np.testing.assert_array_equal(store.array("large"), values)
