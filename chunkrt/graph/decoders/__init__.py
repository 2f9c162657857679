"""The decoder families, by Hugging Face's model_type, and how a checkpoint becomes one of them."""

from __future__ import annotations

import re
from collections.abc import Callable

from chunkrt.errors import ModelError, UnsupportedModelError
from chunkrt.graph.decoders.config import DecoderConfig, read_config
from chunkrt.graph.decoders.lfm2 import lfm2
from chunkrt.graph.decoders.llama import llama, mistral
from chunkrt.graph.decoders.qwen3_next import qwen3_5, qwen3_next
from chunkrt.graph.modules import Module
from chunkrt.weights.source import TensorSource

FAMILIES: dict[str, Callable[[DecoderConfig], Module]] = {
    "lfm2": lfm2,
    "llama": llama,
    "mistral": mistral,
    "qwen3_5_text": qwen3_5,
    "qwen3_next": qwen3_next,
}

UNUSED_TENSORS = re.compile(r"(model\.layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Buffers that old exports carry although the config determines them."""


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
    decoder = FAMILIES[source.architecture](read_config(source)).named()
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
    tied_copy = {"lm_head.weight"} if source.config.get("tie_word_embeddings") else set()
    unread = [n for n in source.names() if n not in needed and n not in tied_copy and not UNUSED_TENSORS.search(n)]
    if unread:
        raise ModelError(
            f"{source.path.name}: tensor {unread[0]} is in the checkpoint, but no part of the "
            f"{source.architecture} decoder reads it" + (f" (and {len(unread) - 1} more)" if len(unread) > 1 else "")
        )
