"""`chunkrt run --prompts`: answer many prompts, batched into shared chunks, as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click

from chunkrt.cli.prompts import Prompt
from chunkrt.engine.engine import Engine
from chunkrt.engine.sampling import SamplingOptions
from chunkrt.errors import ConfigError


def answer_prompts(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    raw: bool,
    system: str | None,
    template_options: Mapping[str, Any],
    sampling: SamplingOptions,
    max_new_tokens: int,
    stop: Sequence[str],
) -> None:
    """Print one object per prompt, in order, as soon as all earlier answers are complete.

    Raises:
        ConfigError: a prompt does not fit the context; then no prompt is run.
    """
    tokenizer = engine.require_tokenizer()
    tokens = [prompt.tokens(tokenizer, raw=raw, system=system, template_options=template_options) for prompt in prompts]
    for number, ids in enumerate(tokens, 1):
        if len(ids) > engine.context_length and not engine.options.context_shift:
            raise ConfigError(
                f"prompt {number} has {len(ids)} tokens, more than the context of {engine.context_length}; shorten it, "
                "or leave it out"
            )
    answers: list[dict[str, Any]] = [
        {
            "index": index,
            "id": prompt.name,
            "text": prompt.prefill_answer,
            "finish_reason": None,
            "prompt_tokens": len(ids),
            "new_tokens": 0,
        }
        for index, (prompt, ids) in enumerate(zip(prompts, tokens, strict=True))
    ]
    num_printed = 0
    for index, piece in engine.stream(tokens, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop):
        answer = answers[index]
        answer["text"] += piece.text
        answer["new_tokens"] += piece.token_id is not None
        answer["finish_reason"] = piece.finish_reason
        while num_printed < len(answers) and answers[num_printed]["finish_reason"] is not None:
            click.echo(json.dumps(answers[num_printed], ensure_ascii=False))
            num_printed += 1
