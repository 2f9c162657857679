"""Folders of the library PEFT: adapter_config.json, and adapter_model.safetensors or adapter_model.bin.

Source: PEFT, `LoraConfig`, `utils/other.py` (`get_pattern_key`) and `tuners/lora/layer.py` (`update_layer`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.checkpoints.adapters import CONFIG, WEIGHT_FILES, LowRank
from chunkrt.checkpoints.safetensors import read_json_object, read_tensors, tensor_values
from chunkrt.errors import ModelError, UnsupportedModelError

PREFIX = "base_model.model."
_PART = re.compile(r"(?P<module>.+)\.(?P<part>lora_[AB]|base_layer)\.weight")
_NOT_LINEAR = re.compile(r"\.lora_embedding_[AB]$")

_REFUSED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "blocks (use_bdlora)",
    "kasa_config": "KaSA",
    "arrow_config": "a router of adapters (arrow_config)",
    "monteclora_config": "MonteCLoRA",
    "lora_bias": "biases of the products (lora_bias)",
    "modules_to_save": "layers that were trained completely (modules_to_save)",
    "target_parameters": "parameters outside linear layers (target_parameters)",
    "trainable_token_indices": "trained tokens (trainable_token_indices)",
    "layer_replication": "repeated layers (layer_replication)",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
}
"""Keys of the config that change the result beyond W + scale * B @ A, with their descriptions."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of `init_lora_weights` under which PEFT also changes the weights of the base model."""


def read_products(folder: Path) -> dict[str, LowRank]:
    """Return the products of a PEFT folder by the names of the tensors that they are added to.

    Raises:
        ModelError: a file is missing or damaged, or the tensors contradict the config.
        UnsupportedModelError: the adapter is not LoRA on linear layers alone.
    """
    if not (folder / CONFIG).exists():
        raise ModelError(f"the folder {folder} has no {CONFIG}; expected an adapter: a folder of PEFT or a GGUF file")
    config = read_json_object(folder / CONFIG)
    _check(config, folder)
    path = next((folder / name for name in WEIGHT_FILES if (folder / name).exists()), None)
    if path is None:
        raise ModelError(f"the adapter {folder} has no {WEIGHT_FILES[0]}")
    parts: dict[str, dict[str, NDArray[np.float32]]] = {}
    for name, tensor in read_tensors(path).items():
        if _NOT_LINEAR.search(name):
            raise UnsupportedModelError(f"the adapter {folder} changes an embedding ({name}), which is not supported")
        if not (match := _PART.fullmatch(name)):
            raise UnsupportedModelError(
                f"the adapter {folder} has the tensor {name}, which is no part of a LoRA product"
            )
        parts.setdefault(match["module"].removeprefix(PREFIX), {})[match["part"]] = tensor_values(name, tensor)
    return {f"{module}.weight": _product(module, found, config, folder) for module, found in parts.items()}


def _check(config: Mapping[str, Any], folder: Path) -> None:
    """Refuse a config that does not describe plain LoRA."""
    if config.get("peft_type") != "LORA":
        raise UnsupportedModelError(
            f"the adapter {folder} has the peft_type {config.get('peft_type')!r:.80}, and only 'LORA' is supported"
        )
    for key, what in _REFUSED.items():
        if config.get(key):
            raise UnsupportedModelError(
                f"the adapter {folder} uses {what}, which is not supported; merge it into its checkpoint with PEFT"
            )
    if (bias := config.get("bias", "none")) != "none":
        raise UnsupportedModelError(
            f"the adapter {folder} also trains biases (bias is {bias!r:.80}), which is not supported; merge it into "
            "its checkpoint with PEFT"
        )
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        raise UnsupportedModelError(
            f"the adapter {folder} belongs to changed base weights (init_lora_weights is {init!r:.80}); convert it to "
            "plain LoRA with PEFT's path_initial_model_for_weight_conversion"
        )


def _product(module: str, parts: Mapping[str, NDArray[np.float32]], config: Mapping[str, Any], folder: Path) -> LowRank:
    """Return the product of one module from its tensors A and B, with the copy of its weight if there is one: PEFT
    stores that of a trained LM head.
    """
    if missing := {"lora_A", "lora_B"} - parts.keys():
        raise ModelError(f"the adapter {folder} lacks the tensor {min(missing)} of {module}")
    a, b, base = parts["lora_A"], parts["lora_B"], parts.get("base_layer")
    rank = _of_module(config, "r", "rank_pattern", module, folder)
    if a.ndim != 2 or b.ndim != 2 or (len(a), b.shape[1]) != (rank, rank):
        raise ModelError(
            f"the adapter {folder} has tensors {list(a.shape)} and {list(b.shape)} for {module}, expected "
            f"[{rank:g}, inputs] and [outputs, {rank:g}]"
        )
    if base is not None and base.shape != (len(b), a.shape[1]):
        raise ModelError(f"the adapter {folder} has a base_layer {list(base.shape)} that does not fit {module}")
    alpha = _of_module(config, "lora_alpha", "alpha_pattern", module, folder)
    return LowRank(a=a, b=b, scale=alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), base=base)


def _of_module(config: Mapping[str, Any], key: str, patterns_key: str, module: str, folder: Path) -> float:
    """Return the value of a key for a module: that of the first pattern that matches the end of its path, else the
    common one.
    """
    patterns = config.get(patterns_key) or {}
    try:
        fitting = (value for end, value in patterns.items() if re.match(rf"(.*\.)?({end})$", module))
        value: Any = next(fitting, config.get(key))
    except (AttributeError, re.error) as error:
        raise ModelError(f"{folder / CONFIG}: {patterns_key} has an invalid pattern ({error})") from error
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or (key == "r" and value <= 0):
        raise ModelError(f"{folder / CONFIG}: {key} of {module} is {value!r:.80}, expected a number above 0")
    return float(value)
