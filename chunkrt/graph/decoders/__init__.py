"""The decoder families, by Hugging Face's model_type, and how a checkpoint becomes one of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from chunkrt.errors import ModelError, UnsupportedModelError
from chunkrt.graph.decoders import gemma3, llama, phi3, qwen2, qwen3
from chunkrt.graph.decoders.config import DecoderConfig, read_config
from chunkrt.graph.modules import Module
from chunkrt.weights.source import TensorSource

FAMILIES: dict[str, Callable[[DecoderConfig], Module]] = {
    "gemma3_text": gemma3.gemma3,
    "llama": llama.llama,
    "mistral": llama.mistral,
    "phi3": phi3.phi3,
    "qwen2": qwen2.qwen2,
    "qwen3": qwen3.qwen3,
}
DEFAULTS: dict[str, Mapping[str, Any]] = {
    "gemma3_text": gemma3.DEFAULTS,
    "mistral": llama.MISTRAL_DEFAULTS,
    "phi3": phi3.DEFAULTS,
    "qwen3": qwen3.DEFAULTS,
}
"""What Transformers takes for keys that a config leaves out, where most families have no value or another."""

UNUSED_TENSORS = re.compile(r"(model\.layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|^lm_head\.weight$")
"""Buffers that old exports carry although the config determines them; and the copy that some make for a tied head."""


def build_decoder(source: TensorSource) -> Module:
    """The module tree of a checkpoint, every parameter named and matched with the checkpoint's tensors.

    Raises:
        UnsupportedModelError: an architecture, or a feature of it, that is not implemented.
        ModelError: a tensor is missing, or one is left that nothing reads.
    """
    if source.architecture not in FAMILIES:
        raise UnsupportedModelError(
            f"{source.path.name}: architecture {source.architecture!r} is not supported; "
            f"supported are: {', '.join(sorted(FAMILIES))}"
        )
    config = read_config(source, DEFAULTS.get(source.architecture))
    decoder = FAMILIES[source.architecture](config).named()
    _account(decoder, source)
    return decoder


def _account(decoder: Module, source: TensorSource) -> None:
    """Every parameter finds its tensors, and every tensor its parameter."""
    present = set(source.names())
    needed = {t: p.name for p in decoder.parameters() for t in p.checkpoint_tensors}
    if missing := [name for name in needed if name not in present]:
        raise ModelError(
            f"{source.path.name}: tensor {missing[0]} is missing, needed by {needed[missing[0]]}"
            + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else "")
        )
    unread = [name for name in source.names() if name not in needed and not UNUSED_TENSORS.search(name)]
    if unread:
        raise ModelError(
            f"{source.path.name}: tensor {unread[0]} is in the checkpoint, but no part of the "
            f"{source.architecture} decoder reads it" + (f" (and {len(unread) - 1} more)" if len(unread) > 1 else "")
        )
