"""The decoder families, by Hugging Face's model_type, and the construction of a decoder from a checkpoint."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

from chunkrt.checkpoints.source import LEFT_OUT, TensorSource, are_equal
from chunkrt.errors import ChunkrtError, ModelError, UnsupportedModelError
from chunkrt.graph.decoders import (
    apertus,
    exaone4,
    falcon_h1,
    gemma,
    gemma4,
    glm,
    gpt2,
    gpt_oss,
    granite,
    latent,
    lfm2,
    lfm3,
    llama,
    mamba,
    minicpm,
    moe,
    nemotron_h,
    olmo,
    phi3,
    qwen,
    qwen3_next,
    selective,
    smollm3,
)
from chunkrt.graph.decoders.config import DUAL_CHUNKS, DecoderConfig, read_config
from chunkrt.graph.decoders.llama import Attention, CausalDecoder
from chunkrt.graph.modules import Module, Parameter
from chunkrt.graph.parallel import LinearBase
from chunkrt.graph.plan import ALONE, Ranks
from chunkrt.graph.rope import RotaryTables
from chunkrt.plugins import Plugin, PluginGroup

log = logging.getLogger(__name__)

Builder = Callable[[DecoderConfig], Module]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family's builder of module trees.

    defaults: Transformers' values for keys that a config omits, if they differ from those of most families.
    """

    build: Builder
    defaults: Mapping[str, Any] = field(default_factory=dict)


FAMILIES = {
    "apertus": Family(build=apertus.apertus, defaults=apertus.DEFAULTS),
    "bamba": Family(build=mamba.bamba, defaults=mamba.BAMBA_DEFAULTS),
    "deepseek_v2": Family(build=latent.deepseek_v2, defaults=latent.V2_DEFAULTS),
    "deepseek_v3": Family(build=latent.deepseek_v3, defaults=latent.V3_DEFAULTS),
    "ernie4_5": Family(build=glm.ernie4_5, defaults=glm.ERNIE_DEFAULTS),
    "ernie4_5_moe": Family(build=moe.ernie4_5_moe, defaults=moe.ERNIE_DEFAULTS),
    "exaone4": Family(build=exaone4.exaone4, defaults=exaone4.DEFAULTS),
    "falcon_h1": Family(build=falcon_h1.falcon_h1, defaults=falcon_h1.DEFAULTS),
    "falcon_mamba": Family(build=selective.falcon_mamba, defaults=selective.DEFAULTS),
    "gemma": Family(build=gemma.gemma, defaults=gemma.DEFAULTS),
    "gemma2": Family(build=gemma.gemma2, defaults=gemma.GEMMA2_DEFAULTS),
    "gemma3_text": Family(build=gemma.gemma3, defaults=gemma.GEMMA3_DEFAULTS),
    "gemma4_text": Family(build=gemma4.gemma4, defaults=gemma4.DEFAULTS),
    "gemma4_unified_text": Family(build=gemma4.gemma4, defaults=gemma4.UNIFIED_DEFAULTS),
    "glm": Family(build=glm.glm, defaults=glm.DEFAULTS),
    "glm4": Family(build=glm.glm4, defaults=glm.DEFAULTS),
    "glm4_moe": Family(build=moe.glm4_moe, defaults=moe.GLM_DEFAULTS),
    "glm4_moe_lite": Family(build=latent.glm4_moe_lite, defaults=latent.GLM_DEFAULTS),
    "gpt2": Family(build=gpt2.gpt2, defaults=gpt2.DEFAULTS),
    "gpt_bigcode": Family(build=gpt2.gpt_bigcode, defaults=gpt2.BIGCODE_DEFAULTS),
    "gpt_oss": Family(build=gpt_oss.gpt_oss, defaults=gpt_oss.DEFAULTS),
    "granite": Family(build=granite.granite),
    "granitemoe": Family(build=granite.granite_moe, defaults=granite.MOE_DEFAULTS),
    "granitemoeshared": Family(build=granite.granite_moe, defaults=granite.MOE_DEFAULTS),
    "granitemoehybrid": Family(build=granite.granite_hybrid, defaults=granite.HYBRID_DEFAULTS),
    "helium": Family(build=glm.helium, defaults=glm.HELIUM_DEFAULTS),
    "lfm2": Family(build=lfm2.lfm2, defaults=lfm2.DEFAULTS),
    "lfm2_moe": Family(build=lfm2.lfm2_moe, defaults=lfm2.MOE_DEFAULTS),
    "lfm3": Family(build=lfm3.lfm3, defaults=lfm3.DEFAULTS),
    "llama": Family(build=llama.llama),
    "mamba": Family(build=selective.mamba, defaults=selective.DEFAULTS),
    "mamba2": Family(build=mamba.mamba2, defaults=mamba.DEFAULTS),
    "minicpm": Family(build=minicpm.minicpm, defaults=minicpm.DEFAULTS),
    "minicpm3": Family(build=latent.minicpm3, defaults=latent.MINICPM3_DEFAULTS),
    "mistral": Family(build=llama.mistral, defaults=llama.MISTRAL_DEFAULTS),
    "nemotron_h": Family(build=nemotron_h.nemotron_h, defaults=nemotron_h.DEFAULTS),
    "olmo2": Family(build=olmo.olmo2, defaults=olmo.DEFAULTS),
    "olmo3": Family(build=olmo.olmo3, defaults=olmo.OLMO3_DEFAULTS),
    "olmoe": Family(build=moe.olmoe, defaults=moe.OLMOE_DEFAULTS),
    "opt": Family(build=gpt2.opt, defaults=gpt2.OPT_DEFAULTS),
    "phi3": Family(build=phi3.phi3, defaults=phi3.DEFAULTS),
    "qwen2": Family(build=qwen.qwen2, defaults=qwen.DEFAULTS),
    "qwen2_moe": Family(build=moe.qwen2_moe, defaults=moe.QWEN2_DEFAULTS),
    "qwen3": Family(build=qwen.qwen3, defaults=qwen.QWEN3_DEFAULTS),
    "qwen3_5_moe_text": Family(build=qwen3_next.qwen3_5, defaults=qwen3_next.MOE_DEFAULTS),
    "qwen3_5_text": Family(build=qwen3_next.qwen3_5, defaults=qwen3_next.DEFAULTS),
    "qwen3_moe": Family(build=moe.qwen3_moe, defaults=moe.QWEN3_DEFAULTS),
    "qwen3_next": Family(build=qwen3_next.qwen3_next, defaults=qwen3_next.DEFAULTS),
    "smollm3": Family(build=smollm3.smollm3, defaults=smollm3.DEFAULTS),
    "youtu": Family(build=latent.youtu, defaults=latent.YOUTU_DEFAULTS),
}

PREDICTION_TENSORS = re.compile(r"^(model\.)?mtp[._]")
LAYER_TENSORS = re.compile(r"^(model\.)?layers\.(\d+)\.")

PLUGINS: PluginGroup[Builder] = PluginGroup("chunkrt.decoders", error=UnsupportedModelError, own=FAMILIES)
"""Plug-ins' builders by model_type. A builder's optional attribute `defaults` holds the family's defaults."""

BODY_PREFIXES = (
    *("model.", "backbone.", "model.language_model.", "language_model.model.", "language_model."),
    *("model.decoder.", "decoder.", ""),
)
"""Prefixes of the body's tensors: "backbone." is that of Mamba and Nemotron-H, the last two before "" are those of OPT,
"" is that of Transformers' `AutoModel`, and the others are those of composite models."""
GPT_PREFIXES = ("transformer.", "")
GPT_NAMES = {"wte": "embed_tokens", "wpe": "embed_positions", "h": "layers", "ln_f": "norm"}
"""Prefixes and names of the body's parts in GPT-2 and GPT-BigCode."""
INNER_HEAD = "language_model.lm_head."

UNUSED_TENSORS = re.compile(
    r"rotary_emb\.inv_freq|^(transformer\.)?h\.\d+\.attn\.(masked_)?bias$|^(language_model\.)?lm_head\.weight$"
)
"""Tensors that may be ignored: buffers of old exports that the config determines (GPT-2's are causal masks), and the
copy of a tied LM head."""


def build_decoder(source: TensorSource, ranks: Ranks = ALONE) -> Module:
    """Build the module tree of a checkpoint; every parameter is named and matched with the checkpoint's tensors.

    Args:
        ranks: the rank of this process, and the number of ranks.

    Raises:
        UnsupportedModelError: the architecture, or a feature of it, is not implemented.
        ModelError: a tensor is missing, has a shape that differs from the config's, or is not read.
        ConfigError: the ranks cannot share a linear evenly.
    """
    decoder, config = make_decoder(source, ranks)
    missing, unread = match_tensors(decoder.parameters(), source)
    with naming_plugin(source.architecture):
        if missing:
            name, parameter = next(iter(missing.items()))
            raise ModelError(
                f"{source.path.name}: tensor {name} is missing, needed by {parameter}"
                + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else "")
            )
        if unread:
            raise ModelError(
                f"{source.path.name}: tensor {unread[0]} is in the checkpoint, but no part of the "
                f"{source.architecture} decoder reads it"
                + (f" (and {len(unread) - 1} more)" if len(unread) > 1 else "")
            )
        for checked in decoder.parameters():  # before tables are made, whose sizes come from the config alone
            checked.check(source)
    if config.raw.get(DUAL_CHUNKS) is not None:
        config.refuse(**{DUAL_CHUNKS: not _has_dual_chunks(decoder)})
    if left_out := prediction_tensors(source):
        layer = LAYER_TENSORS.match(left_out[0])
        log.warning(LEFT_OUT, source.path.name, len(left_out), f"{layer[0]}* and later" if layer else "mtp.*")
    return decoder


def _has_dual_chunks(decoder: Module) -> bool:
    """Return whether all attention of a decoder is dual chunk attention. Layers with a window cannot have it."""
    modules = list(decoder.modules())
    tables = [module for module in modules if isinstance(module, RotaryTables)]
    have_windows = any(isinstance(module, Attention) and module.window for module in modules)
    return bool(tables) and all(table.dual_chunks for table in tables) and not have_windows


def family_names() -> tuple[str, ...]:
    """Return every known model_type, including those of plug-ins."""
    return (*FAMILIES, *PLUGINS.names)


def describe_family(model_type: str) -> str:
    """Return a noun phrase for a family in errors, without an article; it names the plug-in that provides the
    family."""
    if plugin := PLUGINS.find(model_type):
        return str(plugin)
    return f"family {model_type!r}" if model_type in FAMILIES else "decoder"


@contextmanager
def naming_plugin(model_type: str) -> Iterator[None]:
    """Add the plug-in that provides a family to a ModelError that is raised inside the context."""
    try:
        yield
    except ModelError as error:
        plugin = PLUGINS.find(model_type)
        if plugin is None or type(error) is not ModelError or str(plugin) in str(error):
            raise
        raise ModelError(f"{error}; the decoder is built by the {plugin}") from error


def find_family(model_type: str) -> Family | None:
    """Return the family of a model_type, chunkrt's or a plug-in's; None if the model_type is unknown.

    Raises:
        UnsupportedModelError: the plug-in is broken.
    """
    if plugin := PLUGINS.find(model_type):
        build = plugin.load()
        return Family(build=_told(plugin, build), defaults=getattr(build, "defaults", {}))
    return FAMILIES.get(model_type)


def _told(plugin: Plugin[Builder], build: Builder) -> Builder:
    """Return a plug-in's builder, wrapped so that its errors name the plug-in."""

    @wraps(build)
    def built(config: DecoderConfig) -> Module:
        try:
            decoder = build(config)
            if not isinstance(decoder, Module):
                raise TypeError(f"it returned {decoder!r}, expected a Module")
        except ChunkrtError:
            raise
        except Exception as error:  # third-party code may raise any exception
            what = f"{type(error).__name__}: {error}"
            raise UnsupportedModelError(f"the {plugin} cannot build this checkpoint: {what}; repair it") from error
        return decoder

    return built


def make_decoder(source: TensorSource, ranks: Ranks = ALONE) -> tuple[Module, DecoderConfig]:
    """Build the module tree of a checkpoint's config, regardless of its tensors; also return the config as it was read.

    Raises:
        UnsupportedModelError: the architecture, or a feature of it, is not implemented.
        ModelError: the config contradicts itself.
        ConfigError: the ranks cannot share a linear evenly.
    """
    if (family := find_family(source.architecture)) is None:
        raise UnsupportedModelError(
            f"{source.path.name}: architecture {source.architecture!r} is not supported; "
            f"supported: {', '.join(sorted(family_names()))}"
        )
    config = replace(read_config(source, family.defaults), ranks=ranks)
    decoder = family.build(config)
    with naming_plugin(source.architecture):
        decoder.named()
    find_tensors(decoder, source)
    return decoder, config


def find_tensors(decoder: Module, source: TensorSource) -> None:
    """Make a decoder's parameters read tensors under the checkpoint's names.

    A prefix of the names may differ. If the checkpoint has only one tensor for a tied LM head and its table, both
    parameters read it. If the checkpoint has two tensors that differ, the LM head was trained separately and the config
    is stale: each parameter reads its own tensor, and a warning is logged. Transformers 5 and llama.cpp's converter do
    the same.
    """
    found = stored_names(source)
    for module in decoder.modules():
        if not isinstance(module, LinearBase) or module.tied_to is None:
            continue
        own, table = f"{module.path}.weight", f"{module.tied_to.path}.weight"
        if own not in found:
            continue
        if table not in found:
            found[table] = found[own]
        elif not are_equal(source, found[own], found[table]):
            log.warning("%s: the config ties %s to %s, but they differ; both are used", source.path.name, own, table)
            module.tie_to(None)
    if _is_body_alone(source) and isinstance(decoder, CausalDecoder) and decoder.lm_head.tied_to is None:
        log.warning("%s has no LM head (lm_head.weight): it computes embeddings, and no logits", source.path.name)
        decoder.leave_out_head()
    for parameter in decoder.parameters():
        parameter.checkpoint_tensors = {found.get(n, n): shape for n, shape in parameter.checkpoint_tensors.items()}
        parameter.replaces = tuple(found.get(name, name) for name in parameter.replaces)


def stored_names(source: TensorSource) -> dict[str, str]:
    """Map each tensor's name in the checkpoint, and its name in a causal text decoder, to the name in the
    checkpoint.
    """
    names = source.names()
    stored = {name: name for name in names}
    prefix = next((p for p in BODY_PREFIXES if any(name.startswith(f"{p}layers.0.") for name in names)), None)
    if prefix is None:
        return stored | _names_of_gpt(names)
    for name in names:
        if name.startswith(INNER_HEAD):
            stored.setdefault(f"lm_head.{name.removeprefix(INNER_HEAD)}", name)
        elif name.startswith(prefix):
            stored.setdefault(f"model.{name.removeprefix(prefix)}", name)
    return stored


def _names_of_gpt(names: Iterable[str]) -> dict[str, str]:
    """Map names in a causal text decoder to those of GPT-2's checkpoints."""
    names = list(names)
    prefix = next((p for p in GPT_PREFIXES if any(name.startswith(f"{p}h.0.") for name in names)), None)
    if prefix is None:
        return {}
    found: dict[str, str] = {}
    for name in names:
        inner = name.removeprefix(prefix)
        part, _, rest = inner.partition(".")
        if name.startswith(prefix) and part in GPT_NAMES:
            found |= {f"model.{GPT_NAMES[part]}.{rest}": name, f"{GPT_PREFIXES[0]}{inner}": name}
    return found


def _is_body_alone(source: TensorSource) -> bool:
    """Return whether a checkpoint lacks an LM head, like the embedding models that Transformers' `AutoModel` saves."""
    names = source.names()
    return "embed_tokens.weight" in names and "lm_head.weight" not in names


def match_tensors(parameters: Iterable[Parameter], source: TensorSource) -> tuple[dict[str, str], list[str]]:
    """Return two results: missing tensors with the parameters that need them, and tensors that no parameter reads."""
    present, parameters = set(source.names()), list(parameters)
    needed = {t: p.name for p in parameters for t in p.checkpoint_tensors}
    missing = {name: parameter for name, parameter in needed.items() if name not in present}
    known = needed.keys() | {name for p in parameters for name in p.replaces}
    unread = [name for name in source.names() if name not in known and not UNUSED_TENSORS.search(name)]
    left_out = set(prediction_tensors(source))
    return missing, [name for name in unread if name not in left_out]


def prediction_tensors(source: TensorSource) -> list[str]:
    """Return the tensors of heads that predict several tokens at once, which Transformers omits as well.

    DeepSeek-V3 and GLM-4.5 store such heads as layers after the last one, and the config states their number.
    """
    first, num_heads = (source.config.get(key) or 0 for key in ("num_hidden_layers", "num_nextn_predict_layers"))
    are_layers = type(first) is int and type(num_heads) is int

    def predicts(name: str) -> bool:
        layer = LAYER_TENSORS.match(name)
        is_later = are_layers and layer is not None and first <= int(layer[2]) < first + num_heads
        return is_later or PREDICTION_TENSORS.match(name) is not None

    return [name for name in source.names() if predicts(name)]
