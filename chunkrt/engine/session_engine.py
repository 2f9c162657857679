"""Interface of an engine for sessions."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from chunkrt.engine.sampling import PluginSampler, Sampler, SamplingOptions
from chunkrt.engine.sequence import SequenceEngine
from chunkrt.engine.session_file import Conversation, SessionFile
from chunkrt.quant.scheme import Scheme
from chunkrt.runtime.run import Run, RunResult
from chunkrt.tokenizer import Tokenizer


class SessionEngine(SequenceEngine, Protocol):
    """Interface of an engine for sessions."""

    tokenizer: Tokenizer | None
    scheme: Scheme
    make_sampler: Callable[[SamplingOptions], Sampler | PluginSampler]

    def require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raise ModelError if the model has none."""
        ...

    def run(self, run: Run) -> RunResult:
        """Run tokens through the decoder."""
        ...

    def session_file(self, path: str | os.PathLike[str], conversation: Conversation | None = None) -> SessionFile:
        """Return a file for reading or writing a session. Raise ConfigError if the engine is one of several ranks."""
        ...

    async def arun(self, run: Run) -> RunResult:
        """Run tokens through the decoder without blocking the event loop."""
        ...

    def check_open(self) -> None:
        """Raise ClosedError if the engine is closed, or if this process was forked from the process that loaded the
        model.
        """
        ...
