"""Tests of `chunkrt run` and `chunkrt chat`: the answer goes to stdout, everything else to stderr."""

import json
import os
import subprocess
import sys

import pytest
from chat_model import write_chat_model
from fixture_checkpoints import checkpoint
from one_line import expect_one_line

import chunkrt

GGUF = checkpoint("llama_biased_gguf")


def answer(prompt, count):
    """Return the answer of the Python interface."""
    with chunkrt.load(GGUF) as engine:
        session = engine.session()
        session.prefill(prompt)
        return "".join(piece.text for piece in session.generate(max_new_tokens=count))


@pytest.fixture
def chat_model(tmp_path):
    """Write an engine directory whose chat template marks each role with one letter."""
    return write_chat_model(tmp_path / "engine")


def test_run_prints_answer_to_stdout_and_figures_to_stderr(command):
    finished = command("run", GGUF, "-p", "hello", "-n", 12)
    assert finished.status == 0
    assert finished.out == answer("hello", 12) + "\n"
    (figures,) = finished.err.splitlines()
    assert figures.startswith("[load ")
    assert "prompt 7 tokens" in figures
    assert figures.endswith("(length)]")


def test_run_json_is_one_object(command):
    finished = command("run", GGUF, "-p", "hello", "-n", 12, "--json")
    assert (finished.status, finished.err) == (0, "")
    result = json.loads(finished.out)
    assert len(finished.out.splitlines()) == 1
    assert result["text"] == answer("hello", 12)
    assert result["model"] == str(GGUF)
    assert (result["prompt_tokens"], result["new_tokens"], result["finish_reason"]) == (7, 12, "length")
    assert result["prefill_tokens_per_second"] > 0
    assert result["decode_tokens_per_second"] > 0
    assert result["time_to_first_token_s"] > 0
    assert result["load_s"] > 0


def test_ignore_eos_and_min_new_tokens_delay_the_end(command):
    """At this temperature all tokens are equally likely, so some seed draws an end token early."""
    with chunkrt.load(GGUF) as engine:
        for seed in range(100):
            sampling = chunkrt.SamplingOptions(temperature=1e6, seed=seed)
            number = sum(1 for _ in engine.stream(["hello"], max_new_tokens=40, sampling=sampling))
            if 1 < number < 20:
                break
    drawn = ("run", GGUF, "-p", "hello", "-n", 40, "--temp", 1e6, "--seed", seed, "--json")

    def ended(*options):
        result = json.loads(command(*drawn, *options).out)
        return result["finish_reason"], result["new_tokens"]

    assert ended() == ("stop", number)
    assert ended("--ignore-eos") == ("length", 40)
    assert ended("--min-new-tokens", number - 1) == ("stop", number)
    assert ended("--min-new-tokens", number)[1] > number
    expect_one_line(command(*drawn, "--min-new-tokens", 41), "--min-new-tokens is 41, more than --max-new-tokens")


def test_one_new_token_has_no_decode_rate(command):
    finished = command("run", GGUF, "-p", "hello", "-n", 1, "--json")
    assert json.loads(finished.out)["decode_tokens_per_second"] is None


@pytest.mark.parametrize("how", ["file", "stdin"])
def test_run_reads_a_prompt_from_a_file(command, tmp_path, how):
    path = tmp_path / "prompt.txt"
    path.write_text("hello")
    file = path if how == "file" else "-"
    assert command("run", GGUF, "-f", file, "-n", 12, stdin="hello").out == answer("hello", 12) + "\n"


def test_stop_string_ends_the_answer(command):
    text = answer("hello", 12)
    finished = command("run", GGUF, "-p", "hello", "-n", 12, "--stop", text[4:6])
    assert finished.out == text[: text.index(text[4:6])] + "\n"
    assert finished.err.endswith("(stop)]\n")


def test_seed_fixes_the_answer(command):
    options = ("--temperature", "1.2", "--top-k", "50", "--top-p", "0.95", "--min-p", "0.01", "-n", 12)
    texts = [command("run", GGUF, "-p", "hello", *options, "--seed", seed).out for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    "options",
    [
        ("--npu", "off"),
        ("--npu", "native", "--chunk", 1),
        ("--policy", "sequential", "--threads", 1),
        ("--chunk", 64, "--context", 100, "--threads", 4),
        ("--scheme", "w8a8-dynamic"),
    ],
)
def test_execution_options_do_not_change_the_answer(command, options):
    assert command("run", GGUF, "-p", "hello", "-n", 12, *options).out == answer("hello", 12) + "\n"


@pytest.mark.parametrize("npu", ["reference", "onnxrt"])
def test_run_with_scheme_float(command, npu):
    finished = command("run", GGUF, "-p", "hello", "-n", 3, "--npu", npu, "--scheme", "float", "--json")
    assert json.loads(finished.out)["new_tokens"] == 3


def test_run_applies_the_chat_template(command, chat_model):
    finished = command("run", chat_model, "-p", "hi", "-n", 4, "--system", "Be brief.", "--json")
    prompt = "s:Be brief.;u:hi;a:"
    with chunkrt.load(chat_model) as engine:
        tokens = engine.tokenizer.encode(prompt, add_special=False, parse_special=True)
        session = engine.session()
        session.prefill(tokens)
        text = "".join(piece.text for piece in session.generate(max_new_tokens=4))
    assert json.loads(finished.out)["text"] == text
    assert json.loads(finished.out)["prompt_tokens"] == len(tokens)


def test_verbose_logs_go_to_stderr(tmp_path):
    run = [sys.executable, "-P", "-m", "chunkrt", "run", str(GGUF), "-p", "hello", "-n", "4", "-v"]
    environment = os.environ | {"CHUNKRT_HOME": str(tmp_path)}
    finished = subprocess.run(run, capture_output=True, text=True, env=environment, cwd=tmp_path, check=True)
    assert finished.stdout == answer("hello", 4) + "\n"
    assert "chunkrt.compile.compiler: compiled" in finished.stderr


def test_chat_keeps_earlier_messages(command, chat_model):
    finished = command("chat", chat_model, "-n", 4, stdin="hi\n\nmore\n")
    assert finished.status == 0
    with chunkrt.load(chat_model) as engine:
        transcript, answers = "", []
        for line in ("hi", "more"):
            transcript += f"u:{line};"
            session = engine.session()
            session.prefill(engine.tokenizer.encode(transcript + "a:", add_special=False, parse_special=True))
            answers.append("".join(piece.text for piece in session.generate(max_new_tokens=4)))
            transcript += f"a:{answers[-1]};"
    assert finished.out == "".join(f"{answer}\n" for answer in answers)
    assert finished.err.count("[prompt ") == 2


def test_turn_beyond_the_context_is_discarded(command, chat_model):
    once = command("chat", chat_model, "-n", 4, stdin="hi\n").out
    finished = command("chat", chat_model, "-n", 4, stdin=f"{'long ' * 60}\nhi\n")
    assert finished.status == 0
    assert finished.out == once
    assert "has room for 128" in finished.err
    assert "/reset clears the conversation" in finished.err


def test_chat_with_context_shift_outgrows_the_context(command, chat_model):
    arguments = ("chat", chat_model, "--npu", "reference", "--context", 96, "--chunk", 8, "-n", 8)
    turns = "tell me more of it\n" * 8
    refused, shifted = command(*arguments, stdin=turns), command(*arguments, "--context-shift", stdin=turns)
    assert refused.status == shifted.status == 0
    assert "/reset clears the conversation" in refused.err
    assert "/reset clears the conversation" not in shifted.err
    assert shifted.err.count("decode 8 tokens") == 8
    prompts = [int(line.split()[1]) for line in shifted.err.splitlines() if line.startswith("[prompt ")]
    assert sum(prompts) > 2 * 96
    assert max(prompts) < 96  # dropped tokens are not prefilled again


def test_only_new_tokens_of_a_conversation_are_prefilled(command, chat_model):
    """The second turn prefills its own text, and tokens that the first answer did not run."""
    finished = command("chat", chat_model, "-n", 4, stdin="hi\nmore\n")
    first, second = (line for line in finished.err.splitlines() if line.startswith("[prompt "))
    count = [int(line.split()[1]) for line in (first, second)]
    with chunkrt.load(chat_model) as engine:
        new = engine.tokenizer.encode(";u:more;a:", add_special=False, parse_special=True)
    assert count[1] <= len(new) + 4


def test_chat_refuses_a_model_without_a_template(command):
    expect_one_line(command("chat", GGUF, stdin=""), "no chat template; use `chunkrt run`")


def test_the_end_of_the_input_ends_the_chat(command, chat_model):
    finished = command("chat", chat_model, stdin="")
    assert (finished.status, finished.out) == (0, "")
