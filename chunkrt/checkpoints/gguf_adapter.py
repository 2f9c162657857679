"""LoRA adapters in GGUF files, as llama.cpp's convert_lora_to_gguf.py writes them.

The file has `general.type` "adapter", `adapter.type` "lora", and for each adapted tensor NAME of the architecture the
two tensors NAME.lora_a [r, K] and NAME.lora_b [N, r]. The scale is `adapter.lora.alpha` / r, or 1 without alpha. Rows
of B and columns of A are in the order of GGUF's weights. Source: llama.cpp, src/llama-adapter.cpp and .h
(`llama_adapter_lora_weight::get_scale`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.checkpoints.adapters import Base, LowRank
from chunkrt.checkpoints.checkpoint import map_file
from chunkrt.checkpoints.gguf import dequantised
from chunkrt.checkpoints.gguf_header import GgufTensor, read_header
from chunkrt.checkpoints.gguf_names import EACH, Architecture, find_architecture, translate_name
from chunkrt.errors import ModelError, UnsupportedModelError

_PART = re.compile(r"(?P<tensor>.+)\.lora_(?P<part>[ab])")
_ACTIVATED = "adapter.alora.invocation_tokens"


def read_products(path: Path, base: Base) -> dict[str, LowRank]:
    """Return the products of a GGUF adapter, in Hugging Face's vocabulary and layout, by the names of the tensors that
    they are added to.

    Args:
        base: the checkpoint; its config determines the order of rows and columns.

    Raises:
        ModelError: the file is damaged, is no adapter, or belongs to another architecture.
        UnsupportedModelError: the adapter is not LoRA on linear layers alone.
    """
    data = map_file(path)
    header = read_header(data, path)
    metadata = header.metadata
    if (kind := metadata.get("general.type")) != "adapter":
        raise ModelError(f"{path} is no adapter: its general.type is {kind!r:.80}, expected 'adapter'")
    if (kind := metadata.get("adapter.type")) != "lora":
        raise UnsupportedModelError(f"the adapter {path} has the type {kind!r:.80}, and only 'lora' is supported")
    if metadata.get(_ACTIVATED):
        raise UnsupportedModelError(f"the adapter {path} is an activated LoRA ({_ACTIVATED}), which is not supported")
    alpha = metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ModelError(f"{path}: adapter.lora.alpha is {alpha!r:.80}, expected a number")
    named = metadata.get("general.architecture")
    of_base = getattr(base, "metadata", {}).get("general.architecture", named)
    if named != of_base:
        raise ModelError(
            f"the adapter {path} is for the architecture {named!r:.80}, and {base.path} is {of_base!r:.80}"
        )
    architecture = find_architecture(named)
    parts: dict[str, dict[str, GgufTensor]] = {}
    for name, tensor in header.tensors.items():
        if not (match := _PART.fullmatch(name)):
            raise UnsupportedModelError(f"the adapter {path} has the tensor {name}, which is no part of a LoRA product")
        parts.setdefault(match["tensor"], {})[match["part"]] = tensor
    products = {}
    for name, found in parts.items():
        if missing := {"a", "b"} - found.keys():
            raise ModelError(f"the adapter {path} lacks the tensor {name}.lora_{min(missing)}")
        a, b = (dequantised(data, found[part], path) for part in ("a", "b"))
        if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1]:
            raise UnsupportedModelError(
                f"the adapter {path} has tensors {list(a.shape)} and {list(b.shape)} for {name}, expected [r, inputs] "
                "and [outputs, r]"
            )
        scale = alpha / len(a) if alpha else 1.0
        target, product = _translated(architecture, base.config, found["a"], name, LowRank(a=a, b=b, scale=scale), path)
        products[target] = product
    return products


def _translated(
    architecture: Architecture, config: Mapping[str, Any], tensor: GgufTensor, name: str, product: LowRank, path: Path
) -> tuple[str, LowRank]:
    """Return an adapted tensor's name in Hugging Face's vocabulary, and its product in Hugging Face's layout."""
    whole = GgufTensor(name=name, shape=product.shape, type=tensor.type, start=0, num_bytes=0)
    config = {"num_key_value_heads": config.get("num_attention_heads"), **config}
    try:
        target, layout = translate_name(architecture, config, whole)
    except (ModelError, KeyError) as error:
        why = f"the config of the model lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ModelError(f"the adapter {path} does not fit the model: {why}") from error
    if EACH in target or layout.values is not None or not target:
        raise UnsupportedModelError(f"the adapter {path} changes {name}, which is not supported")
    a: NDArray[np.float32] = product.a if layout.columns is None else product.a[:, layout.columns]
    b: NDArray[np.float32] = product.b if layout.rows is None else product.b[layout.rows]
    return target, LowRank(a=a, b=b, scale=product.scale)
