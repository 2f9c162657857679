"""The weights of an ONNX decoder as a `TensorSource`, under the names that the module tree uses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from chunkrt.checkpoints.source import BlockTensor, TensorInfo
from chunkrt.errors import ModelError
from chunkrt.onnx.importing.tensors import StoredTensor


class OnnxSource:
    """Tensors by the names of the initializers from which they are made; linears are [out_features, in_features].

    Attributes:
        path: the folder that is searched for tokenizer files.
        file: the model's file.
        original: the model as it was read; `verify` releases it.
    """

    path: Path
    architecture: str
    config: Mapping[str, Any]

    def __init__(self, file: Path, architecture: str, config: Mapping[str, Any], original: onnx.ModelProto) -> None:
        self.file, self.path = file, file.parent
        self.original: onnx.ModelProto | None = original
        self.architecture, self.config = architecture, config
        self._tensors: dict[str, StoredTensor] = {}

    def add(self, name: str, tensor: StoredTensor) -> str:
        """Add a tensor, and return its name in the source, which differs from its own name if another tensor has that
        name.
        """
        unique, number = name, 1
        while unique in self._tensors:
            unique, number = f"{name}.{number}", number + 1
        self._tensors[unique] = tensor
        return unique

    def keep(self, names: Collection[str]) -> None:
        """Remove all tensors except those with the given names."""
        self._tensors = {name: tensor for name, tensor in self._tensors.items() if name in names}

    def names(self) -> Sequence[str]:
        """Return the names of the tensors that the decoder reads."""
        return list(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """See `TensorSource`."""
        tensor = self._find(name)
        return TensorInfo(shape=tensor.shape, stored_as=tensor.stored_as)

    def read(self, name: str) -> NDArray[np.float32]:
        """See `TensorSource`; also raises ModelError for data that can no longer be read."""
        try:
            return self._find(name).read()
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.file}: the weight {name} cannot be read: {error}") from error

    def read_blocks(self, name: str) -> BlockTensor | None:
        """See `TensorSource`."""
        return self._find(name).read_blocks()

    def stored(self, name: str) -> NDArray[np.uint8]:
        """See `TensorSource`: the bytes of its values in float32, which verifying the import has read anyway."""
        return np.ascontiguousarray(self.read(name)).reshape(-1).view(np.uint8)

    def _find(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise ModelError(f"{self.file} has no weight {name}")
        return self._tensors[name]
