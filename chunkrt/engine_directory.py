"""The engine directory: a compiled model on disk, everything that the run half needs and nothing else.

    engine.json          format, model, scheme
    plan.json            the plan
    weights.safetensors  weights prepared under the scheme
    tokenizer.json, text.json   the tokenizer and chat template, where the checkpoint has them

It may be copied to a device and run there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from chunkrt.errors import ModelError
from chunkrt.graph.plan import Plan
from chunkrt.weights.store import WeightStore

FORMAT = 1
MANIFEST, PLAN, WEIGHTS = "engine.json", "plan.json", "weights.safetensors"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What an engine directory says of itself."""

    format: int
    model: str
    scheme: str


def is_engine_directory(path: Path) -> bool:
    """Whether a path looks like one."""
    return (path / MANIFEST).is_file()


def cached_folder(cache: Path, checkpoint: Path, *, scheme: str, placement: Mapping[str, str]) -> Path:
    """Where a cache keeps the engine directory of a checkpoint; it may not be there yet.

    The name covers the checkpoint's files (path, size, time of change), the scheme, the placement and the format.
    """
    files = sorted(p for p in checkpoint.iterdir() if p.is_file()) if checkpoint.is_dir() else [checkpoint]
    stats = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    what = json.dumps({"format": FORMAT, "files": stats, "scheme": scheme, "placement": list(placement.items())})
    return cache / f"{checkpoint.stem}-{scheme}-{hashlib.sha256(what.encode()).hexdigest()[:16]}"


def write_manifest(folder: Path, *, model: str, scheme: str) -> None:
    """Write `engine.json`; the last file, so that a folder that has it is whole."""
    manifest = Manifest(format=FORMAT, model=model, scheme=scheme)
    (folder / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1), encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Read `engine.json`.

    Raises:
        ModelError: it is missing, damaged, or of another format.
    """
    try:
        manifest = Manifest(**json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{folder} is not an engine directory ({error}); compile the model again") from error
    if manifest.format != FORMAT:
        raise ModelError(
            f"{folder} has engine format {manifest.format}, this chunkrt reads {FORMAT}; compile the model again"
        )
    return manifest


def read_plan(folder: Path) -> Plan:
    """Read `plan.json`. Raises ModelError if it is missing or damaged."""
    try:
        text = (folder / PLAN).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{folder / PLAN} cannot be read ({error}); compile the model again") from error
    return Plan.from_json(text)


def open_weights(folder: Path) -> WeightStore:
    """Map the weights. Raises ModelError if they are missing or damaged."""
    return WeightStore.open(folder / WEIGHTS)
