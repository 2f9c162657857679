"""Folders of older families (GPT-2, GPT-BigCode, OPT), whose config keys and linears differ from later ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_GPT = {
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "activation_function": "hidden_act",
}
_KEYS = {
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "opt": {"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
}
FAMILIES = _KEYS.keys()
"""The model types of these families."""
_CONV1D = re.compile(r"(^|\.)(c_attn|c_fc|c_proj)\.weight$")


def with_later_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config in which the family's own keys also have the names of later families."""
    keys = _KEYS[config["model_type"]]
    found = {later: config[key] for key, later in keys.items() if config.get(key) is not None}
    if keys is _GPT and type(width := config.get("n_embd")) is int:
        found = {"intermediate_size": 4 * width, **found}
    return {**config, **found}


def is_transposed(model_type: str, tensor: str) -> bool:
    """Return whether a folder holds the weight of a linear as [in_features, out_features] (Transformers' `Conv1D`)."""
    return model_type == "gpt2" and _CONV1D.search(tensor) is not None
