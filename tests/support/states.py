"""States of an engine without a session, and the arrays of a session's state."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from chunkrt.engine.engine import Engine
from chunkrt.engine.scoring import TokenLogProbabilities
from chunkrt.engine.session import Session
from chunkrt.runtime.request import Logits, Request
from chunkrt.runtime.state import State


def make_state(engine: Engine, tokens: object = (), *, logits: Logits = "none") -> State:
    """Return a state of an engine that contains some tokens."""
    state = engine.loaded.make_state()
    ids = np.asarray(tokens, np.int64)
    if ids.size:
        engine.loaded.run(Request(ids, state, logits=logits))
    return state


def state_bytes(engine: Engine) -> int:
    """Return the size of one state."""
    before = engine.stats().cache_bytes
    with engine.session():
        return engine.stats().cache_bytes - before


def note_runs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that is filled with the numbers of tokens of runs."""
    ran, run = list[int](), engine.loaded.scheduler.run

    def note(request: Request) -> Request:
        ran.append(request.token_ids.size)
        return run(request)

    monkeypatch.setattr(engine.loaded.scheduler, "run", note)
    return ran


def saved_arrays(session: Session) -> dict[str, np.ndarray]:
    """Return the arrays of a session's file: those of its state that later tokens read, and of its conversation."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "session"
        session.save(path)
        with np.load(path) as archive:
            return {name: archive[name] for name in archive.files}


def next_log_probabilities(session: Session, number: int) -> TokenLogProbabilities | None:
    """Return the log-probabilities from which a session would draw its next token; the session stays unchanged."""
    with session.fork() as fork:
        return next(fork.generate(max_new_tokens=1, log_probabilities=number)).log_probabilities
