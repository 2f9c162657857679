"""PyTorch: transformers in float32, in batches of pairs of similar length, padded on the right. Options: batch.

The LM head runs only over scored rows, which saves more than lm-evaluation-harness does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.engines.torch import versions as versions

Pairs = Sequence[tuple[Sequence[int], Sequence[int]]]


class Runner:
    def __init__(self, model: Path, threads: int, context_length: int, options: Mapping[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch, self.batch = torch, options["batch"]
        torch.set_num_threads(threads)
        torch.set_num_interop_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval()
        self.settings = (
            f"float32, sdpa attention, batches of {self.batch} pairs sorted by length and padded on the right, "
            "the LM head only over scored rows"
        )

    def score(self, pairs: Pairs) -> tuple[list[float], int, int]:
        found = [0.0] * len(pairs)
        num_rows = num_padded = 0
        order = sorted(range(len(pairs)), key=lambda index: -sum(map(len, pairs[index])))
        with self.torch.inference_mode():
            for start in range(0, len(order), self.batch):
                indices = order[start : start + self.batch]
                values, rows, padded = self._score_batch([pairs[index] for index in indices])
                num_rows, num_padded = num_rows + rows, num_padded + padded
                for index, value in zip(indices, values, strict=True):
                    found[index] = value
        return found, num_rows, num_padded

    def _score_batch(self, pairs: Pairs) -> tuple[list[float], int, int]:
        torch = self.torch
        tokens = [[*context, *continuation[:-1]] for context, continuation in pairs]
        longest = max(map(len, tokens))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in tokens])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in tokens])
        hidden = self.model.get_decoder()(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        lengths = [len(continuation) for _, continuation in pairs]
        wanted = torch.cat(
            [
                hidden[i, len(row) - length : len(row)]
                for i, (row, length) in enumerate(zip(tokens, lengths, strict=True))
            ]
        )
        following = torch.tensor([token for _, continuation in pairs for token in continuation])
        logits = self.model.get_output_embeddings()(wanted)
        own = logits.log_softmax(-1).gather(1, following[:, None])[:, 0]
        sums = [float(part.sum()) for part in own.split(lengths)]
        return sums, sum(map(len, tokens)), ids.numel()
