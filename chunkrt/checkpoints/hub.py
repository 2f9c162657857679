"""Models of the Hugging Face hub, by their ids, in the cache of the hub's client.

Models in the cache are found without the client and without a network. The client fetches other models.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from chunkrt.checkpoints.checkpoint import TEXT_FOLDERS, WEIGHT_FILES, choose_gguf, first_of_each, parts_of
from chunkrt.errors import ConfigError, ModelError
from chunkrt.files import read_json

_WORD = r"[A-Za-z0-9_][\w.-]*"
_ID = re.compile(
    rf"(?:hf://|https://huggingface\.co/)?(?P<repository>{_WORD}/{_WORD})"
    r"(?::(?P<quantisation>[\w.-]+))?(?:@(?P<revision>\w[\w./-]*))?/?"
)
FOLDER_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
"""File patterns of a repository in Hugging Face's own layout, without its weights."""
_FILES = ("config.json", ".gguf", ".onnx", ".safetensors", ".toml")


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """A repository, or one of its GGUF files by quantisation, at a branch, tag or commit."""

    repository: str
    quantisation: str | None = None
    revision: str = "main"

    def __str__(self) -> str:
        return self.repository + (f":{self.quantisation}" if self.quantisation else "")


def parse_hub_id(text: str) -> HubModel | None:
    """Parse a model id "org/name", "org/name:Q4_0" or "org/name@revision"; None if it is not one."""
    if not (found := _ID.fullmatch(text)) or found["repository"].endswith(_FILES) or ".." in text:
        return None
    return HubModel(
        repository=found["repository"], quantisation=found["quantisation"], revision=found["revision"] or "main"
    )


def hub_cache() -> Path:
    """Return the cache folder of the hub's client."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "huggingface" / "hub"


def cached_model(model: HubModel) -> Path | None:
    """Return the path of a model's GGUF file or folder in the cache; None if the model is missing or incomplete."""
    repository = hub_cache() / f"models--{model.repository.replace('/', '--')}"
    try:
        commit = (repository / "refs" / model.revision).read_text(encoding="utf-8").strip()
    except OSError:
        commit = model.revision
    snapshot = repository / "snapshots" / commit
    if not snapshot.is_dir():
        return None
    if model.quantisation is None and (snapshot / "config.json").is_file() and _has_all_weights(snapshot):
        return snapshot
    names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf")]
    try:
        path = snapshot / choose_gguf(names, model.quantisation, str(model))
    except ModelError:
        return None
    return path if all(part.exists() for part in parts_of(path)) else None


def cached_models() -> Iterator[tuple[str, Path]]:
    """Return the models in the cache that can be run, by their ids."""
    for folder in sorted(hub_cache().glob("models--*--*")):
        model = parse_hub_id(folder.name.removeprefix("models--").replace("--", "/", 1))
        if model is not None and (path := cached_model(model)) is not None:
            yield str(model), path


def fetch_model(model: HubModel) -> Path:
    """Fetch a model's files, with the client's own progress bars; cached files are not fetched again.

    Raises:
        ConfigError: the client is not installed.
        ModelError: the hub has no such model, or cannot be reached.
    """
    try:
        from huggingface_hub import HfApi, snapshot_download
    except ImportError as error:
        raise ConfigError(
            f'there is no file or folder {model}; to fetch it from the Hugging Face hub: pip install "chunkrt[hub]"'
        ) from error
    try:
        # Without a connection, snapshot_download would request this list repeatedly and log every failure.
        siblings = HfApi().model_info(model.repository, revision=model.revision).siblings
        patterns = _wanted(model, [sibling.rfilename for sibling in siblings or ()])
        snapshot_download(model.repository, revision=model.revision, allow_patterns=patterns, ignore_patterns=None)
    except ModelError:
        raise
    except Exception as error:  # errors of the client, and of the libraries that it uses
        reason = (str(error).strip() or type(error).__name__).partition("\n")[0].rstrip(".")
        raise ModelError(
            f"there is no file or folder {model}, and the Hugging Face hub does not provide it: {reason}; "
            "`chunkrt models` lists known models"
        ) from error
    if (path := cached_model(model)) is None:
        raise ModelError(
            f"{model} was fetched, but is incomplete in {hub_cache()}; chunkrt pull {model} fetches it again"
        )
    return path


def _wanted(model: HubModel, names: list[str]) -> list[str]:
    """Return the files of a repository that a model needs."""
    for weights in ("*.safetensors", "pytorch_model*.bin"):
        if model.quantisation is None and "config.json" in names and any(Path(name).match(weights) for name in names):
            inside = [name for name in names if Path(name).parent.as_posix() in (".", *TEXT_FOLDERS)]
            return [name for name in inside if any(Path(name).match(pattern) for pattern in (*FOLDER_FILES, weights))]
    if model.quantisation is None and not first_of_each(names):
        raise ModelError(
            f"{model} on the Hugging Face hub holds neither safetensors, pytorch_model.bin nor GGUF; "
            "choose another model"
        )
    chosen = Path(choose_gguf(names, model.quantisation, str(model)))
    return [part.as_posix() for part in parts_of(chosen)]


def _has_all_weights(folder: Path) -> bool:
    for name in WEIGHT_FILES:
        if (folder / name).exists():
            return True
        try:
            shards = set(read_json(folder / f"{name}.index.json")["weight_map"].values())
            return all((folder / shard).exists() for shard in shards)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return False
