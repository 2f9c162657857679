"""A config.json without weights as a `TensorSource`: a decoder that can be planned and simulated, and not run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from chunkrt.checkpoints import older_layouts
from chunkrt.checkpoints.checkpoint import WEIGHT_FILES
from chunkrt.checkpoints.safetensors import QUANTISATION_KEYS, read_json_object, text_half
from chunkrt.checkpoints.source import BlockTensor, TensorInfo
from chunkrt.errors import ModelError


class ConfigSource:
    """A config.json of Transformers. All tensors that the decoder needs exist as float32, and have no values.

    Attributes:
        path: path of the file.
        shapes: shapes of the tensors by name. The builder of the decoder sets them, because only the decoder knows
            them; before, each layer has one placeholder.

    Raises:
        ModelError: the file is damaged, or is not a config of Transformers.
    """

    path: Path
    architecture: str
    config: Mapping[str, Any]

    def __init__(self, path: Path) -> None:
        self.path, self.config = path, read_json_object(path)
        if (text := text_half(self.config, path) if "model_type" in self.config else None) is not None:
            self.config = text
        model_type = self.config.get("model_type")
        if not isinstance(model_type, str):
            raise ModelError(f"{path} has no model_type; is it a Transformers model?")
        self.architecture = model_type
        self.config = {key: value for key, value in self.config.items() if key not in QUANTISATION_KEYS}
        if model_type in older_layouts.FAMILIES:
            self.config = older_layouts.with_later_keys(self.config)
        layers, kinds = self.config.get("num_hidden_layers"), self.config.get("layers_block_type")
        num_layers = layers if isinstance(layers, int) else len(kinds) if isinstance(kinds, list) else 0
        self.shapes: Mapping[str, tuple[int, ...]] = {f"layer {index}": () for index in range(min(num_layers, 10_000))}

    def names(self) -> Sequence[str]:
        """See `TensorSource`."""
        return list(self.shapes)

    def info(self, name: str) -> TensorInfo:
        """See `TensorSource`."""
        if name not in self.shapes:
            raise ModelError(f"{self.path}: there is no tensor {name}")
        return TensorInfo(shape=self.shapes[name], stored_as="F32")

    def read(self, name: str) -> NDArray[np.float32]:
        """Raise ModelError."""
        self._refuse(name)

    def read_blocks(self, name: str) -> BlockTensor | None:
        """Raise ModelError."""
        self._refuse(name)

    def stored(self, name: str) -> NDArray[np.uint8]:
        """Raise ModelError."""
        self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise ModelError(f"{self.path} has no weights, and {name} is needed; give the complete checkpoint")


def find_config(path: Path) -> Path | None:
    """Return the config of a path that has a config and no weights: a JSON file, or a folder with config.json."""
    if path.is_file():
        return path if path.suffix == ".json" else None
    config = path / "config.json"
    names = [name for weights in WEIGHT_FILES for name in (weights, f"{weights}.index.json")]
    return config if config.is_file() and not any((path / name).exists() for name in names) else None
