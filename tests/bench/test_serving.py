"""`bench/serving.py`: rounds, arrivals and figures; and chunkrt's own server on a tiny model. No other runtime is
needed.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from bench_modules import BENCH, peers
from click.testing import CliRunner
from fixture_checkpoints import checkpoint

import chunkrt

GGUF = checkpoint("llama_biased_gguf")


class Fake:
    """Answers a token every `gap` seconds after each arrival, and records its requests."""

    def __init__(self, name, asked, gap=0.5, first_token=7, fails=False):
        self.name, self.asked, self.gap, self.first_token, self.fails = name, asked, gap, first_token, fails

    def serve(self, prompts, arrivals, new_tokens):
        self.asked.append((self.name, prompts, arrivals))
        if self.fails:
            raise peers("process").ContenderError("too many")
        return [
            {
                "tokens": [self.first_token] * new_tokens,
                "times": [arrival + self.gap * (1 + step) for step in range(new_tokens)],
            }
            for arrival in arrivals
        ]


def measured(contenders, rounds=2, seed=0):
    pauses = []
    results, same = peers("serving").measure_serving(
        contenders,
        {"all at once": None, "Poisson": 4.0},
        shape=(3, 10),
        new_tokens=4,
        rounds=rounds,
        vocabulary_size=100,
        seed=seed,
        pause=pauses.append,
    )
    return results, same, pauses


def test_contenders_take_turns_on_the_same_prompts_and_arrivals():
    asked = []
    _, _, pauses = measured({name: Fake(name, asked) for name in ("a", "b")})
    assert [name for name, _, _ in asked] == ["a", "b"] * 6
    assert len(pauses) == len(asked)
    assert [each[1:] for each in asked[::2]] == [each[1:] for each in asked[1::2]]
    prompts = [prompt for _, prompts, _ in asked[::2] for prompt in prompts]
    assert len(set(map(tuple, prompts))) == 6 * 3
    assert all(len(prompt) == 10 and 0 <= min(prompt) <= max(prompt) < 100 for prompt in prompts)
    assert [arrivals for _, _, arrivals in asked[::4]] == [[0.0] * 3] * 3
    poisson = [arrivals for _, _, arrivals in asked[2::4]]
    assert len(set(map(tuple, poisson))) == 3
    assert all(arrivals[0] == 0 and arrivals == sorted(set(arrivals)) for arrivals in poisson)
    again = []
    measured({"a": Fake("a", again)})
    assert [each[1:] for each in again] == [each[1:] for each in asked[::2]]


def test_poisson_arrivals_have_their_rate():
    asked = []
    peers("serving").measure_serving(
        {"a": Fake("a", asked)},
        {"Poisson": 4.0},
        shape=(4000, 1),
        new_tokens=2,
        rounds=1,
        vocabulary_size=9,
        seed=1,
        pause=lambda seconds: None,
    )
    assert np.diff(asked[0][2]).mean() == pytest.approx(1 / 4, rel=0.05)


def test_figures_by_hand():
    times = [[2.0, 2.5, 4.5], [3.0, 3.5, 6.0]]
    found = peers("serving").figures_of([0.0, 2.0], times, 9)
    assert found == pytest.approx([(18 + 6) / 6, 6 / 6, 1.5, 1.95, 1.25, 2.425])


def test_results_have_ratios_within_a_round_and_failures():
    asked = []
    contenders = {
        "ours": Fake("ours", asked, gap=0.5),
        "theirs": Fake("theirs", asked, gap=1.0, first_token=8),
        "none": Fake("none", asked, fails=True),
    }
    results, same, _ = measured(contenders)
    assert results.ratios("all at once: generated tokens/s", "ours", "theirs") == [2.0, 2.0]
    assert results.ratios("Poisson: gap p95, s", "ours", "theirs") == pytest.approx([0.5, 0.5])
    assert results.failures == {"all at once": {"none": "too many"}, "Poisson": {"none": "too many"}}
    assert results.samples("Poisson: tokens/s", "none") == []
    assert sum(name == "none" for name, _, _ in asked) == 2
    assert same == {"ours": "18 of 18", "theirs": "0 of 18", "none": "not all asked"}


def test_chunkrt_answers_as_each_prompt_alone(tmp_path):
    contenders, process = peers("contenders"), peers("process")
    prompts = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14, 15]]
    contender = contenders.Contender(name="ours", kind="chunkrt", engine_folder="serving", options={"chunk_length": 8})
    with process.ContenderProcess(
        contender, python=sys.executable, model=GGUF, threads=1, context_length=16, log=tmp_path / "log"
    ) as server:
        answers = server.serve(prompts, [0.0, 0.0, 0.1], 6)
    assert all(answer["times"] == sorted(answer["times"]) for answer in answers)
    assert answers[2]["times"][0] >= 0.1
    with chunkrt.load(GGUF, chunk_length=8, context_length=16) as engine:
        for prompt, answer in zip(prompts, answers, strict=True):
            session = engine.session()
            tokens, expected = prompt, []
            for _ in range(6):
                tokens = [int(np.argmax(session.prefill(tokens).logits))]
                expected += tokens
            assert answer["tokens"] == expected


def test_an_answer_that_is_short_is_an_error():
    runner = SimpleNamespace(serve=lambda *request: [SimpleNamespace(tokens=[1, 2], times=[0.1, 0.2])])
    with pytest.raises(RuntimeError, match="2 tokens were generated, expected 3"):
        peers("worker").serve(runner, "serve", [[1]], [0.0], 3)


class FakeLlama:
    """llama.cpp's functions, for a model whose next token is the sum of all before modulo 50; checks its arguments."""

    def __init__(self):
        self.seen = {}
        self.steps = []

    def llama_get_memory(self, context):
        return "memory"

    def llama_memory_clear(self, memory, data):
        assert (memory, data) == ("memory", True)
        self.seen.clear()

    def llama_decode(self, context, batch):
        self.rows = []
        for i in range(batch.n_tokens):
            assert batch.n_seq_id[i] == 1
            tokens = self.seen.setdefault(batch.seq_id[i][0], [])
            assert batch.pos[i] == len(tokens)
            tokens.append(batch.token[i])
            self.rows.append(np.eye(50, dtype=np.float32)[sum(tokens) % 50] if batch.logits[i] else None)
        self.steps.append(batch.n_tokens)
        return 0

    def llama_get_logits_ith(self, context, row):
        return np.ctypeslib.as_ctypes(self.rows[row])


@pytest.mark.parametrize(("most", "steps"), [(2048, [15, 3, 3, 3]), (8, [8, 8, 3, 3, 2])])
def test_the_steps_of_llama_cpp(monkeypatch, most, steps):
    module = peers("engines.serving.llama_cpp")
    monkeypatch.setattr(module, "BATCH", most)
    runner = object.__new__(module.Runner)
    runner.api, runner.context, runner.vocabulary_size = FakeLlama(), "context", 50
    rows = [[0] * 2048 for _ in range(4)]
    names = ("token", "pos", "logits", "n_seq_id")
    runner.batch = SimpleNamespace(**dict(zip(names, rows, strict=True)), seq_id=[[0] for _ in range(2048)])
    prompts = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14, 15]]
    for _ in range(2):
        runner.api.steps.clear()
        answers = runner.serve(prompts, [0.0, 0.0, 0.0], 4)
        for prompt, answer in zip(prompts, answers, strict=True):
            tokens = list(prompt)
            for _ in range(4):
                tokens.append(sum(tokens) % 50)
            assert answer.tokens == tokens[5:]
            assert answer.times == sorted(answer.times)
        assert runner.api.steps == steps
    late = runner.serve(prompts, [0.0, 0.0, 0.05], 4)
    assert [answer.tokens for answer in late] == [answer.tokens for answer in answers]
    assert late[2].times[0] >= 0.05


def test_a_gguf_file_is_requantised(tmp_path):
    gguf = pytest.importorskip("gguf", reason="the gguf package requantises")
    peers("engines.gguf").convert(GGUF, tmp_path / "q8.gguf", {"type": "Q8_0"})
    before, after = gguf.GGUFReader(GGUF), gguf.GGUFReader(tmp_path / "q8.gguf")
    counted = {"GGUF.kv_count", "GGUF.tensor_count", "general.file_type"}
    keys = [{n: f.contents() for n, f in reader.fields.items() if n not in counted} for reader in (before, after)]
    assert keys[0] == keys[1]
    assert [tensor.name for tensor in before.tensors] == [tensor.name for tensor in after.tensors]
    for old, new in zip(before.tensors, after.tensors, strict=True):
        values, found = (gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in (old, new))
        assert values.shape == found.shape
        assert new.tensor_type.name == ("F32" if values.ndim == 1 else "Q8_0")
        np.testing.assert_allclose(values, found, atol=np.abs(values).max() / 127)


def test_servers_are_consistent_data():
    contenders = peers("contenders")
    engines = Path(BENCH) / "peers" / "engines"
    for contender in contenders.SERVERS:
        assert contender.engine_folder == "serving"
        assert (engines / f"{contender.engine.replace('.', '/')}.py").exists()
        assert contender.form == "checkpoint" or contender.form in contenders.FORMS
    requirements = (Path(BENCH) / "peers" / "requirements.txt").read_text("utf-8").split()
    assert set(peers("serving").PACKAGES) <= {requirement.partition("==")[0] for requirement in requirements}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--peers", "torch"), "unknown runtime 'torch'; available: llama.cpp, openvino-genai, ctranslate2"),
        (("--rate", "0"), "Invalid value for '--rate'"),
        (("--sessions", "0"), "Invalid value for '--sessions'"),
        (("-n", "1"), "Invalid value for '-n'"),
    ],
)
def test_serving_refuses_wrong_values_before_measuring(arguments, message):
    finished = CliRunner().invoke(peers("serving").serving, ["no-such-model", *arguments])
    assert finished.exit_code == 2
    assert message in finished.output.splitlines()[-1]
