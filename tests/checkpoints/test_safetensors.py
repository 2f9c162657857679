"""Safetensors folders: written by the safetensors package, compared with the original values, then damaged."""

import json
import struct
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chunkrt.checkpoints.checkpoint import open_checkpoint
from chunkrt.checkpoints.safetensors import SafetensorsSource
from chunkrt.errors import ModelError, UnsupportedModelError

ALLOCATION_BOUND_BYTES = 1 << 20
DAMAGE = st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=4)

CONFIG = {"model_type": "llama", "hidden_size": 8, "rope_theta": 1e4}


def write_folder(folder, tensors=None, config=None):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    if tensors is not None:
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


def write_shards(folder, shards, weight_map):
    write_folder(folder)
    for name, tensors in shards.items():
        safetensors.numpy.save_file(tensors, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_raw(folder, header, payload=b""):
    """Write a folder whose model.safetensors has this header: a JSON value, or the text itself."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    write_folder(folder)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + payload)
    return folder


def entry(start, end, shape=None, dtype="F32"):
    return {
        "dtype": dtype,
        "shape": [(end - start) // 4] if shape is None else shape,
        "data_offsets": [start, end],
    }


@pytest.mark.parametrize(
    ("dtype", "stored_as"),
    [(np.float32, "F32"), (np.float64, "F64"), (np.float16, "F16"), (ml_dtypes.bfloat16, "BF16")],
)
def test_every_float_type_is_read_exactly(tmp_path, dtype, stored_as):
    values = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32).astype(dtype)
    source = open_checkpoint(write_folder(tmp_path / "m", {"a.weight": values, "odd": values[:1, :1].copy()}))
    assert source.info("a.weight").shape == (3, 5)
    assert source.info("a.weight").stored_as == stored_as
    read = source.read("a.weight")
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, values.astype(np.float32))
    np.testing.assert_array_equal(source.read("odd"), values[:1, :1].astype(np.float32))


def test_tensor_at_an_odd_offset_is_read_aligned(tmp_path):
    header = {"a": entry(0, 3, [3], "U8"), "b": entry(3, 11)}
    source = SafetensorsSource(write_raw(tmp_path / "m", header, bytes(3) + struct.pack("<2f", 1.5, -2.0)))
    assert source.read("b").tolist() == [1.5, -2.0]
    assert source.read("b").flags.aligned


def test_scalars_and_empty_tensors(tmp_path):
    tensors = {"scalar": np.array(2.5, np.float32), "empty": np.zeros((0, 4), np.float32)}
    source = SafetensorsSource(write_folder(tmp_path / "m", tensors))
    assert source.read("scalar") == 2.5
    assert source.read("empty").shape == (0, 4)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64, np.bool_])
def test_integers_are_refused_as_weights(tmp_path, dtype):
    source = SafetensorsSource(write_folder(tmp_path / "m", {"a.qweight": np.ones(4, dtype)}))
    assert source.names() == ["a.qweight"]
    with pytest.raises(UnsupportedModelError, match=r"a\.qweight is stored as .*F64, F32, F16 or BF16"):
        source.read("a.qweight")


def test_float64_that_float32_cannot_hold_is_an_error(tmp_path):
    source = SafetensorsSource(write_folder(tmp_path / "m", {"a": np.array([1e300])}))
    with pytest.raises(ModelError, match="exceed float32"):
        source.read("a")


def test_shards_are_one_checkpoint(tmp_path):
    first, second = {"a": np.ones(2, np.float32)}, {"b": np.zeros(3, np.float32)}
    source = SafetensorsSource(
        write_shards(
            tmp_path / "m",
            {"model-1.safetensors": first, "model-2.safetensors": second},
            {"a": "model-1.safetensors", "b": "model-2.safetensors"},
        )
    )
    assert source.names() == ["a", "b"]
    assert source.read("a").tolist() == [1, 1]
    assert source.read("b").tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("shards", "weight_map", "message"),
    [
        ({"1": "a"}, {"a": "1", "b": "2"}, "cannot read"),
        ({"1": "a", "2": "a"}, {"a": "1", "b": "2"}, "a is in two files"),
        ({"1": "a"}, {"a": "1", "b": "1"}, "maps b to 1"),
        ({"1": "a", "2": "b"}, {"a": "2", "b": "1"}, "maps a to 2"),
        ({}, {"a": "../outside.safetensors"}, "not a plain file name"),
        ({}, {"a": 5}, "not a plain file name"),
        ({}, {}, "no weight_map"),
    ],
)
def test_index_that_its_shards_contradict_is_a_model_error(tmp_path, shards, weight_map, message):
    tensors = {file: {name: np.ones(2, np.float32)} for file, name in shards.items()}
    with pytest.raises(ModelError, match=message):
        SafetensorsSource(write_shards(tmp_path / "m", tensors, weight_map))


@pytest.mark.parametrize(
    ("header", "payload_bytes", "message"),
    [
        (b"{", 0, "JSON"),
        (b"[]", 0, "not an object"),
        (b"[" * 100_000, 0, "JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", 0, "JSON"),
        (b'{"a": {}, "a": {}}', 0, "'a' appears twice"),
        ({"a": 1}, 0, "entry of a"),
        ({"a": {"dtype": "F32", "shape": [1]}}, 4, "entry of a"),
        ({"a": entry(0, 4, dtype="F1")}, 4, "data type 'F1'"),
        ({"a": entry(0, 4, [-1])}, 4, "impossible shape"),
        ({"a": entry(0, 4, [True])}, 4, "impossible shape"),
        ({"a": entry(0, 4, [1] * 9)}, 4, "impossible shape"),
        ({"a": entry(0, 8)}, 4, "outside the file's 4 data bytes"),
        ({"a": entry(4, 0, [1])}, 4, "outside the file's 4 data bytes"),
        ({"a": entry(0, 10**18)}, 4, "outside the file's 4 data bytes"),
        ({"a": entry(0, 4, [10**9, 10**9])}, 4, r"a has 4 bytes, but F32 \[1000000000, 1000000000\] needs"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "a and b overlap at data offset 4"),
    ],
)
def test_hostile_header_is_a_model_error(tmp_path, header, payload_bytes, message):
    folder = write_raw(tmp_path / "m", header, bytes(payload_bytes))
    with pytest.raises(ModelError, match=message):
        SafetensorsSource(folder)


def test_header_longer_than_the_file_is_a_model_error(tmp_path):
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 10**18) + b"{}")
    with pytest.raises(ModelError, match="claims 1000000000000000000 bytes, the file has 10"):
        SafetensorsSource(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [({"hidden_size": 8}, "no model_type"), ({"model_type": 3}, "no model_type"), ([], "not an object")],
)
def test_config_without_a_model_type_is_a_model_error(tmp_path, config, message):
    with pytest.raises(ModelError, match=message):
        SafetensorsSource(write_folder(tmp_path / "m", {"a": np.ones(1)}, config))


def test_config_is_shown_unchanged(tmp_path):
    assert SafetensorsSource(write_folder(tmp_path / "m", {"a": np.ones(1)})).config == CONFIG


def test_invalid_checkpoint_reports_the_expected_formats(tmp_path):
    with pytest.raises(ModelError, match="cannot read"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"has no config\.json; expected a GGUF file, a Hugging Face folder"):
        open_checkpoint(tmp_path)
    (tmp_path / "weights.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(ModelError, match=r"no config\.json; name the file itself: weights\.gguf"):
        open_checkpoint(tmp_path)
    with pytest.raises(ModelError, match="not a GGUF file"):
        open_checkpoint(tmp_path / "weights.gguf")
    with pytest.raises(ModelError, match=r"has no weights: expected model\.safetensors or pytorch_model\.bin"):
        open_checkpoint(write_folder(tmp_path / "m"))
    with pytest.raises(ModelError, match="has no tensor b"):
        open_checkpoint(write_folder(tmp_path / "m", {"a": np.ones(1)})).read("b")
    with pytest.raises(ModelError, match="name its folder instead"):
        open_checkpoint(tmp_path / "m" / "model.safetensors")


@given(damage=DAMAGE, kept=st.floats(0, 1))
@settings(
    max_examples=settings().max_examples * 2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_damage_gives_values_or_a_model_error_and_bounded_memory(tmp_path, damage, kept):
    tensors = {"a.weight": np.ones((3, 5), np.float32), "b.weight": np.zeros(7, np.float16)}
    folder = write_folder(tmp_path / "m", tensors)
    damaged = bytearray((folder / "model.safetensors").read_bytes())
    for place, value in damage:
        damaged[place % len(damaged)] = value
    (folder / "model.safetensors").write_bytes(damaged[: int(kept * len(damaged))])
    tracemalloc.start()
    try:
        source = SafetensorsSource(folder)
        for name in source.names():
            source.read(name)
    except ModelError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < ALLOCATION_BOUND_BYTES
