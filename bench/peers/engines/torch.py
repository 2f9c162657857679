"""PyTorch: the transformers model with its linears dynamically quantised to int8. Options: engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "transformers")}


class Runner:
    def __init__(self, model: Path, threads: int, context_length: int, options: Mapping[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM, DynamicCache

        self.torch, self.new_cache = torch, DynamicCache
        torch.set_num_threads(threads)
        torch.set_num_interop_threads(1)
        torch.backends.quantized.engine = options["engine"]
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval()
        per_channel = {torch.nn.Linear: torch.ao.quantization.per_channel_dynamic_qconfig}
        self.model = torch.ao.quantization.quantize_dynamic(loaded, per_channel)
        self.settings = (
            f"quantised engine {options['engine']}, a scale for each output channel of the weights and one for all "
            "activations, sdpa attention, float32 cache, logits_to_keep=1"
        )

    def reset(self, room: int) -> None:
        self.cache = self.new_cache()

    def prefill(self, tokens: Sequence[int]) -> None:
        with self.torch.inference_mode():
            ids = self.torch.tensor([tokens])
            self.logits = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits

    def decode(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.prefill([token])

    def next_token(self) -> int:
        return int(self.logits[0, -1].argmax())
