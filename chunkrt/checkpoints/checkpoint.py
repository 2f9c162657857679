"""A checkpoint on disk: its format, its files, and the digest of their contents.

A reader is imported when its format is opened: readers need the functions for files below, and only GGUF needs the
library `gguf`. The parts of a GGUF file have llama-gguf-split's names: NAME-00001-of-00003.gguf.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
from collections.abc import Sequence
from pathlib import Path

from chunkrt.checkpoints.catalogue import how_to_fetch
from chunkrt.checkpoints.source import Refuse, TensorSource, strictly
from chunkrt.errors import ModelError, cause_of
from chunkrt.files import check_regular, map_read_only

MAGIC = b"GGUF"
"""First bytes of a GGUF file."""
_PICKLED = "name its folder, with config.json, if its name is pytorch_model.bin; other pickled files are not supported"
_HINTS = {".safetensors": "name its folder instead", **dict.fromkeys((".bin", ".ckpt", ".pt", ".pth"), _PICKLED)}
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
PREFERRED = ("Q4_K_M", "Q8_0", "Q4_0", "Q4_1")
"""Quantisations in order of preference, for ids without one; llama.cpp's choice is first."""
GENAI = "genai_config.json"
"""Settings of an ONNX decoder for ONNX Runtime GenAI."""
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
"""Names of the file with all weights of a Hugging Face folder, in order of preference. If there are several files, the
name of their index ends with .index.json.
"""
TEXT_FOLDERS = ("1_Pooling", "additional_chat_templates")
"""Folders with settings of texts and embeddings, in a Hugging Face folder."""
ONNX_SUFFIXES = ("", ".bin", ".data", ".jinja", ".json", ".onnx_data", ".weight", ".weights")
"""Suffixes of the files that exporters write next to an ONNX file: weights (in one or several files), settings and
tokenizer.
"""
SAMPLED_PIECES, SAMPLED_PIECE_BYTES = 1024, 4096


def open_checkpoint(path: str | os.PathLike[str], *, refuse: Refuse = strictly) -> TensorSource:
    """Open a GGUF file or a Hugging Face folder; the format is determined by the content, not by the name.

    Args:
        refuse: see `GgufSource`; a folder always shows all of its tensors.

    Raises:
        ModelError: `path` is neither a GGUF file nor a Hugging Face folder, or is damaged.
        UnsupportedModelError: the checkpoint is intact, but not supported.
    """
    path = Path(path)
    if path.is_dir():
        if (path / "config.json").exists():
            from chunkrt.checkpoints.safetensors import SafetensorsSource

            return SafetensorsSource(path)
        found = ", ".join(sorted(p.name for p in path.glob("*.gguf"))[:3])
        hint = "expected a GGUF file, a Hugging Face folder or an ONNX decoder"
        if found:
            hint = f"name the file itself: {found}"
        elif (path / "adapter_config.json").exists():
            hint = "it holds only an adapter; give its base model, and this folder as `adapter`"
        raise ModelError(f"the folder {path} has no config.json; {hint}")
    start = first_bytes(path, str(path))
    if start == MAGIC:
        from chunkrt.checkpoints.gguf import GgufSource

        return GgufSource(path, refuse=refuse)
    if not start:
        raise ModelError(f"{path} is empty; {how_to_fetch(path)}")
    hint = _HINTS.get(path.suffix) or f"if it should be, {how_to_fetch(path)}"
    raise ModelError(f"{path} is not a GGUF file (it starts with {start!r}); {hint}")


def first_bytes(path: Path, what: str) -> bytes:
    """Return as many bytes of a file as `MAGIC` has. Raise ModelError, which names `what`, if it is unreadable."""
    try:
        check_regular(path)
        with path.open("rb") as file:
            return file.read(len(MAGIC))
    except OSError as error:
        raise ModelError(f"cannot read {what}: {cause_of(error)}") from error


def is_onnx(path: Path) -> bool:
    """Return whether a path looks like an ONNX decoder: an .onnx file, or a folder with one and no other weights."""
    if not path.is_dir():
        return path.suffix == ".onnx"
    has_onnx = (path / GENAI).exists() or any(path.glob("*.onnx"))
    return has_onnx and not any(path.glob("*.safetensors"))


def checkpoint_files(checkpoint: Path) -> list[Path]:
    """Return all files of a checkpoint."""
    if checkpoint.suffix == ".onnx" and checkpoint.is_file():
        beside = (p for p in checkpoint.parent.iterdir() if p.is_file() and p.suffix in ONNX_SUFFIXES)
        return sorted({checkpoint, *beside})
    if checkpoint.is_dir():
        beside = (p for folder in TEXT_FOLDERS for p in (checkpoint / folder).glob("*"))
        return sorted(p for p in (*checkpoint.iterdir(), *beside) if p.is_file())
    return [part for part in parts_of(checkpoint) if part.exists()] or [checkpoint]


def sampled_digest(checkpoint: Path, *others: Path) -> str:
    """Return SHA-256 of a checkpoint's files, and of other files. It covers names, sizes, and 1024 evenly spread pieces
    of 4 KiB of each file.

    Ranks on several machines compare this digest to check that they have the same checkpoint, without reading all of
    it.
    """
    digest = hashlib.sha256()
    for path in (*checkpoint_files(checkpoint), *others):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with path.open("rb") as file:
            for piece in range(SAMPLED_PIECES):
                file.seek(piece * size // SAMPLED_PIECES)
                digest.update(file.read(SAMPLED_PIECE_BYTES))
    return digest.hexdigest()


def map_file(path: Path) -> mmap.mmap:
    """Map a file for reading; the map stays open as long as an array refers to it.

    Raises:
        ModelError: the file is missing, unreadable or empty.
        OutOfMemoryError: the address space has no room for the map.
    """
    try:
        return map_read_only(path)
    except ValueError as error:
        raise ModelError(f"{path} is empty (0 bytes); {how_to_fetch(path)}") from error
    except OSError as error:
        raise ModelError(f"cannot read {path}: {cause_of(error)}") from error


def parts_of(path: Path) -> list[Path]:
    """Return the paths of all parts of a GGUF file, given one of them; only the given path if its name is not that of a
    part.
    """
    if not (found := _PART.fullmatch(path.name)):
        return [path]
    stem, count = found["stem"], int(found["count"])
    return [path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def first_of_each(names: Sequence[str]) -> list[str]:
    """Return the file names that are GGUF models: a complete file, or the first of several parts."""
    models = [name for name in names if name.endswith(".gguf") and not Path(name).name.startswith("mmproj")]
    return sorted(n for n in models if not (part := _PART.fullmatch(Path(n).name)) or int(part["number"]) == 1)


def choose_gguf(names: Sequence[str], quantisation: str | None, where: str) -> str:
    """Return one of several GGUF models, by the quantisation in its name.

    Args:
        names: file names, possibly with folders.
        quantisation: e.g. "Q4_0", ignoring case; None for the first of PREFERRED that is available.
        where: for messages.

    Raises:
        ModelError: no file has that quantisation.
    """
    models = first_of_each(names)
    for wanted in PREFERRED if quantisation is None else (quantisation,):
        word = re.compile(rf"(?<![a-z0-9]){re.escape(wanted)}(?![a-z0-9]|_[a-z0-9])", re.IGNORECASE)
        if fitting := [name for name in models if word.search(Path(name).name) or word.search(name)]:
            return min(fitting, key=len)
    if quantisation is None and models:
        return models[0]
    there = f"available: {', '.join(models)}" if models else "there is no GGUF file"
    raise ModelError(
        f"{where} has no GGUF file with quantisation {quantisation}; {there}" if quantisation else f"{where}: {there}"
    )


def gguf_in(folder: Path) -> Path | None:
    """Return the GGUF file of a folder that has exactly one; the first of its parts."""
    models = first_of_each([path.name for path in folder.glob("*.gguf")])
    return folder / models[0] if len(models) == 1 else None
