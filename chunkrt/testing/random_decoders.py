"""Small decoders with random weights, generated on the fly for `check_backend`: one like Llama, and a hybrid with all
kinds of layers that Llama lacks. No model has the hybrid's structure, but a backend may have to run each of its layers.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.checkpoints.source import BlockTensor, TensorInfo
from chunkrt.compile.calibrate import calibrate
from chunkrt.engine_directory.store import WeightStore
from chunkrt.engine_directory.weights import settle, write_weights
from chunkrt.errors import ModelError
from chunkrt.graph.decoders import build_decoder
from chunkrt.graph.decoders.config import DecoderConfig, read_config
from chunkrt.graph.decoders.experts import gated_mixture
from chunkrt.graph.decoders.lfm2 import ShortConvolution
from chunkrt.graph.decoders.llama import Attention, Body, CausalDecoder, FeedForward, Layer, head_norm
from chunkrt.graph.decoders.qwen3_next import DeltaSizes, GatedDeltaRule
from chunkrt.graph.modules import Module
from chunkrt.graph.ops import trace
from chunkrt.graph.partition import Planned, cut_shadowed, partition
from chunkrt.graph.plan import Plan
from chunkrt.quant.scheme import Scheme

CONFIG: Mapping[str, Any] = {
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
"""Sizes that no vector width divides. No sum has more than 64 products."""

CONFIG_IN_BLOCKS: Mapping[str, Any] = {**CONFIG, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
"""Sizes with depths that are multiples of 32, for blocks."""


class RandomCheckpoint:
    """A `TensorSource` of random tensors, drawn from a seed on access: those of the Llama family by default.

    Linears have a gain of about 1.2, and norms are about 1, so that attention and logits are not trivial.
    """

    architecture = "llama"

    def __init__(
        self,
        config: Mapping[str, Any] = CONFIG,
        *,
        seed: int = 0,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.path = Path("random")
        self.config = config
        self.shapes = dict(shapes or _llama_tensors(config))
        self._seed = seed

    def names(self) -> Sequence[str]:
        """See `TensorSource`."""
        return list(self.shapes)

    def info(self, name: str) -> TensorInfo:
        """See `TensorSource`."""
        if name not in self.shapes:
            raise ModelError(f"{self.path.name}: there is no tensor {name}")
        return TensorInfo(shape=self.shapes[name], stored_as="F32")

    def read(self, name: str) -> NDArray[np.float32]:
        """See `TensorSource`."""
        shape = self.info(name).shape
        drawn = np.random.default_rng([self._seed, zlib.crc32(name.encode())]).standard_normal(shape, np.float32)
        if len(shape) == 2:
            return drawn * np.float32(1.2 / shape[1] ** 0.5)
        return drawn * np.float32(0.2) + np.float32(name.endswith("norm.weight"))

    def read_blocks(self, name: str) -> BlockTensor | None:
        """See `TensorSource`; always None."""
        return None

    def stored(self, name: str) -> NDArray[np.uint8]:
        """See `TensorSource`."""
        return self.read(name).reshape(-1).view(np.uint8)


@dataclass(frozen=True, kw_only=True)
class RandomDecoder:
    """A plan without shadows, and for each scheme the plan with its shadows, and the weights.

    Attributes:
        schemes: schemes by name, adapted to the checkpoint: linears whose depth is not divisible into blocks keep 8
            bits.
    """

    plan: Plan
    schemes: Mapping[str, Scheme]
    plans: Mapping[str, Plan]
    weights: Mapping[str, WeightStore]


def random_decoder(
    schemes: Sequence[Scheme],
    config: Mapping[str, Any] = CONFIG,
    family: Callable[[DecoderConfig], Module] | None = None,
) -> RandomDecoder:
    """Build, cut and quantise a decoder as the compiler does, by default one of the Llama family."""
    source = RandomCheckpoint(config)
    if family is None:
        decoder = build_decoder(source)
    else:
        decoder = family(read_config(source)).named()
        shapes = {name: shape for p in decoder.parameters() for name, shape in p.checkpoint_tensors.items()}
        source = RandomCheckpoint(config, shapes=shapes)
    plan = partition(trace(decoder), family=source.architecture)
    planned = Planned(source=source, decoder=decoder, plan=plan)
    settled = {scheme.name: settle(planned, scheme) for scheme in schemes}
    token_ids = np.random.default_rng(0).integers(0, plan.vocab_size, plan.context_length)
    calibration = calibrate(plan, planned.load, token_ids, model="random")
    plans, weights = {}, {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for scheme in settled.values():
            graph = trace(decoder)
            cut_shadowed(graph, scheme.is_shadowed)
            plans[scheme.name] = cut = partition(graph, family=source.architecture)
            path = Path(folder) / f"{scheme.name}.safetensors"
            write_weights(cut, scheme, planned.load, path, load_rotary=planned.load_rotary, calibration=calibration)
            weights[scheme.name] = WeightStore.open(path).with_tables(cut)  # the mapping outlives the file
    return RandomDecoder(plan=plan, schemes=settled, plans=plans, weights=weights)


def _llama_tensors(config: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query, key = (config[n] * config["head_dim"] for n in ("num_attention_heads", "num_key_value_heads"))
    tensors: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (config["vocab_size"], hidden))]
    attention = {"q_proj": (query, hidden), "k_proj": (key, hidden), "v_proj": (key, hidden), "o_proj": (hidden, query)}
    feed_forward = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    for layer in (f"model.layers.{i}" for i in range(config["num_hidden_layers"])):
        tensors += [(f"{layer}.{norm}.weight", (hidden,)) for norm in ("input_layernorm", "post_attention_layernorm")]
        for block, linears, has_bias in (
            ("self_attn", attention, config["attention_bias"]),
            ("mlp", feed_forward, config["mlp_bias"]),
        ):
            tensors += [(f"{layer}.{block}.{name}.weight", shape) for name, shape in linears.items()]
            tensors += [(f"{layer}.{block}.{name}.bias", shape[:1]) for name, shape in linears.items() if has_bias]
    tensors.append(("model.norm.weight", (hidden,)))
    if not config["tie_word_embeddings"]:
        tensors.append(("lm_head.weight", (config["vocab_size"], hidden)))
    return tensors


HYBRID_CONFIG: Mapping[str, Any] = {
    **CONFIG,
    "num_hidden_layers": 3,
    "conv_bias": True,
    "conv_L_cache": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
    "sliding_window": 7,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 22,
    "shared_expert_intermediate_size": 18,
}
"""Sizes that are as small and uneven as those of the Llama decoder; the window is longer than one chunk."""


def hybrid(config: DecoderConfig) -> Module:
    """Return a decoder with a short convolution, a gated delta rule with a mixture of experts, and windowed attention
    with head norms, a soft cap of scores and sinks.
    """
    rope = config.rotary_tables()
    delta_rule = GatedDeltaRule(config, DeltaSizes.of(config), is_grouped=False)
    attention = Attention(
        config, rope, norm=head_norm(config), soft_cap=1.5, has_sinks=True, window=config.sliding_window
    )
    layers = [
        Layer(config, ShortConvolution(config), FeedForward(config)),
        Layer(config, delta_rule, gated_mixture(config)),
        Layer(config, attention, FeedForward(config)),
    ]
    return CausalDecoder(config, Body(config, rope, layers))
