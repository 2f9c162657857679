"""One face for every checkpoint format.

A `TensorSource` shows a checkpoint in Hugging Face's vocabulary, whatever the file: tensor names such as
"model.layers.0.self_attn.q_proj.weight", config keys such as "num_attention_heads", and weights in Hugging Face's
layout (linears [out_features, in_features], no permuted rows). A decoder family is therefore written once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """What the header says of a tensor: its shape in Hugging Face's layout and the type it is stored in."""

    shape: tuple[int, ...]
    stored_as: str


class TensorSource(Protocol):
    """A checkpoint, memory-mapped, read tensor by tensor."""

    path: Path
    architecture: str
    """Hugging Face's `model_type`: "llama", "mistral", ..."""
    config: Mapping[str, Any]
    """Hugging Face's config.json keys; a GGUF's metadata is translated into them."""

    def names(self) -> Sequence[str]:
        """Every tensor of the checkpoint, in file order."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Shape and stored type of one tensor. Raises ModelError if the checkpoint has none of that name."""
        ...

    def read(self, name: str) -> NDArray[np.float32]:
        """One tensor, dequantised to float32, in Hugging Face's layout. Raises ModelError as `info` does."""
        ...
