"""The file of a session, which contains the state, the tokens, and the other data for continuing a conversation."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from typing import NamedTuple
from zipfile import ZipFile

import numpy as np

from chunkrt.backends.base import AttentionMath
from chunkrt.backends.low_rank import LoadedAdapter
from chunkrt.engine_directory.manifest import PLAN, WEIGHTS, Manifest
from chunkrt.errors import ModelError
from chunkrt.quant.scheme import Scheme
from chunkrt.runtime.buffers import Array
from chunkrt.runtime.state_file import Numbers, StateFile, read_array

_NUMBERS = ("num_tokens", "num_dropped", "num_logits", "follows_text", "context_keep")
_MODEL = "session.model"
_ARRAYS = ("session.tokens", "session.dropped", "session.logits", _MODEL)
_MODEL_BYTES = 32


class Conversation(NamedTuple):
    """Data of a session in addition to its state.

    Attributes:
        tokens: the tokens in the context, int64.
        dropped: the tokens that shifts of the context have dropped, int64.
        logits: the logits after the last token, float32 [V]; None if this token has not been run.
        follows_text: True if the last token belongs to plain text.
    """

    tokens: Array
    dropped: Array
    logits: Array | None
    follows_text: bool


def model_digest(
    manifest: Manifest, scheme: Scheme, attention_math: AttentionMath, adapter: LoadedAdapter | None
) -> bytes:
    """Return 32 bytes that identify the plan, weights, arithmetic and adapter that compute a session's state.

    Plan and weights are identified by the digests of their files; weights depend on the checkpoint and the calibration.
    """
    files = [(name, manifest.files[name][1]) for name in (PLAN, WEIGHTS)]
    model = f"{files}; {sorted(asdict(scheme).items())}"
    math = "" if attention_math == "float32" else f"; attention in {attention_math}"
    adapted = "" if adapter is None else f"; adapter {adapter.digest}"
    return hashlib.sha256(f"{model}{math}{adapted}".encode()).digest()


class SessionFile(StateFile):
    """The file of a session at a path.

    Args:
        model: result of `model_digest`.
        vocab_size, context_length, context_keep: properties of the engine.
        conversation: the conversation to write. After `read`, the attribute is the conversation that was read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        model: bytes,
        vocab_size: int,
        context_length: int,
        context_keep: int,
        conversation: Conversation | None = None,
    ) -> None:
        super().__init__(path)
        self._model = np.frombuffer(model, np.uint8)
        self._vocab_size, self._context_length, self._context_keep = vocab_size, context_length, context_keep
        self.conversation = conversation

    def write(self, numbers: Numbers, arrays: Mapping[str, Array]) -> None:
        """See `StateFile.write`."""
        assert self.conversation is not None
        tokens, dropped, logits, follows_text = self.conversation
        logits = np.empty(0, np.float32) if logits is None else logits
        own = (tokens, dropped, logits, self._model)
        lengths = (len(tokens), len(dropped), len(logits), int(follows_text), self._context_keep)
        super().write(
            {**numbers, **dict(zip(_NUMBERS, lengths, strict=True))}, {**arrays, **dict(zip(_ARRAYS, own, strict=True))}
        )

    def read(
        self, expect: Callable[[Numbers], Mapping[str, Array]], numbers: Collection[str], arrays: Collection[str]
    ) -> tuple[Mapping[str, Array], Numbers]:
        """Read the file like `StateFile.read`. Raise ModelError also if the conversation is not valid for this
        engine."""

        def expect_all(found: Numbers) -> Mapping[str, Array]:
            return {**expect(found), **self._forms(found)}

        read, found = super().read(expect_all, (*numbers, *_NUMBERS), (*arrays, *_ARRAYS))
        tokens, dropped, logits, _ = (read[name] for name in _ARRAYS)
        if len(dropped) and found["context_keep"] != self._context_keep:
            raise ModelError(
                f"{self.path} has a context that was shifted with context_keep {found['context_keep']}, not "
                f"{self._context_keep}; load the model with that value"
            )
        if any(((ids < 0) | (ids >= self._vocab_size)).any() for ids in (tokens, dropped)):
            raise ModelError(f"{self.path} contains tokens outside the vocabulary of {self._vocab_size}; prefill again")
        after = logits.copy() if len(logits) else None
        self.conversation = Conversation(tokens, dropped, after, bool(found["follows_text"]))
        return {name: read[name] for name in arrays}, found

    def _check(self, archive: ZipFile) -> None:
        if (read_array(archive, _MODEL, self._model) != self._model).any():
            raise ModelError(
                f"{self.path} is a session of another model, scheme or calibration, or of another arithmetic "
                "of attention, or of another adapter; load the model that it was saved with, or prefill again"
            )

    def _forms(self, numbers: Numbers) -> dict[str, Array]:
        num_tokens, num_dropped, num_logits = (numbers[name] for name in _NUMBERS[:3])
        if not numbers["position"] <= num_tokens <= self._context_length:
            raise ValueError(f"it contains {num_tokens} tokens, but the context length is {self._context_length}")
        is_run = numbers["position"] == num_tokens > 0
        if num_dropped < 0 or num_logits not in (0, self._vocab_size if is_run else 0):
            raise ValueError(f"its number of dropped tokens ({num_dropped}) or of logits ({num_logits}) is invalid")
        shapes = zip(_ARRAYS, (num_tokens, num_dropped, num_logits, _MODEL_BYTES), strict=True)
        dtypes = (np.int64, np.int64, np.float32, np.uint8)
        return {
            name: np.broadcast_to(np.zeros((), dtype), (length,))
            for (name, length), dtype in zip(shapes, dtypes, strict=True)
        }
