"""The Llama family: SmolLM2, Llama 2 and 3, TinyLlama, Mistral without a sliding window.

Pre-norm blocks of grouped-query attention with RoPE and a SwiGLU feed-forward; the head may share the embedding's
table. Source: Touvron et al., LLaMA (2023), section 2.2; Hugging Face's `LlamaForCausalLM`.
"""

from __future__ import annotations

import onnx_ir as ir

from chunkrt.graph import ops
from chunkrt.graph.decoders.config import DecoderConfig
from chunkrt.graph.modules import Embedding, Linear, MergedLinear, Module, QKVLinear, RMSNorm
from chunkrt.graph.rope import RotaryTables


class Attention(Module):
    """Self-attention over all positions so far."""

    def __init__(self, config: DecoderConfig, rotary: RotaryTables) -> None:
        super().__init__()
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv_proj = QKVLinear(config.hidden_size, heads, kv_heads, head_dim, bias=config.attention_bias)
        self.o_proj = Linear(heads * head_dim, config.hidden_size, bias=config.attention_bias)
        self._config, self._rotary = config, (rotary,)

    def forward(self, hidden: ir.Value) -> ir.Value:
        config, (rotary,) = self._config, self._rotary
        attended = ops.cached_attention(
            self.qkv_proj(hidden),
            rotary.cos.value(),
            rotary.sin.value(),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
        )
        return self.o_proj(attended)


class FeedForward(Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width = config.intermediate_size
        parts = {"gate_proj": width, "up_proj": width}
        self.gate_up_proj = MergedLinear(config.hidden_size, parts, bias=config.mlp_bias)
        self.down_proj = Linear(width, config.hidden_size, bias=config.mlp_bias)

    def forward(self, hidden: ir.Value) -> ir.Value:
        gate, up = ops.split_columns(self.gate_up_proj(hidden), names=["gate", "up"])
        silu = ops.mul(gate, ops.sigmoid(gate), name="silu")
        return self.down_proj(ops.mul(silu, up, name="gated"))


class Layer(Module):
    """Attention and feed-forward, each on a normalised input and added back to the residual stream."""

    def __init__(self, config: DecoderConfig, rotary: RotaryTables) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, rotary)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, hidden: ir.Value) -> ir.Value:
        hidden = ops.add(hidden, self.self_attn(self.input_layernorm(hidden)), name="attention_residual")
        return ops.add(hidden, self.mlp(self.post_attention_layernorm(hidden)), name="output")


class Body(Module):
    """Embedding, the layers, the final norm: what Hugging Face keeps under "model."."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rope = RotaryTables(config.inverse_frequencies, config.context_length, divisor=config.rope_divisor)
        self.layers = [Layer(config, self.rope) for _ in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, token_ids: ir.Value) -> ir.Value:
        hidden = self.embed_tokens(token_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden)


class LlamaDecoder(Module):
    """Token ids [T] to logits [R, vocab] of the rows asked for."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.model = Body(config)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = Linear(config.hidden_size, config.vocab_size, tied_to=tied_to).to("cpu")

    def forward(self, token_ids: ir.Value, logit_rows: ir.Value) -> ir.Value:
        hidden = ops.gather_rows(self.model(token_ids), logit_rows, name="last_hidden")
        return self.lm_head(hidden)
