"""Log-probabilities of given and of likeliest tokens."""

import asyncio

import numpy as np
import pytest
from fixture_checkpoints import checkpoint
from states import note_runs

import chunkrt
from chunkrt.engine import scoring
from chunkrt.engine.scoring import by_beginning, likeliest, log_softmax, score_tokens
from chunkrt.engine.session import prompt_log_probabilities
from chunkrt.errors import ModelError
from chunkrt.runtime.request import Request


def test_score_tokens_equals_log_softmax_bit_for_bit():
    random = np.random.default_rng(0)
    logits = (9 * random.normal(size=(5, 3001))).astype(np.float32)
    tokens = np.array([0, 5, 3000, logits[3].argmax(), 7])
    log_probabilities, is_top = score_tokens(logits, tokens)
    assert log_probabilities.tolist() == log_softmax(logits)[np.arange(5), tokens].tolist()
    assert is_top.tolist() == [False, False, False, True, False]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("act", [lambda logits: score_tokens(logits, np.array([0, 1])), log_softmax])
def test_logits_that_are_not_finite_are_an_error(act, value):
    logits = np.zeros((2, 9), np.float32)
    logits[1, 3] = value
    with pytest.raises(ModelError, match="not finite"):
        act(logits)


def test_by_beginning_groups_prompts_with_half_in_common():
    prompts = [[1, 2, 3, 4], [9], [1, 2, 3, 5, 6], [1], [9, 9], [1, 2, 8, 8, 8]]
    assert by_beginning(prompts) == [[3], [0, 2], [5], [1, 4]]


@pytest.mark.parametrize("number", [0, 1, 5, 20, 50])
@pytest.mark.parametrize("num_values", [1, 2, 7, 1000], ids="of {} different".format)
def test_likeliest_tokens_equal_those_of_a_stable_sort(num_values, number):
    """The lower id of equally likely ones comes first, also if several share the last place."""
    logits = np.random.default_rng(number).integers(0, num_values, 50).astype(np.float32)
    found = log_softmax(logits[None])[0]
    expected = [(int(i), float(found[i])) for i in np.argsort(-found, kind="stable")[:number]]
    told = likeliest(logits, 3, number)
    assert told.top == expected
    assert told.own == found[3]


@pytest.mark.parametrize("act", ["ascore", "atell"])
def test_on_run_may_use_the_session_with_an_event_loop(act):
    """Steps that run in a thread belong to the task."""
    told = []

    async def use(engine):
        async with await engine.asession() as session:
            session.on_run = lambda record: told.append(session.fork().position)
            return await (
                session.ascore([1, 2], [3, 4]) if act == "ascore" else prompt_log_probabilities(session, [1, 2, 3], 2)
            )

    with chunkrt.load(checkpoint("llama_gqa"), npu="native") as engine:
        assert asyncio.run(use(engine))
    assert told


@pytest.mark.parametrize("name", ["llama_gqa", "gemma3_window_5", "lfm2_biased", "qwen3_next", "phi3_longrope_short"])
def test_texts_with_a_shared_beginning_have_the_same_results_as_alone(name):
    """They run one after the other in a session, with states that can go back to different positions."""
    random = np.random.default_rng(0)

    async def tell(engine, texts, goes_on):
        told, before = [], ()
        session = await engine.asession()
        for text in texts:
            if not goes_on:
                session, before = await engine.asession(), ()
            before, _ = await prompt_log_probabilities(session, text, 3, before)
            told.append(before)
        return told

    with chunkrt.load(checkpoint(name), npu="native", chunk_length=8, context_length=60) as engine:
        beginning = random.integers(1, engine.plan.vocab_size, 21).tolist()
        texts = [[*beginning, *random.integers(1, engine.plan.vocab_size, n).tolist()] for n in (5, 9, 1, 0, 17)]
        texts += [texts[-1], beginning[:3], [*beginning[:3], 1, 2]]
        together = asyncio.run(tell(engine, texts, goes_on=True))
        assert [len(told) for told in together] == [len(text) - 1 for text in texts]
        assert together == asyncio.run(tell(engine, texts, goes_on=False))


@pytest.mark.parametrize("name", ["llama_gqa", "gemma3_window_5", "lfm2_biased", "qwen3_next"])
def test_shared_tokens_are_not_run_again(name, monkeypatch):
    """Rings and recurrent state go back further than the divergence of two texts."""

    async def tell(engine):
        told, counts, before = [], [], ()
        session = await engine.asession()
        for text in ([*range(1, 31), 5, 6], [*range(1, 31), 7, 8, 9], [*range(1, 31), 7, 8, 9], [4, 5]):
            ran.clear()
            before, num_cached = await prompt_log_probabilities(session, text, 2, before)
            told.append(len(text) - num_cached)
            counts.append(sum(ran))
        return told, counts

    with chunkrt.load(checkpoint(name), npu="native", chunk_length=8, context_length=60) as engine:
        ran = note_runs(engine, monkeypatch)
        told, counts = asyncio.run(tell(engine))
    assert told == counts
    assert told[0] == 32
    assert told[-1] == 2


def rows_in_pieces(engine, monkeypatch):
    """Limit pieces to 8 rows of logits, and return a list of the numbers of rows that requests then hold."""
    num_rows, begin = [], Request.begin

    def noted(request, *arguments):
        begin(request, *arguments)
        num_rows.append(0 if request.logits is None else len(request.logits))

    monkeypatch.setattr(scoring, "PIECE_BYTES", 8 * 4 * engine.plan.vocab_size)
    monkeypatch.setattr(Request, "begin", noted)
    return num_rows


@pytest.mark.parametrize("name", ["llama_gqa", "gemma3_window_5", "lfm2_biased", "qwen3_next"])
def test_context_has_no_logits_for_any_rewind_of_the_state(name, monkeypatch):
    context, continuations = [*range(1, 31)], ([*range(5, 29)], [5, *range(8, 29)], [11])  # the first two in pieces
    with chunkrt.load(checkpoint(name), npu="native", chunk_length=8, context_length=60) as engine:
        expected = [engine.session().score(context, continuation) for continuation in continuations]
        num_rows = rows_in_pieces(engine, monkeypatch)
        with engine.session() as session:
            scores = [session.score(context, continuation) for continuation in continuations]
    assert 0 < max(num_rows) < 2 * 8
    values = [score.log_probability for score in expected]  # their sums are over other pieces
    assert [score.log_probability for score in scores] == pytest.approx(values, rel=1e-12)


@pytest.mark.parametrize("name", ["llama_gqa", "gemma3_window_5", "lfm2_biased", "qwen3_next"])
def test_held_logits_never_exceed_a_piece(name, monkeypatch):
    """The state goes back to different positions before it continues from the shared beginning."""

    async def tell(engine):
        session = await engine.asession()
        before, _ = await prompt_log_probabilities(session, [*range(1, 31), 5, 6], 2)
        return (await prompt_log_probabilities(session, [*range(1, 31), 7, 8, 9], 2, before))[0]

    with chunkrt.load(checkpoint(name), npu="native", chunk_length=8, context_length=60) as engine:
        expected = asyncio.run(tell(engine))
        num_rows = rows_in_pieces(engine, monkeypatch)
        assert asyncio.run(tell(engine)) == expected
    assert 0 < max(num_rows) < 2 * 8
