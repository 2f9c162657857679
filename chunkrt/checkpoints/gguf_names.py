"""Translation of GGUF's tensor names and metadata keys to Hugging Face's, one table row for each architecture.

Source: llama.cpp's gguf-py/gguf/tensor_mapping.py and convert_hf_to_gguf.py.

Tensors may have another order of rows or columns, or other numbers, than in Hugging Face's folders. Source: llama.cpp's
convert_hf_to_gguf.py and conversion/qwen.py (`Qwen3NextModel`, `_LinearAttentionVReorderBase`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.checkpoints import gguf_keys
from chunkrt.checkpoints.gguf_header import GgufTensor
from chunkrt.checkpoints.gguf_keys import LARGEST_COUNT, Config, Keys, common_config
from chunkrt.checkpoints.source import BLOCK_DEPTH, BlockTensor, Refuse, strictly
from chunkrt.errors import ModelError, QuantizationError, UnsupportedModelError
from chunkrt.plugins import PluginGroup

Float32 = NDArray[np.float32]
Order = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Conversion of one tensor to Hugging Face's layout.

    Attributes:
        rows, columns: for each row or column in Hugging Face's order, its index in the file.
        values: converts the values.
        is_depthwise: True if the file's [C, K] becomes [C, 1, K].
        is_single_row: True if the file's [K] becomes [1, K].
        is_flat: True if the file's axes become one.
    """

    rows: Order | None = None
    columns: Order | None = None
    values: Callable[[Float32], Float32] | None = None
    is_depthwise: bool = False
    is_single_row: bool = False
    is_flat: bool = False

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return Hugging Face's shape for the file's shape. Raises ModelError if the length of an axis differs from
        that of its order.
        """
        for axis, order in ((0, self.rows), (-1, self.columns)):
            if order is not None and (not stored or stored[axis] != len(order)):
                raise ModelError(f"it is {list(stored)}, and axis {axis} should have the length {len(order)}")
        if self.is_flat:
            return (prod(stored),)
        if self.is_single_row and len(stored) == 1:
            return (1, *stored)
        return (stored[0], 1, *stored[1:]) if self.is_depthwise and len(stored) == 2 else stored

    def restore(self, stored: Float32) -> Float32:
        """Return the tensor in Hugging Face's layout, from the file's values."""
        found = stored if self.rows is None else stored[self.rows]
        found = found if self.columns is None else found[..., self.columns]
        found = found if self.values is None else self.values(found)
        return found.reshape(self.shape(stored.shape))

    def restore_blocks(self, stored: BlockTensor) -> BlockTensor:
        """Return a tensor in blocks of 4 bits in Hugging Face's layout.

        Raises:
            QuantizationError: the order would split the columns of one block.
        """
        if self.rows is not None:
            stored = BlockTensor(
                integers=stored.integers[self.rows], scales=stored.scales[self.rows], minima=stored.minima[self.rows]
            )
        if self.columns is None:
            return stored
        blocks = self.columns.reshape(-1, BLOCK_DEPTH)
        if (blocks != blocks[:, :1] + np.arange(BLOCK_DEPTH)).any() or (blocks[:, 0] % BLOCK_DEPTH).any():
            raise QuantizationError("the order of its columns splits blocks of 32; use another scheme")
        of_blocks = blocks[:, 0] // BLOCK_DEPTH
        return BlockTensor(
            integers=stored.integers[:, self.columns],
            scales=stored.scales[:, of_blocks],
            minima=stored.minima[:, of_blocks],
        )


AS_IT_IS = Layout()
DEPTHWISE = Layout(is_depthwise=True)
SINGLE_ROW = Layout(is_single_row=True)


def _logarithm(rate: Float32) -> Float32:
    """Return A_log, which the file stores as -exp(A_log)."""
    with np.errstate(all="ignore"):
        return np.log(-rate)


LOGARITHM = Layout(values=_logarithm)


def rotate_half_rows(num_heads: int, num_rows: int) -> Layout:
    """Return Hugging Face's order (rotate-half) of rows that are in the order of interleaved RoPE (pairs adjacent)."""
    pairs = np.arange(num_rows).reshape(num_heads, -1, 2)
    return Layout(rows=pairs.swapaxes(1, 2).ravel())


def tiled_value_heads(config: Mapping[str, Any]) -> dict[str, Layout]:
    """Return layouts, by GGUF module, of linear attention whose file order has the first value heads of all key heads,
    then the second ones, and so on. Hugging Face groups the value heads of each key head.
    """
    k_heads, v_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if v_heads % k_heads:
        raise ModelError(f"{v_heads} value heads of linear attention cannot share {k_heads} key heads evenly")
    dim, num_before = config["linear_value_head_dim"], 2 * k_heads * config["linear_key_head_dim"]
    if num_before + v_heads * dim > LARGEST_COUNT:
        raise ModelError(f"linear attention of {num_before + v_heads * dim} columns; expected at most {LARGEST_COUNT}")
    heads = np.arange(v_heads).reshape(-1, k_heads).T.ravel()
    of_values = (heads[:, None] * dim + np.arange(dim)).ravel()
    after_keys = np.concatenate([np.arange(num_before), num_before + of_values])
    return {
        "attn_qkv": Layout(rows=after_keys),
        "attn_gate": Layout(rows=of_values),
        "ssm_alpha": Layout(rows=heads),
        "ssm_beta": Layout(rows=heads),
        "ssm_dt": Layout(rows=heads),
        "ssm_a": Layout(rows=heads, values=_logarithm),
        "ssm_conv1d": Layout(rows=after_keys, is_depthwise=True),
        "ssm_out": Layout(columns=of_values),
    }


def _nothing(keys: Keys, config: Config) -> Config:
    return {}


def _as_they_are(config: Config) -> Mapping[str, Layout]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Properties of one `general.architecture`.

    Attributes:
        model: maps GGUF's names of the model's tensors, complete or up to ".weight" or ".bias", to Hugging Face's.
        layer: maps names of a layer's tensors, after "blk.N." in GGUF, to names after "model.layers.N." in Hugging
            Face.
        layers: Hugging Face's name of the list of layers, if it is not "model.layers".
        in_config: tensors that Hugging Face keeps in the config.
        permuted: modules whose rows GGUF reorders for interleaved RoPE, with the config key of their number of heads.
        layouts: returns the layouts of modules that differ in another way.
        refused: metadata keys (after the architecture's name) that would change the result and are not implemented,
            unless
            they are 0.
        config: returns the config keys that the architecture adds to the common keys or replaces, from the metadata and
            the
            common keys.
        by_layer: keys whose values may differ between layers; the common config has those of the first layer.
        is_hybrid: True if some layers have no attention, or no feed-forward.
        has_attention: True if any layer has attention.
        has_layer_norms: True if norms have a mean and a bias.
    """

    model_type: str
    model: Mapping[str, str]
    layer: Mapping[str, str]
    layers: str = "model.layers"
    in_config: Collection[str] = ()
    permuted: Mapping[str, str] = field(default_factory=dict)
    layouts: Callable[[Config], Mapping[str, Layout]] = _as_they_are
    refused: Collection[str]
    config: Callable[[Keys, Config], Config] = _nothing
    by_layer: Collection[str] = ()
    is_hybrid: bool = False
    has_attention: bool = True
    has_layer_norms: bool = False


EACH = "{}"
"""Placeholder for the index of a tensor, in the name of a tensor that stacks several of Hugging Face's.
"""

MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
NORMS_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_INTERLEAVED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
"""Modules that llama.cpp's converter reorders for interleaved RoPE, with the config key of their number of heads."""
WINDOWS = frozenset({"attention.sliding_window"})
"""Keys that are refused in architectures without sliding windows."""

SCALINGS = frozenset(
    (
        "attention.clamp_kqv",
        "attention.max_alibi_bias",
        "attention.scale",
        "attn_logit_softcapping",
        "embedding_scale",
        "expert_count",
        "final_logit_softcapping",
        "logit_scale",
        "residual_scale",
        "rope.scale_linear",
    )
)

_LFM2_LAYER = {
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_DELTA_RULE = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_QWEN3_NEXT_LAYER = {k: v for k, v in LAYER.items() if k != "ffn_norm"} | HEAD_NORMS | _DELTA_RULE
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": f"mlp.experts.{EACH}.gate_proj",
    "ffn_up_exps": f"mlp.experts.{EACH}.up_proj",
    "ffn_down_exps": f"mlp.experts.{EACH}.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_SHARED_EXPERTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_GRANITE_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": f"block_sparse_moe.experts.{EACH}.gate_proj",
    "ffn_up_exps": f"block_sparse_moe.experts.{EACH}.up_proj",
    "ffn_down_exps": f"block_sparse_moe.experts.{EACH}.down_proj",
    "ffn_gate_shexp": "shared_mlp.gate_proj",
    "ffn_up_shexp": "shared_mlp.up_proj",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
_GRANITE_SHARED = {
    "ffn_gate": "shared_mlp.gate_proj",
    "ffn_up": "shared_mlp.up_proj",
    "ffn_down": "shared_mlp.output_linear",
}
_LFM2_EXPERTS = {
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": f"feed_forward.experts.{EACH}.w1",
    "ffn_up_exps": f"feed_forward.experts.{EACH}.w3",
    "ffn_down_exps": f"feed_forward.experts.{EACH}.w2",
    "exp_probs_b.bias": "feed_forward.expert_bias",
}
_PER_LAYER_TABLES = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_GEMMA4_LAYER = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
}
_GROUPS = frozenset(("expert_group_count", "expert_group_used_count"))
_MIXTURE_SCALINGS = (SCALINGS | _GROUPS) - {"expert_count"}
_SHARED_GATE_ROW = {"ffn_gate_inp_shexp": SINGLE_ROW}
_WITHOUT_NORMS = {name: known for name, known in LAYER.items() if not name.endswith("norm")}
_GRANITE_SCALINGS = frozenset(("attention.scale", "embedding_scale", "logit_scale", "residual_scale"))
_QWEN3_NEXT_LAYER |= {"post_attention_norm": "post_attention_layernorm"}


def _mamba(mixer: str) -> dict[str, str]:
    """Return the names of Mamba-2's tensors, below the name of the mixer."""
    names = {
        "ssm_in": "in_proj",
        "ssm_conv1d": "conv1d",
        "ssm_dt.bias": "dt_bias",
        "ssm_a": "A_log",
        "ssm_d": "D",
        "ssm_norm": "norm",
        "ssm_out": "out_proj",
    }
    return {name: f"{mixer}.{known}" for name, known in names.items()}


_MAMBA_LAYOUTS = {
    "ssm_conv1d": DEPTHWISE,
    "ssm_a": Layout(values=_logarithm, is_flat=True),
    "ssm_d": Layout(is_flat=True),
    "ssm_norm": Layout(is_flat=True),
}
_BACKBONE = {"token_embd": "model.embeddings", "output_norm": "model.norm_f", "output": "lm_head"}
_ONE_MIXER = {
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
}

_GPT_MODEL = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT_LAYER = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}

ARCHITECTURES = {
    "llama": Architecture(
        model_type="llama",
        model=MODEL | {"rope_freqs": "rope_freqs"},
        layer=LAYER,
        permuted=_INTERLEAVED,
        refused=SCALINGS,
    ),
    "chatglm": Architecture(
        model_type="glm",
        model=MODEL,
        layer=LAYER | {"ffn_up": "mlp.gate_up_proj"},
        refused=SCALINGS | WINDOWS,
    ),
    "ernie4_5": Architecture(
        model_type="ernie4_5",
        model=MODEL,
        layer=LAYER,
        refused=SCALINGS | WINDOWS,
        config=lambda keys, config: {"use_bias": config["attention_bias"]},
    ),
    "ernie4_5-moe": Architecture(
        model_type="ernie4_5_moe",
        model=MODEL,
        layer=LAYER | _EXPERTS | _SHARED_EXPERTS | {"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        layouts=lambda config: {"exp_probs_b": SINGLE_ROW},
        refused=_MIXTURE_SCALINGS | WINDOWS,
        config=gguf_keys.ernie_moe_config,
    ),
    "exaone4": Architecture(
        model_type="exaone4",
        model=MODEL | {"rope_freqs": "rope_freqs"},
        layer=_WITHOUT_NORMS | HEAD_NORMS | NORMS_BEHIND,
        refused=SCALINGS,
        config=gguf_keys.exaone4_config,
    ),
    "gemma": Architecture(
        model_type="gemma",
        model=MODEL,
        layer=LAYER,
        refused=SCALINGS | WINDOWS,
        config=lambda keys, config: {"norm_offset": 0},
    ),
    "gpt2": Architecture(
        model_type="gpt2",
        model=_GPT_MODEL,
        layer=_GPT_LAYER,
        layers="transformer.h",
        refused=SCALINGS | WINDOWS,
        config=lambda keys, config: {"layer_norm_epsilon": config["rms_norm_eps"]},
        has_layer_norms=True,
    ),
    "starcoder": Architecture(
        model_type="gpt_bigcode",
        model=_GPT_MODEL,
        layer=_GPT_LAYER,
        layers="transformer.h",
        refused=SCALINGS | WINDOWS,
        config=lambda keys, config: {
            "layer_norm_epsilon": config["rms_norm_eps"],
            "multi_query": config["num_key_value_heads"] == 1,
        },
        has_layer_norms=True,
    ),
    "glm4": Architecture(
        model_type="glm4",
        model=MODEL,
        layer=LAYER
        | {"ffn_up": "mlp.gate_up_proj", "post_attention_norm": "post_self_attn_layernorm"}
        | {"post_ffw_norm": "post_mlp_layernorm"},
        refused=SCALINGS | WINDOWS | {"rope.dimension_sections"},
    ),
    "granite": Architecture(
        model_type="granite",
        model=MODEL,
        layer=LAYER,
        permuted=_INTERLEAVED,
        refused=(SCALINGS - _GRANITE_SCALINGS) | WINDOWS,
        config=gguf_keys.granite_config,
    ),
    "granitemoe": Architecture(
        model_type="granitemoeshared",
        model=MODEL,
        layer=LAYER | _GRANITE_EXPERTS,
        permuted=_INTERLEAVED,
        refused=(_MIXTURE_SCALINGS - _GRANITE_SCALINGS) | WINDOWS,
        config=gguf_keys.granite_moe_config,
    ),
    "falcon-h1": Architecture(
        model_type="falcon_h1",
        model={"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"},
        layer={**_WITHOUT_NORMS, "attn_norm": "input_layernorm"}
        | dict.fromkeys(
            ("ffn_norm", "ffn_norm.weight"), "pre_ff_layernorm.weight"
        )  # the converter leaves ".weight" out
        | {f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}
        | _mamba("mamba"),
        layouts=lambda config: _MAMBA_LAYOUTS,
        refused=SCALINGS | WINDOWS,
        config=gguf_keys.falcon_h1_config,
    ),
    "granitehybrid": Architecture(
        model_type="granitemoehybrid",
        model=MODEL,
        layer=LAYER | _GRANITE_SHARED | _GRANITE_EXPERTS | _mamba("mamba"),
        permuted=_INTERLEAVED,
        layouts=lambda config: _MAMBA_LAYOUTS,
        refused=(_MIXTURE_SCALINGS - _GRANITE_SCALINGS) | WINDOWS | {"rope.scaling.finetuned"},
        config=gguf_keys.granite_hybrid_config,
        is_hybrid=True,
    ),
    "mamba": Architecture(
        model_type="mamba",
        model=_BACKBONE,
        layer={
            "attn_norm": "norm",
            **_mamba("mixer"),
            "ssm_x": "mixer.x_proj",
            "ssm_dt": "mixer.dt_proj",
            "ssm_dt.bias": "mixer.dt_proj.bias",
        },
        layouts=lambda config: {"ssm_conv1d": DEPTHWISE, "ssm_a": Layout(values=_logarithm)},
        refused=SCALINGS | WINDOWS | {"ssm.dt_b_c_rms"},
        config=gguf_keys.mamba_config,
        has_attention=False,
    ),
    "mamba2": Architecture(
        model_type="mamba2",
        model=_BACKBONE,
        layer={"attn_norm": "norm"} | _mamba("mixer"),
        layouts=lambda config: _MAMBA_LAYOUTS,
        refused=SCALINGS | WINDOWS,
        config=gguf_keys.mamba2_config,
        has_attention=False,
    ),
    "nemotron_h": Architecture(
        model_type="nemotron_h",
        model=_BACKBONE,
        layer=_ONE_MIXER | _mamba("mixer"),
        permuted=_INTERLEAVED,
        layouts=lambda config: _MAMBA_LAYOUTS,
        refused=SCALINGS | WINDOWS,
        config=gguf_keys.nemotron_h_config,
        is_hybrid=True,
    ),
    "gpt-oss": Architecture(
        model_type="gpt_oss",
        model=MODEL,
        layer={name: known for name, known in LAYER.items() if name != "ffn_norm"}
        | _EXPERTS
        | {
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        refused=_MIXTURE_SCALINGS,
        config=gguf_keys.gpt_oss_config,
    ),
    "lfm2moe": Architecture(
        model_type="lfm2_moe",
        model={"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"},
        layer=_LFM2_LAYER | _LFM2_EXPERTS,
        layouts=lambda config: {"shortconv.conv": DEPTHWISE},
        refused=_MIXTURE_SCALINGS | WINDOWS,
        config=gguf_keys.lfm2_moe_config,
        is_hybrid=True,
    ),
    "minicpm": Architecture(
        model_type="minicpm",
        model=MODEL,
        layer=LAYER,
        in_config=(gguf_keys.LONG_FACTORS, gguf_keys.SHORT_FACTORS),
        permuted=_INTERLEAVED,
        refused=(SCALINGS - _GRANITE_SCALINGS) | WINDOWS | {"attention.scale"},
        config=gguf_keys.minicpm_config,
    ),
    "olmo2": Architecture(
        model_type="olmo2",
        model=MODEL,
        layer=_WITHOUT_NORMS | HEAD_NORMS | NORMS_BEHIND,
        refused=SCALINGS,
        config=gguf_keys.olmo_config,
    ),
    "olmoe": Architecture(
        model_type="olmoe",
        model=MODEL,
        layer=LAYER | HEAD_NORMS | _EXPERTS,
        refused=_MIXTURE_SCALINGS | WINDOWS,
        config=lambda keys, config: gguf_keys.mixture(keys) | {"norm_topk_prob": False},
    ),
    "qwen2moe": Architecture(
        model_type="qwen2_moe",
        model=MODEL,
        layer=LAYER | _EXPERTS | _SHARED_EXPERT,
        layouts=lambda config: _SHARED_GATE_ROW,
        refused=_MIXTURE_SCALINGS | WINDOWS,
        config=gguf_keys.qwen2_moe_config,
    ),
    "qwen3moe": Architecture(
        model_type="qwen3_moe",
        model=MODEL,
        layer=LAYER | HEAD_NORMS | _EXPERTS,
        refused=_MIXTURE_SCALINGS | WINDOWS,
        config=lambda keys, config: gguf_keys.mixture(keys) | {"norm_topk_prob": True},
    ),
    "qwen35moe": Architecture(
        model_type="qwen3_5_moe_text",
        model=MODEL,
        layer=_QWEN3_NEXT_LAYER | _EXPERTS | _SHARED_EXPERT,
        layouts=lambda config: {**tiled_value_heads(config), **_SHARED_GATE_ROW},
        refused=_MIXTURE_SCALINGS | WINDOWS,
        config=gguf_keys.qwen3_next_config,
    ),
    "smollm3": Architecture(
        model_type="smollm3",
        model=MODEL | {"rope_freqs": "rope_freqs"},
        layer=LAYER,
        permuted=_INTERLEAVED,
        refused=SCALINGS | WINDOWS,
    ),
    "lfm2": Architecture(
        model_type="lfm2",
        model={"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"},
        layer=_LFM2_LAYER,
        layouts=lambda config: {"shortconv.conv": DEPTHWISE},
        refused=SCALINGS | WINDOWS,
        config=gguf_keys.lfm2_config,
        is_hybrid=True,
    ),
    "qwen2": Architecture(model_type="qwen2", model=MODEL, layer=LAYER, refused=SCALINGS | WINDOWS),
    "gemma2": Architecture(
        model_type="gemma2",
        model=MODEL,
        layer=LAYER | SANDWICH_NORMS,
        refused=SCALINGS - {"attn_logit_softcapping", "final_logit_softcapping"},
        config=gguf_keys.gemma2_config,
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        model=MODEL,
        layer=LAYER | HEAD_NORMS | SANDWICH_NORMS,
        refused=SCALINGS - {"final_logit_softcapping"},
        config=gguf_keys.gemma3_config,
    ),
    "gemma4": Architecture(
        model_type="gemma4_text",
        model=MODEL | _PER_LAYER_TABLES,
        layer=LAYER | HEAD_NORMS | SANDWICH_NORMS | _GEMMA4_LAYER,
        in_config=(gguf_keys.FREQUENCY_DIVISORS,),
        refused=_MIXTURE_SCALINGS - {"final_logit_softcapping"},
        config=gguf_keys.gemma4_config,
        by_layer=("attention.head_count_kv", "feed_forward_length"),
    ),
    "phi3": Architecture(
        model_type="phi3",
        model=MODEL,
        layer=LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        in_config=(gguf_keys.LONG_FACTORS, gguf_keys.SHORT_FACTORS),
        refused=SCALINGS,
        config=gguf_keys.phi3_config,
    ),
    "qwen3": Architecture(model_type="qwen3", model=MODEL, layer=LAYER | HEAD_NORMS, refused=SCALINGS | WINDOWS),
    "qwen35": Architecture(
        model_type="qwen3_5_text",
        model=MODEL,
        layer=_QWEN3_NEXT_LAYER,
        layouts=tiled_value_heads,
        refused=SCALINGS | WINDOWS,
        config=gguf_keys.qwen3_next_config,
    ),
    "qwen3next": Architecture(
        model_type="qwen3_next",
        model=MODEL,
        layer=_QWEN3_NEXT_LAYER | _EXPERTS | _SHARED_EXPERT,
        layouts=lambda config: {"ssm_conv1d": DEPTHWISE, "ssm_a": LOGARITHM, **_SHARED_GATE_ROW},
        refused=_MIXTURE_SCALINGS | WINDOWS,
        config=gguf_keys.qwen3_next_config,
    ),
}

_TENSOR_NAME = re.compile(r"(blk\.(?P<layer>0|[1-9][0-9]*)\.)?(?P<module>[a-z0-9_.]+?)(?P<part>\.(weight|bias))?")


PLUGINS: PluginGroup[Architecture] = PluginGroup(
    "chunkrt.gguf",
    error=UnsupportedModelError,
    own=ARCHITECTURES,
    check=lambda name, found: "" if isinstance(found, Architecture) else "is no Architecture",
)
"""Plug-ins' architectures, by `general.architecture`."""


def architecture_names() -> list[str]:
    """Return the known values of `general.architecture`, including those of plug-ins."""
    return sorted((*ARCHITECTURES, *PLUGINS.names))


def find_architecture(name: Any) -> Architecture:
    """Find an architecture by its `general.architecture`.

    Raises:
        UnsupportedModelError: the architecture is unknown, or its plug-in is broken.
    """
    if isinstance(name, str) and name in ARCHITECTURES:
        return ARCHITECTURES[name]
    if isinstance(name, str) and (plugin := PLUGINS.find(name)):
        return plugin.load()
    known = ", ".join(architecture_names())
    raise UnsupportedModelError(f"the GGUF architecture {name!r} is not implemented; supported: {known}")


def is_known_name(name: str) -> bool:
    """Return whether any architecture has a tensor with a name, which may be GGUF's or Hugging Face's."""
    short = re.sub(r"^(blk|model\.layers)\.[0-9]+\.|\.(weight|bias)$", "", name)
    return short in _known_names() or name in _known_names()


@cache
def _known_names() -> frozenset[str]:
    """Return the parts of all tables' names after the layer and before ".weight"."""
    tables = [table for a in ARCHITECTURES.values() for table in (a.model, a.layer)]
    return frozenset(name for table in tables for row in table.items() for name in row)


def is_of_later_layer(name: str, num_layers: int) -> bool:
    """Return whether a GGUF tensor belongs to a layer whose index is at least a given number."""
    match = _TENSOR_NAME.fullmatch(name)
    return match is not None and match["layer"] is not None and int(match["layer"]) >= num_layers


def translate_name(architecture: Architecture, config: Config, tensor: GgufTensor) -> tuple[str, Layout]:
    """Return a tensor's name in Hugging Face's vocabulary, and its conversion.

    The name is "" for a tensor that Hugging Face keeps in the config.

    Raises:
        UnsupportedModelError: the architecture has no such tensor.
        ModelError: the tensor's shape does not match the config.
    """
    name = tensor.name
    match = _TENSOR_NAME.fullmatch(name)
    layer, module, part = match.group("layer", "module", "part") if match else (None, "", None)
    if name in architecture.in_config:
        return "", AS_IT_IS
    modules = architecture.model if layer is None else architecture.layer
    part = part or ""
    if module not in modules and module + part not in modules:
        raise UnsupportedModelError(
            f"it holds the tensor {name!r}, which {architecture.model_type} as implemented lacks", feature=name
        )
    prefix = "" if layer is None else f"{architecture.layers}.{layer}."
    known_as = modules[module + part] if module + part in modules else modules[module] + part
    layout = _layout(architecture, config, module, tensor)
    try:
        layout.shape(tensor.shape)
    except ModelError as error:
        raise ModelError(f"tensor {name}: {error}") from error
    return prefix + known_as, layout


def _layout(architecture: Architecture, config: Config, module: str, tensor: GgufTensor) -> Layout:
    if module not in architecture.permuted:
        return architecture.layouts(config).get(module, AS_IT_IS)
    num_heads, num_rows = config[architecture.permuted[module]], tensor.shape[0]
    if num_rows % (2 * num_heads):
        raise ModelError(
            f"{tensor.name} has {num_rows} rows, which {num_heads} heads of an even length cannot share evenly"
        )
    return rotate_half_rows(num_heads, num_rows)


def translate_config(architecture: Architecture, keys: Keys, refuse: Refuse = strictly) -> Config:
    """Return Hugging Face's config keys from the metadata and the tensors' shapes.

    Args:
        refuse: called with every key of `Architecture.refused` that is set.

    Raises:
        ModelError: a key is missing, of the wrong type or out of range.
        UnsupportedModelError: a key requires a feature that is not implemented.
    """
    for key in sorted(architecture.refused):
        if keys.get(key):
            name = keys.prefix + key
            refuse(UnsupportedModelError(f"{name} = {keys.get(key)} is not implemented", feature=name))
    of_first = keys.of_first_layer(architecture.by_layer)
    config = {
        "model_type": architecture.model_type,
        **common_config(
            of_first,
            is_hybrid=architecture.is_hybrid,
            has_attention=architecture.has_attention,
            has_layer_norms=architecture.has_layer_norms,
        ),
    }
    return config | architecture.config(keys, config)
