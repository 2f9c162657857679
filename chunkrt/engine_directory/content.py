"""What a checkpoint is, told by its content: the keys of all that is made of one.

A file is read once as a whole, and its digest kept with the size and the times that it had. As long as these are the
same it is not read again. A checkpoint that is moved, copied or touched keeps its key.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xxhash

from chunkrt.checkpoints.catalogue import home
from chunkrt.checkpoints.gguf_parts import parts_of
from chunkrt.checkpoints.hub import TEXT_FOLDERS
from chunkrt.errors import ModelError
from chunkrt.files import check_regular, read_json, written_aside
from chunkrt.plugins import code_behind

SAMPLED_PIECES, SAMPLED_PIECE_BYTES = 1024, 4096
SETTLED_SECONDS = 2.0
"""A file may change twice at one time as its file system tells it: what is younger is read again the next time."""
_READ_BYTES = 1 << 20

ONNX_SUFFIXES = ("", ".bin", ".data", ".jinja", ".json", ".onnx_data", ".weight", ".weights")
"""Of what exporters write beside an ONNX file: weights, a file each or all in one, settings and the tokenizer."""


def cache_key(checkpoint: Path, **made_with: object) -> str:
    """16 hexadecimal digits for what this version makes of a checkpoint's content.

    Names count where there are several files. Where a plug-in has the decoder family of a folder, its code counts as
    well. Those of an ONNX file are also the data and settings that may be beside it.
    """
    files = checkpoint_files(checkpoint)
    names = [""] if len(files) == 1 else [path.name for path in files]
    key = {"files": list(zip(names, map(file_digest, files), strict=True)), "chunkrt": version("chunkrt"), **made_with}
    if code := code_behind("chunkrt.decoders", _model_type(checkpoint)):
        key["family"] = code
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]


def keyed_path(folder: Path, checkpoint: Path, key: str, *, kind: str = "", suffix: str = "") -> Path:
    """Where a cache keeps what it made under a key: called after the checkpoint, by its name at that time."""
    made = (path for path in folder.glob(f"*-{key}{suffix}") if not path.name.startswith("."))
    return min(made, default=folder / f"{checkpoint_name(checkpoint)}{kind}-{key}{suffix}")


def checkpoint_name(checkpoint: Path) -> str:
    """What a person may recognise a checkpoint by: its file's or folder's name; of one in the hub's cache its id."""
    repository = checkpoint.parents[1].name if len(checkpoint.parents) > 1 else ""
    if checkpoint.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--")
    return checkpoint.stem


def sampled_digest(checkpoint: Path) -> str:
    """SHA-256 of a checkpoint's files: their names and sizes, and 1024 pieces of 4 KiB evenly spread over each.

    It is how ranks of several machines know that they have the same checkpoint, without reading all of it.
    """
    digest = hashlib.sha256()
    for path in checkpoint_files(checkpoint):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with path.open("rb") as file:
            for piece in range(SAMPLED_PIECES):
                file.seek(piece * size // SAMPLED_PIECES)
                digest.update(file.read(SAMPLED_PIECE_BYTES))
    return digest.hexdigest()


def checkpoint_files(checkpoint: Path) -> list[Path]:
    """All that a checkpoint consists of."""
    if checkpoint.suffix == ".onnx" and checkpoint.is_file():
        beside = (p for p in checkpoint.parent.iterdir() if p.is_file() and p.suffix in ONNX_SUFFIXES)
        return sorted({checkpoint, *beside})
    if checkpoint.is_dir():
        beside = (p for folder in TEXT_FOLDERS for p in (checkpoint / folder).glob("*"))
        return sorted(p for p in (*checkpoint.iterdir(), *beside) if p.is_file())
    return [part for part in parts_of(checkpoint) if part.exists()] or [checkpoint]


def file_digest(path: Path) -> str:
    """XXH3 of a file's bytes, 128 bits in hexadecimal: read from it, or as it was found before.

    Raises:
        ModelError: it cannot be read.
    """
    try:
        return _file_digest(path)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error


def _file_digest(path: Path) -> str:
    found = _state(path)
    place = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:24]
    kept = home() / "digests" / f"{place}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        entry = read_json(kept)
        if entry["file"] == found and isinstance(entry["digest"], str):
            return str(entry["digest"])
    digest, begin = xxhash.xxh3_128(), time.time()
    piece = memoryview(bytearray(_READ_BYTES))
    check_regular(path)
    with path.open("rb", buffering=0) as file:
        while length := file.readinto(piece):
            digest.update(piece[:length])
    if _state(path) == found and begin - found["changed_ns"] / 1e9 > SETTLED_SECONDS:
        with suppress(OSError), written_aside(kept) as aside:
            aside.write_text(json.dumps({"file": found, "digest": digest.hexdigest()}), encoding="utf-8")
    return digest.hexdigest()


def _state(path: Path) -> dict[str, Any]:
    """What changes when a file does."""
    stat = path.stat()
    changed_ns = max(stat.st_mtime_ns, stat.st_ctime_ns)
    return {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "changed_ns": changed_ns, "inode": stat.st_ino}


def _model_type(checkpoint: Path) -> str:
    """Of a Hugging Face folder, as far as it can be told."""
    try:
        return str(read_json(checkpoint / "config.json")["model_type"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""  # a file; or what is wrong is told when it is opened
