"""Pickled checkpoints that PyTorch wrote (tests/parity/make_pickled_fixture.py), and files that are none."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chunkrt.checkpoints.checkpoint import open_checkpoint
from chunkrt.errors import ModelError, UnsupportedModelError

FOLDER = Path(__file__).parents[1] / "data" / "pickled"


def folder_of(path: Path, described: object, *, compressed: bool = False) -> Path:
    """Write a folder whose pickle contains an object."""
    (path / "config.json").write_text('{"model_type": "llama"}')
    method = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path / "pytorch_model.bin", "w", method) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(described))
    return path


def test_tensors_equal_those_of_pytorch() -> None:
    source, expected = open_checkpoint(FOLDER), np.load(FOLDER / "expected.npz")
    assert set(source.names()) == set(expected.files)
    for name in source.names():
        assert source.info(name).shape == expected[name].shape
        np.testing.assert_array_equal(source.read(name), expected[name])


def test_shards_are_found_by_their_index(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "config.json", tmp_path)
    shutil.copy(FOLDER / "pytorch_model.bin", tmp_path / "pytorch_model-00001-of-00001.bin")
    names = dict.fromkeys(np.load(FOLDER / "expected.npz").files, "pytorch_model-00001-of-00001.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    assert set(open_checkpoint(tmp_path).names()) == set(names)


class Program:
    """An object whose pickle runs a command."""

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)

    def __init__(self, path: str) -> None:
        self.path = path


def test_code_in_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    made = tmp_path / "made"
    with pytest.raises(UnsupportedModelError, match=rf"needs {os.name}\.mkdir, which is not a tensor"):
        open_checkpoint(folder_of(tmp_path, {"weight": Program(str(made))}))
    assert not made.exists()


@pytest.mark.parametrize("described", [{"weight": 1}, [1, 2], {1: "x"}])
def test_other_objects_than_tensors_are_refused(tmp_path: Path, described: object) -> None:
    with pytest.raises(UnsupportedModelError, match="holds other objects than tensors by name"):
        open_checkpoint(folder_of(tmp_path, described))


def test_compressed_archive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is compressed or encrypted"):
        open_checkpoint(folder_of(tmp_path, {}, compressed=True))


def test_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    folder_of(tmp_path, {})
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(UnsupportedModelError, match=r"is not a zip archive, as PyTorch writes since 1\.6"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("place", range(0, 6000, 97))
def test_damaged_file_raises_only_model_errors(tmp_path: Path, place: int) -> None:
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    data = bytearray((FOLDER / "pytorch_model.bin").read_bytes())
    data[place % len(data)] ^= 0xFF
    (tmp_path / "pytorch_model.bin").write_bytes(data)
    with suppress(ModelError, UnsupportedModelError):
        source = open_checkpoint(tmp_path)
        for name in source.names():
            source.read(name)
