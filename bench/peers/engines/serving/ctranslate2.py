"""CTranslate2's batch generation: all waiting prompts form a batch, and later prompts wait for its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.engines import ctranslate2
from peers.engines.ctranslate2 import versions as versions
from peers.engines.serving.clock import Answer, Clock, num_arrived


class Runner(ctranslate2.Runner):
    def __init__(self, model: Path, threads: int, context_length: int, options: Mapping[str, Any]) -> None:
        super().__init__(model, threads, context_length, options)
        self.settings = (
            f"compute type {self.generator.compute_type}; generate_batch() of all waiting prompts; "
            "later prompts wait for its end"
        )

    def serve(self, prompts: Sequence[Sequence[int]], arrivals: Sequence[float], new_tokens: int) -> list[Answer]:
        strings = [[self.vocabulary[token] for token in prompt] for prompt in prompts]
        answers: list[Answer] = [Answer() for _ in prompts]
        clock, begun = Clock(), 0
        while begun < len(prompts):
            clock.wait_until(arrivals[begun])
            end = num_arrived(arrivals, clock())

            def note(step: Any, first: int = begun) -> bool:
                answers[first + step.batch_id].add(step.token_id, clock())
                return False

            self.generator.generate_batch(
                strings[begun:end],
                max_length=new_tokens,
                min_length=new_tokens,
                sampling_topk=1,
                include_prompt_in_result=False,
                end_token=[],
                callback=note,
            )
            begun = end
        return answers
