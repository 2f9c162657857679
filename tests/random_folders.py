"""Hugging Face folders with small random decoders, written on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from chunkrt.testing.decoder import CONFIG, RandomCheckpoint


def write_folder(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """A checkpoint of the Llama family, by default of `chunkrt.testing.decoder`'s sizes; keys of the config differ."""
    config = {"model_type": "llama", **CONFIG, **config}
    source = RandomCheckpoint(config, seed=seed)
    folder.mkdir(parents=True)
    save_file({name: source.read(name) for name in source.names()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
