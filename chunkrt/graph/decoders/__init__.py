"""The decoder families, by Hugging Face's model_type, and how a checkpoint becomes one of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from chunkrt.errors import ModelError, UnsupportedModelError
from chunkrt.graph.decoders import gemma3, lfm2, llama, phi3, qwen2, qwen3, qwen3_next
from chunkrt.graph.decoders.config import DecoderConfig, read_config
from chunkrt.graph.modules import Module
from chunkrt.ranks import ALONE, Ranks
from chunkrt.weights.source import TensorSource

FAMILIES: dict[str, Callable[[DecoderConfig], Module]] = {
    "gemma3_text": gemma3.gemma3,
    "lfm2": lfm2.lfm2,
    "llama": llama.llama,
    "mistral": llama.mistral,
    "phi3": phi3.phi3,
    "qwen2": qwen2.qwen2,
    "qwen3": qwen3.qwen3,
    "qwen3_5_text": qwen3_next.qwen3_5,
    "qwen3_next": qwen3_next.qwen3_next,
}
DEFAULTS: dict[str, Mapping[str, Any]] = {
    "gemma3_text": gemma3.DEFAULTS,
    "lfm2": lfm2.DEFAULTS,
    "mistral": llama.MISTRAL_DEFAULTS,
    "phi3": phi3.DEFAULTS,
    "qwen2": qwen2.DEFAULTS,
    "qwen3": qwen3.DEFAULTS,
    "qwen3_5_text": qwen3_next.DEFAULTS,
    "qwen3_next": qwen3_next.DEFAULTS,
}
"""What Transformers takes for keys that a config leaves out, where most families have no value or another."""

UNUSED_TENSORS = re.compile(r"(model\.layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|^lm_head\.weight$")
"""Buffers that old exports carry although the config determines them; and the copy that some make for a tied head."""


def build_decoder(source: TensorSource, ranks: Ranks = ALONE) -> Module:
    """The module tree of a checkpoint, every parameter named and matched with the checkpoint's tensors.

    Args:
        ranks: which of how many processes it is for.

    Raises:
        UnsupportedModelError: an architecture, or a feature of it, that is not implemented.
        ModelError: a tensor is missing, or one is left that nothing reads.
        ConfigError: so many ranks cannot share a linear evenly.
    """
    decoder, _ = make_decoder(source, ranks)
    missing, unread = match_tensors(decoder, source)
    if missing:
        name, parameter = next(iter(missing.items()))
        raise ModelError(
            f"{source.path.name}: tensor {name} is missing, needed by {parameter}"
            + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else "")
        )
    if unread:
        raise ModelError(
            f"{source.path.name}: tensor {unread[0]} is in the checkpoint, but no part of the "
            f"{source.architecture} decoder reads it" + (f" (and {len(unread) - 1} more)" if len(unread) > 1 else "")
        )
    return decoder


def make_decoder(source: TensorSource, ranks: Ranks = ALONE) -> tuple[Module, DecoderConfig]:
    """The module tree that a checkpoint's config asks for, whatever tensors there are; and the config as it was read.

    Raises:
        UnsupportedModelError: an architecture, or a feature of it, that is not implemented.
        ModelError: the config contradicts itself.
        ConfigError: so many ranks cannot share a linear evenly.
    """
    if source.architecture not in FAMILIES:
        raise UnsupportedModelError(
            f"{source.path.name}: architecture {source.architecture!r} is not supported; "
            f"supported are: {', '.join(sorted(FAMILIES))}"
        )
    config = replace(read_config(source, DEFAULTS.get(source.architecture)), ranks=ranks)
    return FAMILIES[source.architecture](config).named(), config


def match_tensors(decoder: Module, source: TensorSource) -> tuple[dict[str, str], list[str]]:
    """Tensors that the checkpoint lacks, with the parameter that needs each; and those that no parameter reads."""
    present = set(source.names())
    needed = {t: p.name for p in decoder.parameters() for t in p.checkpoint_tensors}
    missing = {name: parameter for name, parameter in needed.items() if name not in present}
    return missing, [name for name in source.names() if name not in needed and not UNUSED_TENSORS.search(name)]
