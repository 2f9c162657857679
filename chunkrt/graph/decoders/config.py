"""Configuration of a decoder family, read from Hugging Face's config keys and validated.

A key that would change the result and is not implemented is refused by name; no such key is silently ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from chunkrt.checkpoints.source import TensorSource
from chunkrt.errors import ModelError, UnsupportedModelError
from chunkrt.graph.ops import DualChunks
from chunkrt.graph.parallel import HeadShare, share_heads
from chunkrt.graph.plan import ALONE, Ranks
from chunkrt.graph.rope import LARGEST_FLOAT, LONGEST_CONTEXT, RotaryTables, rotary_tables

LARGEST_SIZE = 2**20
"""Limit of all counts of a config except positions. A config that exceeds it is damaged; the check prevents the
allocation of huge arrays.
"""
ROPE_DIVISOR = "rope_freqs.weight"
EPSILONS = ("norm_eps", "layer_norm_epsilon")
"""Keys of the norms' epsilon in families whose defaults contain them."""
STACKS_OF_EXPERTS = (".experts.gate_up_proj", ".block_sparse_moe.input_linear.weight")
"""Endings of the names of tensors with the gates and ups of all experts of a layer."""
DUAL_CHUNKS = "dual_chunk_attention_config"
"""Key of dual chunk attention (see `ops.DualChunks`), which Transformers ignores."""
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "fatrelu": "fatrelu",
    "xielu": "xielu",
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate"), "gelu_tanh"),
}
"""Activations by Hugging Face's names. The variants of the tanh approximation differ only in how they are computed
(Transformers, activations.py: NewGELUActivation, FastGELUActivation, AccurateGELUActivation)."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Fields common to most families: sizes in elements, counts, and switches; names as in the glossary.

    Attributes:
        activation: one of the values of ACTIVATIONS.
        sliding_window: number of keys that a row of a layer with a window sees; 0 if no layer has a window, or if the
            window covers the context.
        norm_offset: offset that norms add to their weights; 1 in families that multiply by 1 + w, unless the checkpoint
            holds that sum.
        residual_factor: factor of the results that layers add to the residual stream.
        logit_factor: factor of the logits.
        has_stacked_experts: whether the checkpoint stores all experts of a layer in two tensors.
        raw: the complete config; a family reads its own keys by `count`, `number`, `flag` and `layer_types`.
        where: the checkpoint's name, for messages.
        ranks: the rank that this decoder is for; sizes and counts cover all ranks together.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    activation: str = "silu"
    sliding_window: int = 0
    norm_offset: float = 0.0
    residual_factor: float = 1.0
    logit_factor: float = 1.0
    rope_divisor: str | None = None
    has_stacked_experts: bool = False
    raw: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""
    ranks: Ranks = ALONE

    @cached_property
    def heads(self) -> HeadShare:
        """Attention heads of the decoder's rank."""
        return share_heads(self.num_heads, self.num_kv_heads, self.head_dim, self.ranks)

    def rotary_tables(self, *, may_be_partial: bool = False) -> RotaryTables:
        """Make the rotary tables of configs with one rule for all layers.

        Args:
            may_be_partial: whether Transformers reads `partial_rotary_factor` in this family.

        Raises:
            UnsupportedModelError, ModelError: see `rope.inverse_frequencies`.
        """
        return rotary_tables(
            self.raw,
            self.head_dim,
            self.context_length,
            divisor=self.rope_divisor,
            may_be_partial=may_be_partial,
            dual_chunks=self.dual_chunks(),
        )

    def dual_chunks(self) -> DualChunks | None:
        """Return the sizes of dual chunk attention; None without it. Raises ModelError if a size is invalid."""
        if (sizes := self.raw.get(DUAL_CHUNKS)) is None:
            return None
        if not isinstance(sizes, Mapping):
            raise ModelError(f"{self.where}: {DUAL_CHUNKS} is {sizes!r}, expected a table of numbers")
        where, most = f"{self.where}, {DUAL_CHUNKS}", LONGEST_CONTEXT
        limit, local = (_count(sizes, where, key, most=most) for key in ("chunk_size", "local_size"))
        long_from = _count(sizes, where, "original_max_position_embeddings", default=0, least=0, most=most)
        if local >= limit:
            raise ModelError(f"{where}: local_size is {local}, expected less than the chunk_size of {limit}")
        return DualChunks(
            period=limit - local,
            limit=limit,
            context_length=self.context_length,
            long_context_from=long_from if 0 < long_from < self.context_length else None,
        )

    def rotary_tables_by_kind(self, base: Mapping[str, Mapping[str, Any]]) -> dict[str, RotaryTables]:
        """Make the rotary tables of each kind of layers.

        Args:
            base: parameters of each kind, which the kind's section of `rope_parameters` overrides.

        Raises:
            UnsupportedModelError, ModelError: a section is invalid; or see `rope.inverse_frequencies`.
        """
        sections = self.raw.get("rope_parameters") or {}
        if not isinstance(sections, Mapping) or not sections.keys() <= base.keys():
            raise UnsupportedModelError(
                f"{self.where}: rope_parameters = {sections!r}, expected a section for {tuple(base)}",
                feature="rope_parameters",
            )
        if wrong := [section for section in sections.values() if not isinstance(section, Mapping | None)]:
            raise ModelError(f"{self.where}: rope_parameters has {wrong[0]!r}, expected a table of numbers")

        def tables(kind: str) -> RotaryTables:
            parameters = {**base[kind], **(sections.get(kind) or {})}
            known = {"rope_parameters": parameters}
            return rotary_tables(known, self.head_dim, self.context_length, may_be_partial=False)

        return {kind: tables(kind) for kind in base}

    def rope_scaling(self) -> Mapping[str, Any]:
        """Return the config's `rope_scaling`, empty if it has none. Raises ModelError if it is not a table."""
        scaling = self.raw.get("rope_scaling") or {}
        if not isinstance(scaling, Mapping):
            raise ModelError(f"{self.where}: rope_scaling is {scaling!r}, expected a table of numbers")
        return scaling

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a whole number, positive unless `least` is 0. Raises ModelError if it is invalid, or missing without a
        default."""
        return _count(self.raw, self.where, key, default, least=least)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number. Raises ModelError if it is invalid, or missing without a default."""
        value = self.raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST_FLOAT:
            raise ModelError(f"{self.where}: {key} is {value!r}, expected a positive number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a boolean key. Raises ModelError if it is neither true nor false."""
        return _flag(self.raw, self.where, key, default)

    def layer_indices(self, key: str) -> Sequence[int]:
        """Return a key's list of layer indices; None if the config lacks the key. Raises ModelError if the value is not
        such a list.
        """
        indices = self.raw.get(key)
        if indices is None:
            return ()
        if not isinstance(indices, list | tuple) or any(type(index) is not int for index in indices):
            raise ModelError(f"{self.where}: {key} is {indices!r}, expected a list of layers' indices")
        return indices

    def layer_types(self, default: Sequence[str], known: Collection[str]) -> Sequence[str]:
        """Return the kind of each layer from the config's `layer_types`.

        Raises:
            ModelError: `layer_types` is not a list with a word for each layer.
            UnsupportedModelError: the family does not support a word.
        """
        types = self.raw.get("layer_types") or default
        if not isinstance(types, Sequence) or len(types) != self.num_layers:
            raise ModelError(
                f"{self.where}: layer_types is {types!r}, expected a word for each of {self.num_layers} layers"
            )
        if unknown := [kind for kind in types if kind not in known]:
            raise UnsupportedModelError(
                f"{self.where}: a layer is {unknown[0]!r}; supported: {', '.join(known)}", feature="layer_types"
            )
        return types

    def sliding_layers(self, rule: Callable[[int], bool]) -> list[bool]:
        """Return for each layer whether it has a sliding window, by `layer_types` or, if that key is absent, by a rule
        on the layer's index.

        Raises:
            ModelError, UnsupportedModelError: see `layer_types`.
        """
        by_rule = ["sliding_attention" if rule(layer) else "full_attention" for layer in range(self.num_layers)]
        types = self.layer_types(by_rule, ("full_attention", "sliding_attention"))
        return [kind == "sliding_attention" for kind in types]

    def refuse(self, **settings: bool) -> None:
        """Raise UnsupportedModelError for features in the config that the family does not support."""
        if asked := [name for name, is_asked in settings.items() if is_asked]:
            value = self.raw.get(asked[0])
            raise UnsupportedModelError(
                f"{self.where}: {asked[0]} = {value!r} is not supported in this family", feature=asked[0]
            )


def read_config(source: TensorSource, defaults: Mapping[str, Any] | None = None) -> DecoderConfig:
    """Read and check the config of a checkpoint.

    Args:
        defaults: Transformers' values for keys that a family's config omits, if they differ from those of most
            families.

    Raises:
        ModelError: a key is missing or invalid.
        UnsupportedModelError: a key requires an activation that is not implemented.
    """
    config, where = {**(defaults or {}), **source.config}, source.path.name
    if config.get("quantization_config"):
        raise UnsupportedModelError(
            f"{where}: the checkpoint is quantised by another library; use the float checkpoint or a GGUF",
            feature="quantization_config",
        )
    hidden, heads = _count(config, where, "hidden_size"), _count(config, where, "num_attention_heads")
    kv_heads = _count(config, where, "num_key_value_heads", default=heads)
    head_dim = _count(config, where, "head_dim", default=hidden // heads)
    if heads % kv_heads:
        raise ModelError(f"{where}: {heads} query heads cannot share {kv_heads} key/value heads evenly")
    check_size(heads * head_dim, where, "num_attention_heads * head_dim")
    if head_dim % 2:
        raise ModelError(f"{where}: head_dim is {head_dim}; RoPE needs an even one")
    kinds = config.get("layers_block_type")
    num_kinds = len(kinds) if isinstance(kinds, list) else None
    if (layers := _count(config, where, "num_hidden_layers", default=num_kinds)) > len(source.names()):
        raise ModelError(
            f"{where}: the config claims {layers} layers, but the checkpoint has {len(source.names())} tensors"
        )
    context = _context_length(config, where)
    feed_forward = config.get("block_ff_dim") or config.get("moe_intermediate_size")
    return DecoderConfig(
        hidden_size=hidden,
        intermediate_size=_count(config, where, "intermediate_size", default=feed_forward),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_count(config, where, "vocab_size"),
        context_length=context,
        rms_norm_eps=_epsilon(
            config, where, next((key for key in EPSILONS if key in (defaults or {})), "rms_norm_eps")
        ),
        tie_word_embeddings=_flag(config, where, "tie_word_embeddings"),
        activation=_activation(config, where),
        sliding_window=_sliding_window(config, where, context),
        norm_offset=_norm_offset(config, where),
        rope_divisor=ROPE_DIVISOR if ROPE_DIVISOR in source.names() else None,
        has_stacked_experts=any(name.endswith(STACKS_OF_EXPERTS) for name in source.names()),
        raw=config,
        where=where,
    )


def _count(
    config: Mapping[str, Any],
    where: str,
    key: str,
    default: int | None = None,
    *,
    least: int = 1,
    most: int = LARGEST_SIZE,
) -> int:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"{where}: the config lacks {key!r}")
    if type(value) is not int or value < least:
        raise ModelError(f"{where}: {key} is {value!r}, expected a {'positive ' if least else ''}whole number")
    check_size(value, where, key, most=most)
    return value


def _flag(config: Mapping[str, Any], where: str, key: str, default: bool = False) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"{where}: {key} is {value!r}, expected true or false")
    return default if value is None else value


def check_size(size: float, where: str, what: str, *, most: int = LARGEST_SIZE) -> None:
    """Raise ModelError if a size exceeds that of any model."""
    if size > most:
        raise ModelError(f"{where}: {what} is {size}; expected at most {most}")


def _epsilon(config: Mapping[str, Any], where: str, key: str) -> float:
    value = config.get(key, 1e-6)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ModelError(f"{where}: {key} is {value!r}, expected a number in [0, 1)")
    return float(value)


def _norm_offset(config: Mapping[str, Any], where: str) -> float:
    value = config.get("norm_offset", 0)
    if value not in (0, 1):
        raise ModelError(f"{where}: norm_offset is {value!r}, expected 0 or 1")
    return float(value)


def _context_length(config: Mapping[str, Any], where: str) -> int:
    """Return the context length. An implausible length is refused, because caches and tables may be allocated for
    it.
    """
    key = "max_position_embeddings"
    length = config.get(key)
    if type(length) is int and length > LONGEST_CONTEXT:
        raise ModelError(f"{where}: the config claims a context of {length} tokens; expected at most {LONGEST_CONTEXT}")
    return _count(config, where, key, most=LONGEST_CONTEXT)


def _activation(config: Mapping[str, Any], where: str) -> str:
    key = "hidden_activation" if config.get("hidden_activation") else "hidden_act"
    name = config.get(key) or "silu"
    if name == "gelu" and config.get("has_legacy_gelu"):
        name = "gelu_pytorch_tanh"  # the name in the first releases of Gemma; Transformers replaces it as well
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"{where}: hidden_act {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}", feature=key
        )
    return ACTIVATIONS[name]


def _sliding_window(config: Mapping[str, Any], where: str, context: int) -> int:
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return 0
    window = _count(config, where, "sliding_window", most=LONGEST_CONTEXT)
    return window if window < context else 0
