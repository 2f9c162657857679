"""`bench/prefix_cache.py` with other runtimes: order of requests in a conversation, and figures."""

from pathlib import Path

from bench_modules import BENCH, peers


class Fake:
    """Answers with its own token, and takes a fixed time for each token of the prompt."""

    def __init__(self, token, fails_at=None):
        self.token, self.fails_at, self.prompts = token, fails_at, []

    def serve(self, prompts, arrivals, new_tokens):
        if len(self.prompts) == self.fails_at:
            raise peers("process").ContenderError("it is full")
        self.prompts += prompts
        assert arrivals == [0.0]
        return [{"tokens": [self.token] * new_tokens, "times": [float(len(prompts[0])), 1e9]}]


def test_conversation_gives_all_contenders_the_same_turns_and_their_own_answers():
    first, second, failing = Fake(1000), Fake(2000), Fake(3000, fails_at=4)
    times, failures = peers("conversation").measure_conversation(
        {"first": first, "second": second, "failing": failing},
        turns=3,
        turn_tokens=4,
        answer_tokens=2,
        rounds=2,
        vocabulary_size=100,
        pause=lambda _: None,
    )
    assert times == {name: [[4.0] * 2, [10.0] * 2, [16.0] * 2] for name in ("first", "second")}
    assert failures == {"failing": "it is full"}
    assert [len(prompt) for prompt in first.prompts] == [4, 10, 16] * 3
    for one, other in zip(first.prompts, second.prompts, strict=True):
        assert [token for token in one if token < 100] == [token for token in other if token < 100]
    assert first.prompts[2][:10] == first.prompts[1]
    assert first.prompts[1][4:6] == [1000, 1000]
    assert first.prompts[0] != first.prompts[3]  # another round
    assert peers("conversation").table(times, 4, 2).splitlines() == [
        "| turn | tokens | first | second |",
        "| ---: | ---: | ---: | ---: |",
        "| 1 | 4 | 4.000 | 4.000 |",
        "| 2 | 10 | 10.000 | 10.000 |",
        "| 3 | 16 | 16.000 | 16.000 |",
    ]


def test_contenders_are_consistent_data():
    data = peers("contenders")
    names = [contender.name for contender in data.CONVERSING]
    assert len(set(names)) == len(names)
    for contender in data.CONVERSING:
        assert (Path(BENCH) / "peers" / "engines" / f"{contender.engine.replace('.', '/')}.py").exists()
        assert contender.form == "checkpoint" or contender.form in data.FORMS
