"""Sessions: input, output, and the session after an error."""

import threading

import numpy as np
import pytest
from fixture_checkpoints import checkpoint, input_ids
from states import saved_arrays

import chunkrt
from chunkrt.engine.sampling import SamplingOptions
from chunkrt.errors import BackendError, ClosedError, ConfigError

NAME = "llama_biased_gguf"
TOKENS = input_ids(NAME)
CONTEXT = 128


@pytest.fixture(scope="module")
def engine():
    with chunkrt.load(checkpoint(NAME), chunk_length=8, threads=2) as engine:
        yield engine


@pytest.fixture
def session(engine):
    with engine.session() as session:
        yield session


def generated(session, **options):
    return [piece.token_id for piece in session.generate(**options)]


def next_logits(session):
    """Return the logits that the next token is drawn from, without drawing one."""
    return saved_arrays(session)["session.logits"]


def test_prefill_result_describes_the_prefill(session):
    result = session.prefill(TOKENS[:20])
    assert (result.num_tokens, result.num_chunks) == (20, 3)
    assert result.logits.shape == (128,)
    assert result.seconds > 0
    # Only the last chunk continues after the last attention, because only its logits are requested.
    assert len(result.events) == 3 * 5 + 2
    assert session.tokens == tuple(TOKENS[:20])
    assert (session.position, session.context_length) == (20, CONTEXT)


def test_logits_of_all_tokens_of_the_last_or_of_none(engine):
    every = engine.session().prefill(TOKENS, logits="all").logits
    last = engine.session().prefill(TOKENS, logits="last").logits
    none = engine.session().prefill(TOKENS, logits="none").logits
    assert every.shape == (70, 128)
    np.testing.assert_array_equal(every[-1], last)
    assert none is None


def test_prefill_without_logits_can_be_continued(engine):
    with_logits, without = engine.session(), engine.session()
    with_logits.prefill(TOKENS[:20])
    without.prefill(TOKENS[:20], logits="none")
    assert generated(without, max_new_tokens=5) == generated(with_logits, max_new_tokens=5)


def test_generation_is_greedy_by_the_logits(session):
    """Each token is the likeliest after those before it, as in a fresh prefill."""
    session.prefill(TOKENS[:11])
    tokens = generated(session, max_new_tokens=6)
    for count in range(6):
        fresh = session.fork()
        fresh.rewind(0)
        assert np.argmax(fresh.prefill([*TOKENS[:11], *tokens[:count]]).logits) == tokens[count]
    assert session.tokens == (*TOKENS[:11], *tokens)


def test_generation_continues_over_calls(engine):
    at_once, in_two = engine.session(), engine.session()
    at_once.prefill(TOKENS[:10])
    in_two.prefill(TOKENS[:10])
    expected = generated(at_once, max_new_tokens=8)
    assert generated(in_two, max_new_tokens=4) + generated(in_two, max_new_tokens=4) == expected
    assert in_two.tokens == at_once.tokens


def test_generation_that_is_left_early_can_be_continued(engine):
    at_once, left = engine.session(), engine.session()
    at_once.prefill(TOKENS[:10])
    left.prefill(TOKENS[:10])
    expected = generated(at_once, max_new_tokens=6)
    pieces = left.generate(max_new_tokens=6)
    assert [next(pieces).token_id, next(pieces).token_id] == expected[:2]
    del pieces
    assert generated(left, max_new_tokens=4) == expected[2:]


def test_prompt_after_a_generation_follows_it(engine):
    session, fresh = engine.session(), engine.session()
    session.prefill(TOKENS[:10])
    answer = generated(session, max_new_tokens=3)
    found = session.prefill(TOKENS[10:20], logits="all")
    expected = fresh.prefill([*TOKENS[:10], *answer, *TOKENS[10:20]], logits="all")
    np.testing.assert_array_equal(found.logits, expected.logits[-10:])


def test_prompt_longer_than_the_context_is_rejected_with_counts(session):
    session.prefill(TOKENS[:60])
    before = next_logits(session)
    with pytest.raises(ConfigError, match="the prompt has 69 tokens, but the context of 128 has room for 68"):
        session.prefill([1] * 69)
    assert session.tokens == tuple(TOKENS[:60])
    np.testing.assert_array_equal(next_logits(session), before)


def test_prompt_of_exactly_the_context_is_accepted(session):
    session.prefill((TOKENS * 2)[:CONTEXT])
    assert session.position == CONTEXT
    (piece,) = session.generate(max_new_tokens=5)
    assert piece.finish_reason == "context"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty; pass at least one token"),
        ([3, 128], "token id 128 is outside the vocabulary of 128"),
        ([3, -1], "token id -1 is outside the vocabulary of 128"),
        ([2**40], "token id 1099511627776 is outside"),
    ],
)
def test_invalid_prompt_is_rejected_and_changes_nothing(session, prompt, message):
    session.prefill(TOKENS[:10])
    with pytest.raises(ConfigError, match=message):
        session.prefill(prompt)
    assert session.tokens == tuple(TOKENS[:10])


def test_text_becomes_tokens_with_a_beginning(engine, session):
    session.prefill("hello")
    assert session.tokens == tuple(engine.tokenizer.encode("hello", add_special=True, parse_special=False))
    session.prefill("again")
    assert session.tokens[-5:] == tuple(engine.tokenizer.encode("again", add_special=False, parse_special=False))[-5:]
    assert session.tokens.count(1) == 1


def test_pieces_concatenate_to_the_text_of_the_tokens(engine, session):
    session.prefill(TOKENS[:10])
    pieces = list(session.generate(max_new_tokens=20))
    tokens = [piece.token_id for piece in pieces]
    assert "".join(piece.text for piece in pieces).strip() == engine.tokenizer.decode(tokens).strip()
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]


def text_and_tokens(engine):
    session = engine.session()
    session.prefill(TOKENS[:10])
    pieces = list(session.generate(max_new_tokens=20))
    return "".join(piece.text for piece in pieces), [piece.token_id for piece in pieces]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_stop_string_ends_the_text_before_it(engine, session, length):
    text, _ = text_and_tokens(engine)
    stop = text[6 : 6 + length]
    session.prefill(TOKENS[:10])
    pieces = list(session.generate(max_new_tokens=20, stop=["never this", stop]))
    assert "".join(piece.text for piece in pieces) == text[: text.index(stop)]
    assert pieces[-1].finish_reason == "stop"
    assert all(piece.finish_reason is None for piece in pieces[:-1])


def test_end_token_stops_and_has_no_text(engine, monkeypatch):
    text, tokens = text_and_tokens(engine)
    end = tokens[7]
    first = tokens.index(end)
    monkeypatch.setattr(type(engine.tokenizer), "eos_ids", property(lambda self: frozenset({end})))
    session = engine.session()
    session.prefill(TOKENS[:10])
    pieces = list(session.generate(max_new_tokens=20))
    assert [piece.token_id for piece in pieces] == tokens[: first + 1]
    assert pieces[-1].finish_reason == "stop"
    assert text.startswith("".join(piece.text for piece in pieces))
    assert session.tokens[-1] == end


def test_full_context_ends_the_generation(engine):
    with chunkrt.load(checkpoint(NAME), chunk_length=8, context_length=16) as small:
        session, large = small.session(), engine.session()
        session.prefill(TOKENS[:10])
        large.prefill(TOKENS[:10])
        pieces = list(session.generate(max_new_tokens=100))
        assert [piece.finish_reason for piece in pieces] == [None] * 6 + ["context"]
        # The last token needs no place of its own, because it is not run.
        assert [piece.token_id for piece in pieces] == generated(large, max_new_tokens=7)
        assert session.position == 16
        with pytest.raises(ConfigError, match="the prompt has 1 tokens, but the context of 16 has room for 0"):
            session.prefill([1])
        session.rewind(10)
        assert len(generated(session, max_new_tokens=3)) == 3


def test_generation_needs_a_prompt(session):
    with pytest.raises(ConfigError, match="the session has no tokens to continue; call prefill first"):
        session.generate()


def test_returned_logits_do_not_change_later(session):
    logits = session.prefill(TOKENS[:10]).logits
    before = logits.copy()
    generated(session, max_new_tokens=3)
    session.prefill(TOKENS[10:40])
    np.testing.assert_array_equal(logits, before)


def test_closed_session_raises_closed_error(engine):
    with engine.session() as session:
        session.prefill(TOKENS[:10])
    for use in (lambda: session.prefill([1]), session.generate, session.fork, lambda: session.rewind(0)):
        with pytest.raises(ClosedError, match="the session is closed"):
            use()
    session.close()


def test_close_during_generation_stops_it(session):
    session.prefill(TOKENS[:10])
    pieces = session.generate(max_new_tokens=10)
    next(pieces)
    session.close()
    with pytest.raises(ClosedError):
        list(pieces)


class Hook:
    """Request a function before the first call of an executable."""

    def __init__(self, engine, monkeypatch, action):
        subgraph = engine.loaded.scheduler.executors.prompts.subgraphs[3]
        run_subgraph, self.action = subgraph.run, action

        def run(*arguments):
            action, self.action = self.action, None
            if action:
                action()
            run_subgraph(*arguments)

        monkeypatch.setattr(subgraph, "run", run)


def test_use_by_another_thread_is_rejected_and_does_not_revoke_a_cancellation(engine, session, monkeypatch):
    session.prefill(TOKENS[:10])
    errors = []

    def cancel_and_generate():
        session.cancel()
        for use in (session.generate, lambda: session.prefill([1])):
            with pytest.raises(ConfigError, match="in use by another thread or task; create one for each") as error:
                use()
            errors.append(error)

    def meanwhile():
        thread = threading.Thread(target=cancel_and_generate)
        thread.start()
        thread.join(60)

    Hook(engine, monkeypatch, meanwhile)
    with pytest.raises(ClosedError, match="cancelled"):
        session.prefill(TOKENS[10:60])
    assert len(errors) == 2


def test_close_of_the_engine_during_a_prefill_of_the_same_thread_ends_the_prefill(monkeypatch):
    engine = chunkrt.load(checkpoint(NAME), chunk_length=8, threads=1)
    session = engine.session()
    Hook(engine, monkeypatch, engine.close)
    with pytest.raises(ClosedError, match="closed"):
        session.prefill(TOKENS)
    with pytest.raises(ClosedError, match="closed"):
        _ = engine.loaded.scheduler.executors


def fail():
    raise ZeroDivisionError("in the kernel")


@pytest.mark.parametrize(
    ("action", "error", "cause"),
    [
        ("cancel", pytest.raises(ClosedError, match="cancelled after"), None),
        (fail, pytest.raises(BackendError, match=r"subgraph \S+ failed on chunk \d+: in the"), ZeroDivisionError),
    ],
)
def test_cancelled_or_failed_prefill_leaves_the_session_unchanged(engine, session, monkeypatch, action, error, cause):
    session.prefill(TOKENS[:10])
    before = next_logits(session)
    Hook(engine, monkeypatch, session.cancel if action == "cancel" else action)
    with error as raised:
        session.prefill(TOKENS[10:60])
    assert cause is None or isinstance(raised.value.__cause__, cause)
    assert session.tokens == tuple(TOKENS[:10])
    np.testing.assert_array_equal(next_logits(session), before)
    result = session.prefill(TOKENS[10:60])
    np.testing.assert_array_equal(result.logits, engine.session().prefill(TOKENS[:60]).logits)


WRONG_PROMPTS = [
    b"hello",
    bytearray(b"hi"),
    None,
    7,
    1.5,
    [1.7, 2.2],
    ["a", "b"],
    [True],
    [None],
    {1: 2},
    {3},
    ...,
]
WRONG_PROMPTS += [np.array([1.0, 2.0]), np.ones((2, 2), int), [[1, 2]], [float("nan")]]


@pytest.mark.parametrize("prompt", WRONG_PROMPTS, ids=repr)
def test_prompt_of_another_type_is_rejected(session, prompt):
    """Nothing is rounded, and bytes are not token ids."""
    session.prefill(TOKENS[:5])
    with pytest.raises(ConfigError, match="expected"):
        session.prefill(prompt)
    assert session.tokens == tuple(TOKENS[:5])


@pytest.mark.parametrize(
    "prompt", [TOKENS[:9], tuple(TOKENS[:9]), np.array(TOKENS[:9]), np.array(TOKENS[:9], np.uint8)]
)
def test_token_ids_may_come_in_any_list(session, prompt):
    session.prefill(prompt)
    session.prefill(iter(TOKENS[:3]))
    assert session.tokens == (*TOKENS[:9], *TOKENS[:3])


WRONG_NUMBERS = ["2", 2.0, 2.5, None, True, [2], float("nan")]
WRONG_OPTIONS = [
    *({"max_new_tokens": value} for value in (*WRONG_NUMBERS, 0, -1)),
    *({"sampling": value} for value in (None, {}, 0.5, "greedy", SamplingOptions)),
    *({"stop": value} for value in (None, 3, "end", b"end", [""], [None], [b"end"], [3])),
]


@pytest.mark.parametrize("options", WRONG_OPTIONS, ids=str)
def test_invalid_generation_options_are_rejected(session, options):
    session.prefill(TOKENS[:5])
    (name,) = options
    with pytest.raises(ConfigError, match=name):
        session.generate(**options)


def test_generation_accepts_numpy_integers(session):
    session.prefill(TOKENS[:5])
    assert len(generated(session, max_new_tokens=np.int64(2), stop=iter(["never"]))) <= 2


@pytest.mark.parametrize("position", [*WRONG_NUMBERS, -1, 6])
def test_invalid_positions_are_rejected(session, position):
    session.prefill(TOKENS[:5])
    message = f"cannot rewind to position {position}; the session is at 5" if type(position) is int else "position"
    with pytest.raises(ConfigError, match=message):
        session.rewind(position)
    assert session.position == 5


@pytest.mark.parametrize("logits", [None, True, [], 1])
def test_unknown_logits_are_rejected(session, logits):
    with pytest.raises(ConfigError, match="logits is"):
        session.prefill(TOKENS, logits=logits)


def test_other_invalid_arguments_are_rejected(engine, session):
    with pytest.raises(ConfigError, match="on_run is 3, expected a function"):
        session.on_run = 3
    with pytest.raises(ConfigError, match="request is 3, expected a Request"):
        engine.loaded.run(3)
    with pytest.raises(ConfigError, match="model is None, expected a name or a path"):
        chunkrt.load(None)
    for options in ({"calibration": 3}, {"htp": {}}):
        with pytest.raises(ConfigError, match=f"`{next(iter(options))}` is .*, expected"):
            chunkrt.load(checkpoint(NAME), **options)


@pytest.mark.parametrize(
    ("options", "number", "reason"),
    [({}, 1, "stop"), ({"ignore_eos": True}, 6, "length"), ({"min_new_tokens": 3}, 4, "stop")],
)
def test_end_tokens_respect_ignore_eos_and_min_new_tokens(engine, options, number, reason):
    (end,) = engine.tokenizer.eos_ids
    sampling = SamplingOptions(logit_bias={end: 100}, **options)
    with engine.session() as session:
        session.prefill("hello")
        pieces = list(session.generate(max_new_tokens=6, sampling=sampling))
    assert (len(pieces), pieces[-1].finish_reason) == (number, reason)
    answers = dict(engine.stream(["hello"], max_new_tokens=6, sampling=sampling))
    assert answers[0].finish_reason == reason


def test_max_new_tokens_below_the_minimum_is_rejected(engine):
    with engine.session() as session:
        session.prefill("hello")
        with pytest.raises(ConfigError, match="min_new_tokens is 7, more than max_new_tokens"):
            session.generate(max_new_tokens=6, sampling=SamplingOptions(min_new_tokens=7))
