"""Opening of a checkpoint in any supported format."""

from __future__ import annotations

import os
from pathlib import Path

from chunkrt.checkpoints.catalogue import how_to_fetch
from chunkrt.checkpoints.gguf import GgufSource
from chunkrt.checkpoints.gguf_header import MAGIC
from chunkrt.checkpoints.safetensors import SafetensorsSource
from chunkrt.checkpoints.source import Refuse, TensorSource, strictly
from chunkrt.errors import ModelError
from chunkrt.files import check_regular

_PICKLED = "PyTorch's pickled files are not supported; convert the file to safetensors"
_HINTS = {".safetensors": "name its folder instead", **dict.fromkeys((".bin", ".ckpt", ".pt", ".pth"), _PICKLED)}


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
            return SafetensorsSource(path)
        found = ", ".join(sorted(p.name for p in path.glob("*.gguf"))[:3])
        hint = "expected a GGUF file, a Hugging Face folder or an ONNX decoder"
        if found:
            hint = f"name the file itself: {found}"
        elif (path / "adapter_config.json").exists():
            hint = "it holds only an adapter; merge it into its base model, and use the merged folder"
        raise ModelError(f"the folder {path} has no config.json; {hint}")
    try:
        check_regular(path)
        with path.open("rb") as file:
            start = file.read(len(MAGIC))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    if start == MAGIC:
        return GgufSource(path, refuse=refuse)
    if not start:
        raise ModelError(f"{path} is empty; {how_to_fetch(path)}")
    hint = _HINTS.get(path.suffix) or f"if it should be, {how_to_fetch(path)}"
    raise ModelError(f"{path} is not a GGUF file (it starts with {start!r}); {hint}")
