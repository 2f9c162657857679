"""Hugging Face folders with small random decoders, and a function that loads them on each backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

import chunkrt
from chunkrt.backends import make_backend
from chunkrt.engine.engine import Engine
from chunkrt.testing.random_decoders import CONFIG, RandomCheckpoint


def write_folder(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Write a checkpoint of the Llama family; its config overrides sizes of `chunkrt.testing.random_decoders`."""
    config = {"model_type": "llama", **CONFIG, **config}
    source = RandomCheckpoint(config, seed=seed)
    folder.mkdir(parents=True)
    save_file({name: source.read(name) for name in source.names()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def load_on(npu: str, folder: Path, **options: Any) -> Engine:
    """Load a model with float32 caches by default, except on native with float linears.

    If native does not support the model, the test is skipped.
    """
    scheme = "w8a8-dynamic" if npu == "native" else "float"
    options = {"cache_dtype": "float32", "threads": 2, **options}
    if npu == "native":
        with chunkrt.load(folder, npu="reference", scheme=scheme) as engine:
            backend, plan = make_backend("native", threads=1), engine.plan.with_raw_keys()
            for subgraph in plan.subgraphs:
                if not (support := backend.supports(subgraph, plan, engine.scheme)):
                    pytest.skip(f"native has neither windows nor keys that are cached before RoPE: {support.reason}")
    return chunkrt.load(folder, npu=npu, scheme=scheme, **options)
