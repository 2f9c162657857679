"""Tasks: scores against complete prompts in plain NumPy, prompts as in lm-evaluation-harness, malformed lines."""

import json
from math import sqrt

import numpy as np
import pytest
from fixture_checkpoints import checkpoint

import chunkrt
from chunkrt.engine.scoring import encode_pair
from chunkrt.errors import ConfigError
from chunkrt.evaluation import hellaswag, lambada
from chunkrt.evaluation.scored_items import Accuracy

GGUF = checkpoint("llama_biased_gguf")
SWAG = [
    {
        "activity_label": "Roof shingle removal",
        "ctx_a": "A man is on a roof.",
        "ctx_b": "he",
        "endings": ["starts pulling up roofing.", "is ripping level tiles off.", "waits.", "is holding a cube."],
        "label": 3,
    },
    {
        "activity_label": "Cutting",
        "ctx_a": "[header] How to cut [title] Take scissors.",
        "ctx_b": "",
        "endings": ["Cut  it.", "[substeps] Sleep now.", "Eat.", "Run away from all of it."],
        "label": "1",
        "source_id": "wikihow~1",
    },
]
WORDS = [{"text": "the cat saw the dog and the dog saw the cat"}, {"text": "one, two and three\n"}, {"text": "yes no"}]


@pytest.fixture
def write(tmp_path):
    def write(items):
        path = tmp_path / "items.jsonl"
        path.write_text("".join(f"{item if isinstance(item, str) else json.dumps(item)}\n" for item in items), "utf-8")
        return path

    return write


@pytest.fixture(scope="module")
def engine():
    with chunkrt.load(GGUF, npu="native") as engine:
        yield engine


def log_probability(engine, context, continuation):
    """Return the continuation's log-probability, from one run of the complete prompt, and whether it is greedy."""
    whole = engine.session().prefill([*context, *continuation], logits="all").logits.astype(np.float64)
    rows = whole[len(context) - 1 : -1]
    log_p = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return log_p[np.arange(len(continuation)), continuation].sum(), (rows.argmax(axis=1) == continuation).all()


def test_scores_are_those_of_the_whole_prompt(engine):
    session, random = engine.session(), np.random.default_rng(0)
    context = random.integers(0, 128, 40).tolist()
    pairs = [(context, random.integers(0, 128, n).tolist()) for n in (1, 2, 5, 1)]
    pairs += [(context[:7], [3]), ([5], [6, 7]), ([*context[:20], 1], [2] * 9)]
    for pair in pairs:
        found = session.score(*pair)
        expected, is_greedy = log_probability(engine, *pair)
        assert found.log_probability == pytest.approx(expected, rel=1e-6)
        assert found.is_greedy == is_greedy


def test_the_likeliest_continuation_is_greedy(engine):
    session = engine.session()
    session.prefill("once upon a time")
    tokens = session.tokens
    ids = [piece.token_id for piece in session.generate(max_new_tokens=4)]
    assert engine.session().score(tokens, ids).is_greedy
    assert not engine.session().score(tokens, [*ids[:-1], (ids[-1] + 1) % 128]).is_greedy


def test_a_shared_context_is_run_once(engine):
    lengths = []
    session, context = engine.session(), list(range(1, 31))
    session.on_run = lambda record: lengths.append(record.num_tokens)
    for continuation in ([40, 41, 42], [50], [60, 61]):
        session.score(context, continuation)
    assert lengths == [29, 3, 1, 2]


def test_hellaswag_items(write):
    first, second = hellaswag.read(write(SWAG))
    assert (first.context, first.label) == ("Roof shingle removal: A man is on a roof. He", 3)
    assert second.context == "Cutting: How to cut. Take scissors."
    assert second.endings == ("Cut it.", " Sleep now.", "Eat.", "Run away from all of it.")
    assert (second.label, second.line) == (1, 2)


def test_hellaswag_against_numpy(engine, write):
    items = hellaswag.read(write(SWAG))
    hits, normalised = [], []
    for item in items:
        encoded = [encode_pair(engine.tokenizer, item.context, f" {ending}") for ending in item.endings]
        scores = np.array([log_probability(engine, *pair)[0] for pair in encoded])
        hits.append(scores.argmax() == item.label)
        normalised.append((scores / [len(ending) for ending in item.endings]).argmax() == item.label)
    found = hellaswag.evaluate(engine, items)
    assert (found.num_items, found.accuracy.value) == (2, np.mean(hits))
    assert found.normalised_accuracy.value == np.mean(normalised)


def test_lambada_against_numpy(engine, write):
    items = lambada.read(write(WORDS))
    assert [(item.context, item.word) for item in items] == [
        ("the cat saw the dog and the dog saw the", "cat"),
        ("one, two and", "three"),
        ("yes", "no"),
    ]
    expected = [log_probability(engine, *encode_pair(engine.tokenizer, i.context, f" {i.word}")) for i in items]
    found = lambada.evaluate(engine, items)
    assert found.perplexity == pytest.approx(np.exp(-np.mean([value for value, _ in expected])), rel=1e-5)
    assert found.accuracy.value == np.mean([is_greedy for _, is_greedy in expected])


def test_spaces_at_the_end_of_a_context_move_to_the_continuation(engine):
    assert encode_pair(engine.tokenizer, "the cat ", "saw") == encode_pair(engine.tokenizer, "the cat", " saw")


def test_the_standard_error():
    assert Accuracy.of([True, False, False, False]) == Accuracy(value=0.25, standard_error=sqrt(0.25 * 0.75 / 3))
    assert Accuracy.of([True]) == Accuracy(value=1, standard_error=None)


def test_the_command(command, write, tmp_path):
    swag = write(SWAG).rename(tmp_path / "swag.jsonl")
    words = write(WORDS)
    arguments = ("eval", GGUF, "--npu", "native", "--hellaswag", swag, "--lambada", words)
    finished = command(*arguments, "--json")
    assert (finished.status, finished.err) == (0, "")
    found = json.loads(finished.out)
    assert found["text"] is None
    assert (found["hellaswag"]["file"], found["hellaswag"]["figures"]["num_items"]) == (str(swag), 2)
    accuracy = found["lambada"]["figures"]["accuracy"]
    assert found["lambada"]["figures"]["num_items"] == 3
    out = command(*arguments).out
    assert f"HellaSwag, {swag}: 2 items" in out
    assert f"{accuracy['value']:.4f} ± {accuracy['standard_error']:.4f}" in out
    assert "LAMBADA, " in command(*arguments, "--limit", 1).out
    assert ": 1 items" in command(*arguments, "--limit", 1).out


GOOD = SWAG[0]
MALFORMED = [
    ("--hellaswag", "{", "line 2: Expecting property name"),
    ("--hellaswag", "[1]", "line 2: expected a JSON object"),
    ("--hellaswag", "[" * 100_000, "line 2: "),
    ("--hellaswag", {**GOOD, "ctx_b": None}, "line 2: 'ctx_b' is None, expected a text"),
    ("--hellaswag", {"ctx_a": "x"}, "line 2: 'activity_label' is missing, expected a text"),
    ("--hellaswag", {**GOOD, "endings": "abcd"}, "line 2: 'endings' is not a list of two texts or more"),
    ("--hellaswag", {**GOOD, "endings": ["a", 2]}, "line 2: 'endings' is not a list of two texts or more"),
    ("--hellaswag", {**GOOD, "endings": ["a", "[b]"], "label": 0}, "line 2: an ending has no text except marks"),
    ("--hellaswag", {**GOOD, "label": 4}, "line 2: 'label' is 4, expected 0 to 3"),
    ("--hellaswag", {**GOOD, "label": True}, "line 2: 'label' is True, expected 0 to 3"),
    ("--hellaswag", {**GOOD, "label": ""}, "the test split has no labels, take the validation split"),
    ("--lambada", {"passage": "x"}, "line 2: 'text' is missing, expected a text"),
    ("--lambada", {"text": "word "}, "line 2: 'text' has fewer than two words"),
]


@pytest.mark.parametrize(("option", "line", "message"), MALFORMED)
def test_malformed_lines(command, write, option, line, message):
    path = write([GOOD if option == "--hellaswag" else WORDS[0], line])
    finished = command("eval", GGUF, option, path)
    assert (finished.status, finished.out) == (1, "")
    (error,) = finished.err.splitlines()
    assert error.startswith(f"chunkrt: {path}, line 2: ")
    assert message in error


def test_unreadable_task_files_are_refused(command, write, tmp_path):
    assert "cannot read the task from nowhere" in command("eval", GGUF, "--lambada", "nowhere").err
    assert "has no items; expected a JSON object on every line" in command("eval", GGUF, "--lambada", write([""])).err
    assert "is not UTF-8" in command("eval", GGUF, "--lambada", GGUF).err


def test_items_that_do_not_fit_are_named(engine, write):
    items = lambada.read(write([WORDS[0], {"text": "word " * 2000}]))
    with pytest.raises(ConfigError, match=r"LAMBADA, line 2: .* do not fit the context of"):
        lambada.evaluate(engine, items)
    items = lambada.read(write([WORDS[0], {"text": "half of a character: \ud800 word"}]))
    with pytest.raises(ConfigError, match=r"LAMBADA, line 2: the text is not valid Unicode"):
        lambada.evaluate(engine, items)


def test_the_adapter_for_the_harness_scores_the_same(engine):
    pytest.importorskip("lm_eval", reason='lm-evaluation-harness is not installed: pip install "chunkrt[lm-eval]"')
    from lm_eval.api.instance import Instance

    from chunkrt.evaluation.harness import ChunkrtLM

    model = ChunkrtLM(str(GGUF), npu="native")

    def requests(kind, *arguments):
        return [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]

    pairs = [("the cat saw", " the dog"), ("the cat saw", " it"), ("", "alone")]
    found = model.loglikelihood(requests("loglikelihood", *pairs))
    for (context, continuation), (value, is_greedy) in zip(pairs, found, strict=True):
        tokens = encode_pair(engine.tokenizer, context, continuation)
        if not context:
            tokens = ([model.prefix_token_id], model.tok_encode(continuation, add_special_tokens=False))
        expected = log_probability(engine, *tokens)
        assert (value, is_greedy) == (pytest.approx(expected[0], rel=1e-6), expected[1])
    (rolled,) = model.loglikelihood_rolling(requests("loglikelihood_rolling", ("the cat saw the dog",)))
    tokens = model.tok_encode("the cat saw the dog")
    assert rolled == pytest.approx(log_probability(engine, [model.prefix_token_id], tokens)[0], rel=1e-6)
    (text,) = model.generate_until(requests("generate_until", ("the cat", {"until": ["\n"], "max_gen_toks": 8})))
    session = engine.session()
    session.prefill("the cat")
    assert text == "".join(piece.text for piece in session.generate(max_new_tokens=8, stop=["\n"]))
