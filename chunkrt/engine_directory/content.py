"""Identity of a checkpoint by its content. It determines the cache keys of all data that is derived from the
checkpoint.

A file is read completely once, and its digest is kept with its size and times. As long as size and times are unchanged,
the file is not read again. A checkpoint that is moved, copied or touched keeps its key.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from chunkrt import __version__
from chunkrt.checkpoints.adapters import adapter_files
from chunkrt.checkpoints.catalogue import home
from chunkrt.checkpoints.checkpoint import checkpoint_files, open_checkpoint
from chunkrt.errors import ModelError, cause_of
from chunkrt.files import check_regular, read_json, written_aside
from chunkrt.plugins import code_behind, entry_points

SETTLED_SECONDS = 2.0
"""Resolution of file times: a file that changed more recently than this is read again the next time."""
_READ_BYTES = 1 << 20


def cache_key(checkpoint: Path, *, adapter: Path | None = None, **made_with: object) -> str:
    """Return 16 hexadecimal digits that identify this version's result for a checkpoint's content, and for that of an
    adapter.

    If a checkpoint has several files, their names are included. If a plug-in provides the decoder family of a folder,
    or the architecture of a GGUF file, the code of the plug-in is included. For an ONNX file, the data and settings
    next to it are included.
    """
    files = checkpoint_files(checkpoint)
    names = [""] if len(files) == 1 else [path.name for path in files]
    key = {"files": list(zip(names, map(file_digest, files), strict=True)), "chunkrt": __version__, **made_with}
    if adapter is not None:
        key["adapter"] = [file_digest(path) for path in adapter_files(adapter)]
    architecture, model_type = _architecture_of_plugin(checkpoint)
    code = code_behind("chunkrt.gguf", architecture) if architecture else []
    if code := [*code, *code_behind("chunkrt.decoders", model_type or _model_type(checkpoint))]:
        key["family"] = code
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]


def keyed_path(folder: Path, checkpoint: Path, key: str, *, kind: str = "", suffix: str = "") -> Path:
    """Return the cached path of the result under a key. Its name begins with the checkpoint's original name."""
    made = (path for path in folder.glob(f"*-{key}{suffix}") if not path.name.startswith("."))
    return min(made, default=folder / f"{checkpoint_name(checkpoint)}{kind}-{key}{suffix}")


def checkpoint_name(checkpoint: Path) -> str:
    """Return a readable name of a checkpoint: the name of its file or folder, or of its repository in the hub's
    cache."""
    repository = checkpoint.parents[1].name if len(checkpoint.parents) > 1 else ""
    if checkpoint.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--")
    return checkpoint.stem


def file_digest(path: Path) -> str:
    """Return XXH3 of a file's bytes, 128 bits in hexadecimal. It is computed, or kept from an earlier call.

    Raises:
        ModelError: the file cannot be read.
    """
    try:
        return _file_digest(path)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {cause_of(error)}") from error


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
    """Return the properties of a file that change when its content does."""
    stat = path.stat()
    changed_ns = max(stat.st_mtime_ns, stat.st_ctime_ns)
    return {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "changed_ns": changed_ns, "inode": stat.st_ino}


def _architecture_of_plugin(checkpoint: Path) -> tuple[str, str]:
    """Return the architecture of a GGUF file and its model type, if a plug-in provides the architecture; else ""."""
    if not entry_points(group="chunkrt.gguf") or checkpoint.is_dir() or checkpoint.suffix == ".onnx":
        return "", ""
    from chunkrt.checkpoints.gguf_names import PLUGINS

    metadata = getattr(open_checkpoint(checkpoint, refuse=lambda refusal: None), "metadata", {})
    plugin = PLUGINS.find(str(metadata.get("general.architecture")))
    return ("", "") if plugin is None else (plugin.name, plugin.load().model_type)


def _model_type(checkpoint: Path) -> str:
    """Return the model type of a Hugging Face folder, or "" if it is unknown."""
    try:
        return str(read_json(checkpoint / "config.json")["model_type"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""  # the path is a file, or has an error that is reported when the checkpoint is opened
