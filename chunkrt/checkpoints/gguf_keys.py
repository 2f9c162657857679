"""Conversion of a GGUF file's metadata to Hugging Face's config keys: common keys, and those of single architectures.

Source: llama.cpp's convert_hf_to_gguf.py and gguf-py/gguf/constants.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkrt.errors import ModelError, UnsupportedModelError

Config = dict[str, Any]

NEXTN = "nextn_predict_layers"
"""Key of the number of last layers for multi-token prediction, which llama.cpp's decoder does not run."""

LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
GEMMA2_27B_LAYERS, GEMMA3_27B_LAYERS = 46, 62
FREQUENCY_DIVISORS = "rope_freqs.weight"
LARGEST_DIVISOR = 1e29
"""Divisor from which on a frequency counts as 0; llama.cpp's converter writes 1e30."""

SOFTMAX, SIGMOID, SOFTMAX_OF_PICKED = 1, 2, 3
"""Values of `expert_gating_func` (llama.cpp's `llama_expert_gating_func_type`)."""

LARGEST_COUNT = 2**24
"""Limit of every count. It exceeds the counts of all models, and lists of that length are still small."""


class Keys:
    """An architecture's metadata keys, read with type checks; names are those after "llama." and the like.

    `shapes` maps the GGUF names of all tensors to their shapes. `read` returns the float32 values of a tensor.
    """

    def __init__(
        self,
        metadata: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        read: Callable[[str], NDArray[np.float32]],
    ) -> None:
        self.prefix = f"{metadata['general.architecture']}."
        self.shapes, self.read = shapes, read
        self._metadata = metadata

    def get(self, key: str) -> Any:
        """Return a raw value; None if the key is missing."""
        return self._metadata.get(self.prefix + key)

    def count(self, key: str, default: int | None = None, *, may_lack: bool = False) -> int:
        """Return a positive integer. If there is a default, 0 means the default. All values of a list, one per layer,
        must be equal.

        Args:
            may_lack: whether zeros in a list are skipped, because they stand for layers to which the key does not
                apply.
        """
        value = self.get(key)
        if isinstance(value, list) and value:
            kinds = set(value) - {0} if may_lack else set(value)
            if len(kinds) > 1:
                name = self.prefix + key
                raise UnsupportedModelError(f"{name} differs between layers: {value[:8]}", feature=name)
            value = next(iter(kinds), 0)
        if value in (None, 0) and default is not None:
            return default
        if type(value) is not int or value <= 0:
            raise ModelError(f"{self.prefix}{key} must be a positive integer, found {value!r}")
        if value > LARGEST_COUNT:
            raise ModelError(f"{self.prefix}{key} = {value}; expected at most {LARGEST_COUNT}")
        return value

    def of_first_layer(self, keys: Collection[str]) -> Keys:
        """Return a copy in which the values of some keys that are lists, one value per layer, are those of the first
        layer.
        """
        lists = {name: self._metadata.get(name) for name in (self.prefix + key for key in keys)}
        first = {name: values[0] for name, values in lists.items() if isinstance(values, list) and values}
        return Keys({**self._metadata, **first}, self.shapes, self.read)

    def per_layer(self, key: str, num_layers: int) -> list[int]:
        """Return an integer of at least 0 for each layer; a single integer applies to all layers."""
        value = self.get(key)
        values = value if isinstance(value, list) else [value] * num_layers
        if len(values) != num_layers or any(type(v) is not int or v < 0 for v in values):
            raise ModelError(
                f"{self.prefix}{key} must be an integer for each of {num_layers} layers, found {str(value)[:80]}"
            )
        return values

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive, finite number."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise ModelError(f"{self.prefix}{key} must be a positive number, found {value!r}")
        return float(value)

    def vector(self, tensor: str, length: int) -> list[float]:
        """Return the values of a small tensor that Hugging Face keeps in the config."""
        if self.shapes.get(tensor) != (length,):
            found = list(self.shapes[tensor]) if tensor in self.shapes else "missing"
            raise ModelError(f"tensor {tensor} is {found}, expected [{length}]")
        return [float(value) for value in self.read(tensor)]


def common_config(
    keys: Keys, *, is_hybrid: bool = False, has_attention: bool = True, has_layer_norms: bool = False
) -> dict[str, Any]:
    """Return the config keys that every architecture has.

    Args:
        is_hybrid: whether some layers have no attention or no feed-forward, and 0 as the number of their key/value
            heads or as their width.
        has_attention: whether any layer has attention and a feed-forward.
        has_layer_norms: whether norms have a mean and a bias.

    Raises:
        ModelError: a key is missing, of the wrong type or out of range.
        UnsupportedModelError: a key requires a feature that is not implemented.
    """
    hidden_size = keys.count("embedding_length")
    absent = None if has_attention else 1
    num_heads = keys.count("attention.head_count", default=absent, may_lack=is_hybrid)
    head_dim = keys.count("attention.key_length", default=hidden_size // num_heads or None)
    if keys.count("attention.value_length", default=head_dim) != head_dim:
        raise UnsupportedModelError(
            "keys and values of different length (GGUF attention.value_length) are not implemented",
            feature=f"{keys.prefix}attention.value_length",
        )
    rotary_dim = keys.count("rope.dimension_count", default=head_dim)
    if rotary_dim > head_dim:
        raise ModelError(f"{keys.prefix}rope.dimension_count = {rotary_dim} exceeds the head length {head_dim}")
    embedding = keys.shapes.get("token_embd.weight", ())
    if len(embedding) != 2 or embedding[1] != hidden_size:
        raise ModelError(
            f"token_embd.weight has shape {list(embedding)}, expected [vocabulary, {hidden_size}]; "
            "is it a vocabulary or an adapter, not a model?"
        )
    num_layers, num_extra = keys.count("block_count"), keys.count(NEXTN, default=0)
    if num_extra >= num_layers:
        raise ModelError(f"{keys.prefix}{NEXTN} = {num_extra}, expected less than block_count = {num_layers}")
    num_layers -= num_extra
    if num_layers > len(keys.shapes):
        raise ModelError(f"{keys.prefix}block_count = {num_layers}, but the file has {len(keys.shapes)} tensors")
    if not any(name.startswith(f"blk.{num_layers - 1}.") for name in keys.shapes):
        raise ModelError(f"{keys.prefix}block_count = {num_layers}, but no tensor blk.{num_layers - 1}.* exists")
    return {
        "vocab_size": embedding[0],
        "hidden_size": hidden_size,
        "intermediate_size": keys.count(
            "feed_forward_length", default=keys.get("expert_feed_forward_length") or absent, may_lack=is_hybrid
        ),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", default=num_heads, may_lack=is_hybrid),
        "head_dim": head_dim,
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.number(f"attention.{'layer_norm' if has_layer_norms else 'layer_norm_rms'}_epsilon"),
        "rope_theta": keys.number("rope.freq_base", default=10000.0),
        "gguf.rope.dimension_count": rotary_dim,
        "rope_scaling": _rope_scaling(keys),
        "sliding_window": keys.count("attention.sliding_window", default=0) or None,
        "tie_word_embeddings": "output.weight" not in keys.shapes,
        "attention_bias": "blk.0.attn_q.bias" in keys.shapes,
        "mlp_bias": "blk.0.ffn_down.bias" in keys.shapes,
    }


def _rope_scaling(keys: Keys) -> dict[str, Any] | None:
    kind, magnitude = keys.get("rope.scaling.type"), keys.number("rope.scaling.attn_factor", default=1.0)
    if kind in (None, "none"):
        return None if magnitude == 1 else {"attention_factor": magnitude}
    if not isinstance(kind, str):
        raise ModelError(f"{keys.prefix}rope.scaling.type must be a string, found {kind!r}")
    scaling = {"rope_type": kind, "factor": keys.number("rope.scaling.factor", default=1.0)}
    if kind == "yarn":
        scaling |= _yarn(keys)
    elif magnitude != 1:
        scaling["attention_factor"] = magnitude
    if original := keys.count("rope.scaling.original_context_length", default=0):
        scaling["original_max_position_embeddings"] = original
    return scaling


def _yarn(keys: Keys) -> dict[str, float]:
    """Return the parameters that only YaRN has; llama.cpp's converter copies Hugging Face's numbers."""
    refused = ("rope.scaling.attn_factor", "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_log_multiplier")
    for key in refused:
        if keys.get(key) not in (None, 1.0):
            name = keys.prefix + key
            raise UnsupportedModelError(f"{name} = {keys.get(key)} is not implemented with YaRN", feature=name)
    names = {"yarn_attn_factor": "attention_factor", "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    given = {key: name for key, name in names.items() if keys.get(f"rope.scaling.{key}") is not None}
    return {name: keys.number(f"rope.scaling.{key}") for key, name in given.items()}


def lfm2_config(keys: Keys, config: Config) -> Config:
    """Return LFM2's keys: the kind of each layer, and the length of the convolutions."""
    kv_heads = keys.per_layer("attention.head_count_kv", config["num_hidden_layers"])
    return {
        "norm_eps": config["rms_norm_eps"],
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
        "conv_L_cache": keys.count("shortconv.l_cache"),
        "conv_bias": "blk.0.shortconv.conv.bias" in keys.shapes,
        "block_auto_adjust_ff_dim": False,
    }


def qwen3_next_config(keys: Keys, config: Config) -> Config:
    """Return keys of the delta rule. Norms already hold 1 + w. GGUF stores Hugging Face's joint tensor of q, k, v and z
    as two tensors.
    """
    v_heads, all_v = keys.count("ssm.time_step_rank"), keys.count("ssm.inner_size")
    if all_v % v_heads:
        raise ModelError(f"{keys.prefix}ssm.inner_size = {all_v}, which {v_heads} heads cannot share evenly")
    is_linear = [f"blk.{layer}.attn_qkv.weight" in keys.shapes for layer in range(config["num_hidden_layers"])]
    return {
        "layer_types": ["linear_attention" if linear else "full_attention" for linear in is_linear],
        "linear_num_key_heads": keys.count("ssm.group_count"),
        "linear_num_value_heads": v_heads,
        "linear_key_head_dim": keys.count("ssm.state_size"),
        "linear_value_head_dim": all_v // v_heads,
        "linear_conv_kernel_dim": keys.count("ssm.conv_kernel"),
        "norm_offset": 0,
        "has_qkv_and_z_apart": True,
        **(_experts(keys, config["num_hidden_layers"]) if keys.get("expert_count") else {}),
    }


def gpt_oss_config(keys: Keys, config: Config) -> Config:
    """Return gpt-oss's keys. YaRN does not round the range of its blend, as in training; no key states this.

    Raises:
        UnsupportedModelError: the scores of experts are of another kind, or have a factor.
    """
    experts = mixture(keys, scores=SOFTMAX_OF_PICKED)
    scaling = config["rope_scaling"]
    return {
        "num_local_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "intermediate_size": experts["moe_intermediate_size"],
        "rope_scaling": {**scaling, "truncate": False} if scaling else {"rope_type": "default"},
    }


def mixture(keys: Keys, *, scores: int = SOFTMAX) -> Config:
    """Return keys of routed experts, under the names of most families.

    Args:
        scores: the family's `expert_gating_func`.

    Raises:
        UnsupportedModelError: the scores of experts are of another kind, or have a factor.
    """
    for key, known in (("expert_gating_func", (None, 0, scores)), ("expert_weights_scale", (None, 0, 1))):
        if keys.get(key) not in known:
            name = keys.prefix + key
            raise UnsupportedModelError(f"{name} = {keys.get(key)} is not implemented", feature=name)
    width = keys.count("expert_feed_forward_length", default=_width_of(keys, "ffn_gate_exps"))
    return {
        "num_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "moe_intermediate_size": width or keys.count("feed_forward_length"),
    }


def _width_of(keys: Keys, module: str) -> int:
    """Return the number of rows of a module's tensor in the first layer that has it; 0 if no layer has it."""
    layers = range(keys.count("block_count"))
    found = (keys.shapes.get(f"blk.{layer}.{module}.weight") for layer in layers)
    return next((shape[-2] for shape in found if shape is not None and len(shape) > 1), 0)


def _dense_layers(keys: Keys, num_layers: int) -> list[int]:
    return [layer for layer in range(num_layers) if f"blk.{layer}.ffn_gate_inp.weight" not in keys.shapes]


def _experts(keys: Keys, num_layers: int) -> Config:
    """Return keys of the experts. The weights of the picked experts are always normalised."""
    return {
        **mixture(keys),
        "shared_expert_intermediate_size": keys.count("expert_shared_feed_forward_length"),
        "norm_topk_prob": True,
        "mlp_only_layers": _dense_layers(keys, num_layers),
    }


def qwen2_moe_config(keys: Keys, config: Config) -> Config:
    """Return keys of the experts. The weights of the picked experts are never normalised."""
    shared = keys.count("expert_shared_feed_forward_length", default=_width_of(keys, "ffn_gate_shexp"))
    dense = _dense_layers(keys, config["num_hidden_layers"])
    found = {"shared_expert_intermediate_size": shared, "norm_topk_prob": False, "mlp_only_layers": dense}
    return mixture(keys) | found | {"qkv_bias": config["attention_bias"]}


def granite_moe_config(keys: Keys, config: Config) -> Config:
    """Return Granite's factors and experts. The gate and up of the shared expert are separate tensors."""
    return {
        **granite_config(keys, config),
        "num_local_experts": keys.count("expert_count"),
        "num_experts_per_tok": mixture(keys)["num_experts_per_tok"],
        "shared_intermediate_size": _width_of(keys, "ffn_gate_shexp"),
        "has_gate_and_up_apart": True,
    }


def lfm2_moe_config(keys: Keys, config: Config) -> Config:
    """Return LFM2's keys, and those of its experts."""
    return {
        **lfm2_config(keys, config),
        **mixture(keys, scores=SIGMOID),
        "num_dense_layers": keys.count("leading_dense_block_count", default=0),
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in keys.shapes),
    }


def ernie_moe_config(keys: Keys, config: Config) -> Config:
    """Return ERNIE's keys. The width of the shared experts is that of their tensors, which no key states reliably.

    Raises:
        ModelError: that width is not a multiple of the width of one expert.
    """
    found = mixture(keys)
    width, shared = found["moe_intermediate_size"], _width_of(keys, "ffn_gate_shexp")
    if shared % width:
        raise ModelError(f"the shared experts have {shared} columns, which is no multiple of an expert's {width}")
    return {
        "use_bias": config["attention_bias"],
        "moe_num_experts": found["num_experts"],
        "moe_k": found["num_experts_per_tok"],
        "moe_intermediate_size": width,
        "moe_num_shared_experts": shared // width,
        "moe_layer_start_index": keys.count("leading_dense_block_count", default=0),
        "moe_layer_interval": keys.count("interleave_moe_layer_step", default=1),
    }


def gemma2_config(keys: Keys, config: Config) -> Config:
    """Return Gemma 2's keys, with llama.cpp's defaults. Norms hold 1 + w. The window is that of every other layer."""
    return {
        "norm_offset": 0,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _gemma_scalar(config, GEMMA2_27B_LAYERS),
        "sliding_window": config["sliding_window"] or 4096,
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", default=50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", default=30.0),
    }


def _gemma_scalar(config: Config, layers_of_27b: int) -> int:
    """Return the number whose root divides scores. No key states it; llama.cpp derives it from the number of layers."""
    is_27b = config["num_hidden_layers"] == layers_of_27b
    scalar: int = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return scalar


def gemma3_config(keys: Keys, config: Config) -> Config:
    """Return Gemma 3's keys. Norms hold 1 + w."""
    num_layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    if config["gguf.rope.dimension_count"] != head_dim:
        name = f"{keys.prefix}rope.dimension_count"
        raise UnsupportedModelError(f"{name} = {keys.get('rope.dimension_count')} is not implemented", feature=name)
    found = {
        "norm_offset": 0,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _gemma_scalar(config, GEMMA3_27B_LAYERS),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", default=10000.0),
        "final_logit_softcapping": keys.get("final_logit_softcapping") or None,
    }
    if config["sliding_window"] is None:
        return found | {"layer_types": ["full_attention"] * num_layers}
    return found | {"sliding_window_pattern": keys.count("attention.sliding_window_pattern", default=6)}


def gemma4_config(keys: Keys, config: Config) -> Config:
    """Return Gemma 4's keys. Numbers and sizes of heads differ between the kinds of layers, and the layers that read
    caches may have feed-forwards of twice the width. RoPE's frequencies that are 0 are those with a huge divisor.
    """
    num_layers, num_shared = config["num_hidden_layers"], keys.count("attention.shared_kv_layers", default=0)
    kinds = _layers_with_a_window(keys, config)["layer_types"]
    kv_heads, widths = (keys.per_layer(key, num_layers) for key in ("attention.head_count_kv", "feed_forward_length"))
    num_own = num_layers - num_shared
    is_wide = widths[-1] != widths[0]
    if widths != [widths[0] * (2 if is_wide and index >= num_own else 1) for index in range(num_layers)]:
        name = f"{keys.prefix}feed_forward_length"
        raise UnsupportedModelError(f"{name} = {widths[:8]} is not implemented with {num_own} own caches", feature=name)
    sizes = {
        "full_attention": keys.count("attention.key_length"),
        "sliding_attention": keys.count("attention.key_length_swa"),
    }
    for kind, suffix in (("full_attention", ""), ("sliding_attention", "_swa")):
        name = f"rope.dimension_count{suffix}"
        if keys.count(name, default=sizes[kind]) != sizes[kind]:
            name = keys.prefix + name
            raise UnsupportedModelError(f"{name} differs from the head length {sizes[kind]}", feature=name)
    of_layers = {
        str(layer): {"head_dim": sizes[kind], "num_key_value_heads": kv_heads[layer]}
        for layer, kind in enumerate(kinds)
    }
    full = [layer for layer, kind in enumerate(kinds[: max(0, num_own)]) if kind == "full_attention"]
    found = {
        "layer_types": kinds,
        "num_kv_shared_layers": num_shared,
        "use_double_wide_mlp": is_wide,
        "per_layer_config": of_layers,
        "attention_k_eq_v": any(f"blk.{layer}.attn_v.weight" not in keys.shapes for layer in full),
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": keys.get("embedding_length_per_layer_input") or 0,
        "vocab_size_per_layer_input": keys.shapes.get("per_layer_token_embd.weight", (config["vocab_size"],))[0],
        "final_logit_softcapping": keys.get("final_logit_softcapping") or None,
        "rope_parameters": {
            "full_attention": _gemma4_rope(keys, config, sizes["full_attention"]),
            "sliding_attention": {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", default=1e4)},
        },
    }
    if keys.get("expert_count"):
        experts = mixture(keys)
        found |= {"enable_moe_block": True, "top_k_experts": experts.pop("num_experts_per_tok"), **experts}
    return found


def _gemma4_rope(keys: Keys, config: Config, head_dim: int) -> Config:
    """Return RoPE's parameters of layers without a window, whose divisors are 1 for the frequencies that remain."""
    divisors = np.array(keys.vector(FREQUENCY_DIVISORS, head_dim // 2) if FREQUENCY_DIVISORS in keys.shapes else [1.0])
    num_rotated = int((divisors == 1).sum())
    if (divisors[:num_rotated] != 1).any() or (divisors[num_rotated:] < LARGEST_DIVISOR).any():
        raise UnsupportedModelError(
            f"{FREQUENCY_DIVISORS} has values other than 1 and at least {LARGEST_DIVISOR:g}, which are not implemented",
            feature=FREQUENCY_DIVISORS,
        )
    share = (num_rotated + 0.25) / len(divisors)  # a quarter more, because Transformers rounds down
    return {
        "rope_type": "proportional",
        "partial_rotary_factor": min(share, 1.0),
        "rope_theta": config["rope_theta"],
    }


def phi3_config(keys: Keys, config: Config) -> Config:
    """Return keys of longrope. Its frequency factors are tensors; its attention factor is a key."""
    context = config["max_position_embeddings"]
    found = {"original_max_position_embeddings": keys.count("rope.scaling.original_context_length", default=context)}
    if not {LONG_FACTORS, SHORT_FACTORS} & keys.shapes.keys():
        return found
    half = config["gguf.rope.dimension_count"] // 2
    scaling: Config = {
        "rope_type": "longrope",
        "long_factor": keys.vector(LONG_FACTORS, half),
        "short_factor": keys.vector(SHORT_FACTORS, half),
    }
    if keys.get("rope.scaling.attn_factor") is not None:
        scaling["attention_factor"] = keys.number("rope.scaling.attn_factor")
    return found | {"rope_scaling": scaling}


def granite_config(keys: Keys, config: Config) -> Config:
    """Return Granite's factors. Dense Granite 4 has the same architecture."""
    key = "rope.scaling.finetuned"
    if keys.get(key) is False:
        name = keys.prefix + key
        raise UnsupportedModelError(f"{name} = False, attention without RoPE, is not implemented", feature=name)
    return _granite_factors(keys, config)


def granite_hybrid_config(keys: Keys, config: Config) -> Config:
    """Return the keys of Granite with Mamba-2: factors, experts, and the kind of each layer. Attention has no RoPE."""
    num_layers, has_experts = config["num_hidden_layers"], bool(keys.get("expert_count"))
    shared = _width_of(keys, "ffn_gate_shexp") if has_experts else config["intermediate_size"]
    experts = {"num_local_experts": 0}
    if has_experts:
        experts = {"num_local_experts": keys.count("expert_count"), **mixture(keys)}
    return {
        **_granite_factors(keys, config),
        **experts,
        **_mamba_config(keys, config),
        "layer_types": ["mamba" if is_mamba else "attention" for is_mamba in _mamba_layers(keys, num_layers)],
        "position_embedding_type": "nope",
        "shared_intermediate_size": shared,
        "has_gate_and_up_apart": True,
        "attention_bias": _any(keys, "attn_q.bias"),
    }


def falcon_h1_config(keys: Keys, config: Config) -> Config:
    """Return Falcon-H1's keys. All factors are part of the tensors, and llama.cpp multiplies the gate first."""
    return {
        **_mamba_config(keys, config),
        "mamba_d_ssm": keys.count("ssm.inner_size"),
        "mamba_rms_norm": _any(keys, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": _any(keys, "ssm_out.bias"),
    }


def mamba_config(keys: Keys, config: Config) -> Config:
    """Return Mamba's keys."""
    inner, hidden = keys.count("ssm.inner_size"), config["hidden_size"]
    if inner % hidden:
        raise ModelError(f"{keys.prefix}ssm.inner_size is {inner}, expected a multiple of {hidden}")
    return {
        "layer_norm_epsilon": config["rms_norm_eps"],
        "state_size": keys.count("ssm.state_size"),
        "conv_kernel": keys.count("ssm.conv_kernel"),
        "time_step_rank": keys.count("ssm.time_step_rank"),
        "expand": inner // hidden,
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in keys.shapes,
        "use_bias": "blk.0.ssm_in.bias" in keys.shapes,
        "head_dim": 2,
    }


def mamba2_config(keys: Keys, config: Config) -> Config:
    """Return Mamba-2's keys."""
    sizes = _mamba_config(keys, config)
    names = {
        "mamba_n_heads": "num_heads",
        "mamba_d_head": "head_dim",
        "mamba_n_groups": "n_groups",
        "mamba_d_state": "state_size",
        "mamba_d_conv": "conv_kernel",
        "mamba_expand": "expand",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_proj_bias": "use_bias",
    }
    return {"layer_norm_epsilon": config["rms_norm_eps"], **{name: sizes[key] for key, name in names.items()}}


def nemotron_h_config(keys: Keys, config: Config) -> Config:
    """Return Nemotron-H's keys, and the kind of each layer by its tensors."""
    num_layers, sizes = config["num_hidden_layers"], _mamba_config(keys, config)
    has_feed_forward = [f"blk.{layer}.ffn_up.weight" in keys.shapes for layer in range(num_layers)]
    pairs = zip(_mamba_layers(keys, num_layers), has_feed_forward, strict=True)
    return {
        "layer_norm_epsilon": config["rms_norm_eps"],
        "layers_block_type": ["mamba" if mamba else "mlp" if mlp else "attention" for mamba, mlp in pairs],
        "mamba_num_heads": sizes["mamba_n_heads"],
        "mamba_head_dim": sizes["mamba_d_head"],
        "n_groups": sizes["mamba_n_groups"],
        "ssm_state_size": sizes["mamba_d_state"],
        "conv_kernel": sizes["mamba_d_conv"],
        "use_conv_bias": sizes["mamba_conv_bias"],
        "use_bias": sizes["mamba_proj_bias"],
        "mlp_bias": _any(keys, "ffn_up.bias"),
    }


def _mamba_config(keys: Keys, config: Config) -> Config:
    """Return the sizes of Mamba-2's mixer, under the names of hybrid families."""
    heads, inner = keys.count("ssm.time_step_rank"), keys.count("ssm.inner_size")
    if inner % heads:
        raise ModelError(f"{keys.prefix}ssm.inner_size = {inner}, which {heads} heads cannot share evenly")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": keys.count("ssm.group_count"),
        "mamba_d_state": keys.count("ssm.state_size"),
        "mamba_d_conv": keys.count("ssm.conv_kernel"),
        "mamba_expand": max(inner // config["hidden_size"], 1),
        "mamba_conv_bias": _any(keys, "ssm_conv1d.bias"),
        "mamba_proj_bias": _any(keys, "ssm_in.bias"),
    }


def _mamba_layers(keys: Keys, num_layers: int) -> list[bool]:
    return [f"blk.{layer}.ssm_in.weight" in keys.shapes for layer in range(num_layers)]


def _any(keys: Keys, name: str) -> bool:
    """Return whether any layer has a tensor."""
    return any(found.startswith("blk.") and found.endswith(f".{name}") for found in keys.shapes)


def _granite_factors(keys: Keys, config: Config) -> Config:
    return {
        "embedding_multiplier": keys.number("embedding_scale", default=1.0),
        "residual_multiplier": keys.number("residual_scale", default=1.0),
        "logits_scaling": keys.number("logit_scale", default=1.0),
        "attention_multiplier": keys.number("attention.scale", default=config["head_dim"] ** -0.5),
    }


def minicpm_config(keys: Keys, config: Config) -> Config:
    """Return MiniCPM's factors, and those of longrope."""
    return {
        **phi3_config(keys, config),
        "scale_emb": keys.number("embedding_scale"),
        "scale_depth": keys.number("residual_scale") * config["num_hidden_layers"] ** 0.5,
        "dim_model_base": config["hidden_size"] / keys.number("logit_scale"),
    }


def exaone4_config(keys: Keys, config: Config) -> Config:
    """Return the kind of each layer, by default that of models without a window."""
    if config["sliding_window"] is None:
        return {"layer_types": ["full_attention"] * config["num_hidden_layers"]}
    return _layers_with_a_window(keys, config)


def olmo_config(keys: Keys, config: Config) -> Config:
    """Return the kind of each layer of OLMo 3, which differs from OLMo 2 by its windows. All layers have one base of
    RoPE.
    """
    if config["sliding_window"] is None:
        return {}
    ropes = {"sliding_attention": {"rope_theta": config["rope_theta"]}}
    return {"model_type": "olmo3", "rope_parameters": ropes, **_layers_with_a_window(keys, config)}


def _layers_with_a_window(keys: Keys, config: Config) -> Config:
    """Return the kind of each layer from a flag for each layer, or from the period of layers without a window."""
    key, num_layers = "attention.sliding_window_pattern", config["num_hidden_layers"]
    slides = keys.get(key)
    if not isinstance(slides, list):
        period = keys.count(key, default=4)
        slides = [(layer + 1) % period != 0 for layer in range(num_layers)]
    if len(slides) < num_layers or not {type(slide) for slide in slides} <= {bool, int}:
        raise ModelError(f"{keys.prefix}{key} must be a flag for each of {num_layers} layers, found {slides!r:.80}")
    return {"layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides[:num_layers]]}
