"""Sessions over state with limited rewinding, and over rotary tables that depend on the prompt's length."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_backend import CONTEXT, VOCABULARY, LoneExecutor, expected_logits, make_executables, make_plan, shared_cpu
from hypothesis import given, settings
from hypothesis import strategies as st
from random_folders import load_on, write_folder
from states import next_log_probabilities

from chunkrt.engine.options import EngineOptions
from chunkrt.engine.sampling import Sampler
from chunkrt.engine.scoring import likeliest
from chunkrt.engine.session import Session
from chunkrt.errors import BackendError
from chunkrt.graph.plan import Plan
from chunkrt.runtime.request import Request
from chunkrt.runtime.state import State

ALL_KINDS = ("cache", "ring", "recurrent")
CHUNK = 8


class ToyEngine(SimpleNamespace):
    """Engine interface for a session, over the toy decoder. `fails`: True if the next run is to fail at its end."""

    def __init__(self, plan: Plan) -> None:
        executables = make_executables(plan, after=self._after)
        super().__init__(
            plan=plan,
            context_length=CONTEXT,
            chunk_length=CHUNK,
            options=EngineOptions(),
            prefix_cache=None,
            tokenizer=None,
            make_sampler=Sampler,
            check_open=lambda: None,
            fork_state=State.fork,
            fails=False,
            num_run=0,
            executor=LoneExecutor(plan, executables, processors=shared_cpu(1), policy="sequential"),
        )

    def session(self) -> Session:
        return Session(self, State(self.plan, CONTEXT, chunk_length=CHUNK))  # type: ignore[arg-type]

    @property
    def scheduler(self) -> ToyEngine:
        return self

    is_shared = takes_turns = is_driver = False

    def run(self, request: Request) -> Request:
        self.num_run += request.token_ids.size
        return self.executor.run(request)

    def _after(self, name: str, tag: int, inputs: object) -> None:
        if self.fails and name == "head":
            raise ValueError("on purpose")


def check(session: Session, plan: Plan) -> None:
    """Check that the next token is drawn from the logits of all the session's tokens, run at once."""
    if session.tokens:
        truth = expected_logits(plan, np.array(session.tokens, np.int64))[-1]
        told = next_log_probabilities(session, VOCABULARY)
        assert told == likeliest(truth, told.top[0][0], VOCABULARY)


@settings(deadline=None, max_examples=settings().max_examples)
@given(
    kinds=st.sampled_from([("cache",), ("ring",), ("recurrent",), ALL_KINDS]),
    long_context_from=st.sampled_from([None, 30]),
    operations=st.lists(
        st.tuples(st.sampled_from(["prefill", "prefill", "generate", "rewind", "fork", "fail"]), st.floats(0, 1)),
        max_size=8,
    ),
    seed=st.integers(0, 100),
)
def test_session_gives_the_logits_of_its_tokens(
    kinds: tuple[str, ...], long_context_from: int | None, operations: list[tuple[str, float]], seed: int
) -> None:
    random = np.random.default_rng(seed)
    engine = ToyEngine(make_plan(3, kinds=kinds, long_context_from=long_context_from))
    session, tokens = engine.session(), list[int]()
    for name, amount in operations:
        size = int(amount * (CONTEXT - len(tokens)))
        new = random.integers(0, VOCABULARY, size).tolist()
        if name == "prefill" and size:
            logits = session.prefill(new, logits="all").logits
            truth = expected_logits(engine.plan, np.array([*tokens, *new], np.int64))
            np.testing.assert_array_equal(logits, truth[len(tokens) :])
            tokens += new
        elif name == "generate" and size and tokens:
            pieces = session.generate(max_new_tokens=min(size, 5))
            tokens += [piece.token_id for piece in pieces if piece.token_id is not None]
        elif name == "rewind":
            session.rewind(int(amount * len(tokens)))
            del tokens[int(amount * len(tokens)) :]
        elif name == "fork":
            session = session.fork()
        elif name == "fail" and size:
            engine.fails = True
            with pytest.raises(BackendError, match="on purpose"):
                session.prefill(new)
            engine.fails = False
        assert list(session.tokens) == tokens
        check(session, engine.plan)


def test_conversation_over_recurrent_state_runs_only_its_last_answer_again() -> None:
    engine = ToyEngine(make_plan(3, kinds=ALL_KINDS))
    session = engine.session()
    session.prefill(range(50))
    tuple(session.generate(max_new_tokens=6))
    session.rewind(54)
    engine.num_run = 0
    session.prefill([1, 2, 3])
    assert engine.num_run == 4 + 3
    check(session, engine.plan)


def test_another_answer_to_the_same_prompt_runs_no_token_again() -> None:
    engine = ToyEngine(make_plan(3, kinds=ALL_KINDS))
    session = engine.session()
    session.prefill(range(50))
    answers = []
    for _ in range(3):
        engine.num_run = 0
        answers.append([piece.token_id for piece in session.generate(max_new_tokens=6)])
        assert engine.num_run <= 6
        session.rewind(50)
    assert answers[0] == answers[1] == answers[2]
    session.rewind(49)
    check(session, engine.plan)


def test_rewind_over_a_cache_runs_nothing_again() -> None:
    engine = ToyEngine(make_plan(3))
    session = engine.session()
    session.prefill(range(50))
    session.rewind(20)
    engine.num_run = 0
    session.prefill([1, 2, 3])
    assert engine.num_run == 3


def test_tokens_are_run_again_only_if_the_rotary_tables_change() -> None:
    engine = ToyEngine(make_plan(2, long_context_from=30))
    session, run = engine.session(), []
    for count in (20, 10, 1, 5):
        engine.num_run = 0
        session.prefill(range(count))
        run.append(engine.num_run)
        check(session, engine.plan)
    assert run == [20, 10, 31, 5]
    session.rewind(29)
    engine.num_run = 0
    session.prefill([1])
    assert engine.num_run == 30
    check(session, engine.plan)


PROMPT = np.random.default_rng(3).integers(0, 61, 300).tolist()
TOLERANCE = 1e-4
"""Tolerance in float32: a few layers of sums over at most 64 products and 300 keys."""


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Random Mistral models with a window, by the window; each created once."""
    folders: dict[int, Any] = {}

    def make(window: int) -> Any:
        if window not in folders:
            folder = tmp_path_factory.mktemp("mistral") / str(window)
            sizes = {"max_position_embeddings": 4096, "num_hidden_layers": 3}
            folders[window] = write_folder(folder, model_type="mistral", sliding_window=window, **sizes)
        return folders[window]

    return make


on_all_backends = pytest.mark.parametrize("npu", ["reference", "onnxrt", "native"])


@pytest.mark.sampled(every=4)
@on_all_backends
@pytest.mark.parametrize("window", [3, 8, 40, 300, 1000])
def test_window_gives_the_same_logits_in_chunks_and_at_once(windowed: Any, window: int, npu: str) -> None:
    """Windows shorter than a chunk, equal to it, longer than a ring's least size, as long as the prompt, and longer."""
    oracle = npu if npu == "native" else "onnxrt"
    with load_on(oracle, windowed(window), chunk_length=512) as engine:
        truth = engine.session().prefill(PROMPT, logits="all").logits
    with load_on(npu, windowed(window), chunk_length=8) as engine:
        session = engine.session()
        found = [session.prefill(part, logits="all").logits for part in (PROMPT[:70], PROMPT[70:290])]
        found += [session.prefill([token]).logits[None] for token in PROMPT[290:]]
    np.testing.assert_allclose(np.concatenate(found), truth, rtol=0, atol=TOLERANCE)


@on_all_backends
def test_rewind_and_fork_over_rings_change_nothing(windowed: Any, npu: str) -> None:
    with load_on(npu, windowed(8), chunk_length=8) as engine:
        session = engine.session()
        session.prefill(PROMPT[:200])
        for position in (199, 180, 100):  # the last position exceeds the reach of rings
            session.rewind(position)
            found = session.fork().prefill(PROMPT[200:220]).logits
            expected = engine.session().prefill([*PROMPT[:position], *PROMPT[200:220]]).logits
            np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
