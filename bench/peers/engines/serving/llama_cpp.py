"""llama.cpp through its low-level bindings, batched like its server: a step takes one token of every sequence that
generates, and fills up with prompts, in order of arrival.

Options: num_sequences, their largest number at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from peers.engines.llama_cpp import UBATCH
from peers.engines.llama_cpp import versions as versions
from peers.engines.serving.clock import Answer, Clock, num_arrived

BATCH = 2048
"""Tokens of one step at most, the server's own default."""

CELLS = 256
"""A sequence's part of the cache is a multiple of this many positions."""


class Row(NamedTuple):
    """A token in a step. `has_logits`: the next token is chosen after it."""

    sequence: int
    position: int
    token: int
    has_logits: bool


@dataclass
class Taken:
    """An arrived prompt, the number of its tokens and of its answer's that have been taken, and the answer."""

    prompt: Sequence[int]
    num_taken: int = 0
    answer: Answer = field(default_factory=Answer)

    def rows(self, index: int, most: int) -> list[Row]:
        """Return its next tokens, at most `most`."""
        tokens = [*self.prompt, *self.answer.tokens]
        taken = range(self.num_taken, min(len(tokens), self.num_taken + most))
        return [Row(index, position, tokens[position], position + 1 == len(tokens)) for position in taken]


def next_rows(sequences: Sequence[Taken], new_tokens: int) -> list[Row]:
    """Return the tokens of a step from the arrived prompts."""
    open_ones = [(i, s) for i, s in enumerate(sequences) if len(s.answer.tokens) < new_tokens]
    rows: list[Row] = []
    for index, sequence in sorted(open_ones, key=lambda one: not one[1].answer.tokens):
        rows += sequence.rows(index, BATCH - len(rows))
    return rows


class Runner:
    def __init__(self, model: Path, threads: int, context_length: int, options: Mapping[str, Any]) -> None:
        import llama_cpp

        self.api = llama_cpp
        num_sequences = options["num_sequences"]
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(model).encode(), llama_cpp.llama_model_default_params())
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = num_sequences * -(-context_length // CELLS) * CELLS
        parameters.n_seq_max = num_sequences
        parameters.n_batch, parameters.n_ubatch = BATCH, UBATCH
        parameters.n_threads = parameters.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, parameters)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot run {model} with {num_sequences} sequences")
        self.vocabulary_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self.settings = (
            f"n_batch {BATCH}, n_ubatch {UBATCH}, n_seq_max {num_sequences}, else its defaults; a step takes a token "
            "of every sequence that generates, and fills up with prompts, as its server does"
        )

    def serve(self, prompts: Sequence[Sequence[int]], arrivals: Sequence[float], new_tokens: int) -> list[Answer]:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        sequences: list[Taken] = []
        clock = Clock()
        while True:
            sequences += [Taken(prompt) for prompt in prompts[len(sequences) : num_arrived(arrivals, clock())]]
            if rows := next_rows(sequences, new_tokens):
                self._step(rows)
                self._choose(rows, sequences, clock)
            elif len(sequences) < len(prompts):
                clock.wait_until(arrivals[len(sequences)])
            else:
                return [sequence.answer for sequence in sequences]

    def _step(self, rows: Sequence[Row]) -> None:
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, row in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = row.token, row.position, row.has_logits
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row.sequence
        if status := self.api.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned status {status} for {len(rows)} tokens")

    def _choose(self, rows: Sequence[Row], sequences: Sequence[Taken], clock: Clock) -> None:
        chosen = {row.sequence: self._most_likely(i) for i, row in enumerate(rows) if row.has_logits}
        now = clock()
        for row in rows:
            sequences[row.sequence].num_taken = row.position + 1
        for index, token in chosen.items():
            sequences[index].answer.add(token, now)

    def _most_likely(self, row: int) -> int:
        logits = self.api.llama_get_logits_ith(self.context, row)
        return int(np.argmax(np.ctypeslib.as_array(logits, (self.vocabulary_size,))))
