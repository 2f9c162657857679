"""Tests of `chunkrt chat` through a pipe and in a pseudo-terminal."""

import io
import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from chat_model import TEMPLATE, write_chat_model
from random_folders import write_folder
from rich.console import Console

from chunkrt.cli.terminal import Shown, block_end

SECONDS = 60


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """Write an engine directory whose chat template marks each role with one letter."""
    return write_chat_model(tmp_path_factory.mktemp("chat") / "engine")


def talk(command, chat_model, *lines):
    return command("chat", chat_model, "-n", 4, stdin="".join(f"{line}\n" for line in lines))


def test_save_quotes_a_name_with_spaces_in_the_command_that_continues(command, chat_model, tmp_path):
    path = tmp_path / "a chat.json"
    saved = talk(command, chat_model, "hi", f"/save {path}")
    assert f'wrote {path}; continue with /load {path}, or with chunkrt run --messages "{path}"' in saved.err


def test_byte_order_mark_of_piped_input_is_no_part_of_the_turn(command, chat_model):
    """Windows PowerShell writes it."""
    marked, plain = (talk(command, chat_model, turn) for turn in ("\ufeffhi", "hi"))
    assert marked.out == plain.out
    (tokens,) = re.findall(r"prompt \d+ tokens", plain.err)
    assert tokens in marked.err


def test_piped_input_that_is_not_utf_8_prints_one_line(chat_model):
    command = [sys.executable, "-P", "-m", "chunkrt", "chat", chat_model]
    finished = subprocess.run(command, input=b"caf\xe9\n", capture_output=True, timeout=SECONDS)
    assert finished.returncode == 1
    assert finished.stderr.splitlines()[-1].startswith(b"chunkrt: standard input is not UTF-8 text: 'utf-8' codec")


def test_saved_conversation_continues_in_another_chat(command, chat_model, tmp_path):
    path = tmp_path / "chat.json"
    whole = talk(command, chat_model, "/system S", "hi", "more")
    first = talk(command, chat_model, "/system S", "hi", f"/save {path}")
    messages = json.loads(path.read_text())["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert first.out == f"{messages[2]['content']}\n"
    second = talk(command, chat_model, "other", f"/load {path}", "more")
    assert second.out.splitlines()[-1] == whole.out.splitlines()[-1]
    ran = command("run", chat_model, "--messages", path, "-p", "more", "-n", 4)
    assert ran.out.splitlines() == whole.out.splitlines()[-1:]


def test_undo_retry_and_reset(command, chat_model):
    once, twice = (talk(command, chat_model, *lines).out.splitlines() for lines in (["hi"], ["hi", "more"]))
    assert talk(command, chat_model, "hi", "wrong", "/undo", "more").out.splitlines()[2:] == twice[1:]
    assert talk(command, chat_model, "hi", "/retry").out.splitlines() == once * 2
    assert talk(command, chat_model, "hi", "/retry", "more").out.splitlines() == [*once, *twice]
    assert talk(command, chat_model, "wrong", "/reset", "hi").out.splitlines()[1:] == once
    assert talk(command, chat_model, "/undo", "hi", "/quit", "more").out.splitlines() == once
    assert talk(command, chat_model, "hi", "/exit", "more").out.splitlines() == once


def test_set_changes_sampling_of_later_answers(command, chat_model):
    finished = talk(
        command, chat_model, "hi", "/set n 2", "/reset", "hi", "/set temperature 0.5", "/set seed none", "/status"
    )
    assert finished.err.count("decode 4 tokens") == 1
    assert finished.err.count("decode 2 tokens") == 2  # one line after the answer, one for /status
    assert "max_new_tokens 2, temperature 0.5, top_k None" in finished.err
    assert "1 turns" in finished.err


@pytest.fixture(scope="module")
def advised_model(tmp_path_factory):
    """Write the same engine directory with recommended sampling options."""
    advised = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.5}
    return write_chat_model(tmp_path_factory.mktemp("advised") / "engine", sampling=advised)


@pytest.mark.parametrize(
    ("options", "told", "given"),
    [
        (("--seed", 1), "temperature 0.7, top_p 0.9, repetition_penalty 1.5", ("--temp", 0.7, "--top-p", 0.9)),
        (("--seed", 1, "--top-k", 5), "temperature 0.7", ("--temp", 0.7, "--top-p", 0.9, "--top-k", 5)),
        (("--seed", 1, "--top-p", 1), "temperature 0.7, repetition_penalty 1.5", ("--temp", 0.7)),
        (("--temp", 0), "repetition_penalty 1.5", ()),
        (("--temp", 0.2, "--seed", 1), "top_p 0.9, repetition_penalty 1.5", ("--temp", 0.2, "--top-p", 0.9)),
        (("--temp", 0, "--repetition-penalty", 1.5), "", ()),
    ],
)
def test_chat_uses_recommended_sampling_for_options_not_given(command, chat_model, advised_model, options, told, given):
    found = command("chat", advised_model, "-n", 8, *options, stdin="hi\n")
    assert found.err.count("sampling as the model recommends") == bool(told)
    assert f"sampling as the model recommends: {told}" in found.err or not told
    seed = ("--seed", 1) if "--seed" in options else ()
    given = (*given, *seed, "--repetition-penalty", 1.5)
    assert found.out == command("chat", chat_model, "-n", 8, *given, stdin="hi\n").out


def test_chat_reports_recommended_sampling_that_is_invalid(command, chat_model, tmp_path):
    model = write_chat_model(tmp_path / "engine", sampling={"temperature": -1.0})
    found = command("chat", model, "-n", 4, stdin="hi\n")
    assert "the model's recommended sampling options are ignored: temperature: found -1.0" in found.err
    assert found.out == command("chat", chat_model, "-n", 4, stdin="hi\n").out


def test_chat_refuses_an_option_without_effect(command, chat_model):
    found = command("chat", chat_model, "--top-k", 5, stdin="hi\n")
    assert found.status == 1
    assert "--top-k has no effect without --temperature above 0" in found.err


def test_wrong_commands_print_one_line_and_keep_the_chat(command, chat_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nowhere").write_text("")
    messages = {
        "/set heat 1": "unknown setting 'heat'; ",
        "/set temperature hot": "temperature is 'hot', expected a number, e.g. /set temperature 1",
        "/set temperature -1": "temperature: found -1.0",
        "/set n 0": "max_new_tokens is 0, expected at least 1",
        "/save": "name a file, e.g. /save chat.json",
        "/save nowhere/chat.json": "cannot write",
        "/load nowhere.json": "cannot read the prompt from nowhere.json",
        "/retry": "there is no turn to answer again",
        "/helpme": "unknown command /helpme; /help lists them",
    }
    finished = talk(command, chat_model, *messages, "hi")
    assert finished.status == 0
    for message in messages.values():
        assert sum(message in shown for shown in finished.err.splitlines()) == 1
    assert finished.out == talk(command, chat_model, "hi").out


def test_markdown_blocks_end_outside_of_code():
    assert block_end("one\ntwo") is None
    assert block_end("one\n\ntwo") == 4
    assert block_end("```\none\n\ntwo") is None
    code = "```\none\n\ntwo\n```\n\nthree"
    assert code[: block_end(code)] == "```\none\n\ntwo\n```\n"


TAKE_TERMINAL = "import fcntl, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
"""The new process takes the terminal itself. A `preexec_fn` would run Python in a fork of this process, where it may
wait forever for a lock that another thread held.
"""


class Terminal:
    """`chunkrt chat` in a pseudo-terminal, with its input and its screen."""

    def __init__(self, *arguments, home, before):
        self.shown = ""
        self.master, slave = os.openpty()
        environment = os.environ | {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", "CHUNKRT_HOME": str(home)}
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-c",
                f"{TAKE_TERMINAL}{before}\nfrom chunkrt.cli import main\nmain()",
                "chat",
                *map(str, arguments),
            ],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)
        os.set_blocking(self.master, False)

    def type(self, text):
        """Type text, and read the output meanwhile, so that no buffer is full."""
        keys, deadline = text.encode(), time.monotonic() + SECONDS
        while keys:
            assert time.monotonic() < deadline, self.shown
            _, writable, _ = select.select([], [self.master], [], 0.1)
            if writable:
                keys = keys[os.write(self.master, keys[:512]) :]
            self._read(0)

    def _read(self, seconds):
        """Read output within a time limit; return False at the end of the output."""
        if select.select([self.master], [], [], seconds)[0]:
            try:
                self.shown += os.read(self.master, 65536).decode(errors="replace")
            except OSError:
                return False
        return True

    def wait_for(self, pattern, count=1):
        """Wait until a pattern was shown `count` times; escape sequences are ignored."""
        deadline = time.monotonic() + SECONDS
        while len(re.findall(pattern, re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.shown))) < count:
            assert time.monotonic() < deadline, self.shown
            if not self._read(1):
                break

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal(chat_model, tmp_path):
    if sys.platform == "win32":
        pytest.skip("there are no pseudo-terminals")
    opened = []

    def open_terminal(*arguments, model=chat_model, before=""):
        opened.append(Terminal(model, *arguments, home=tmp_path, before=before))
        opened[-1].wait_for(">")
        return opened[-1]

    yield open_terminal
    for each in opened:
        each.close()


def test_pasted_lines_are_one_turn(terminal, command, chat_model, tmp_path):
    screen, saved = terminal("-n", 4), tmp_path / "chat.json"
    screen.type("\x1b[200~one\ntwo\nthree\x1b[201~")
    screen.wait_for("three")
    screen.type("\r")
    screen.wait_for(r"\[prompt [^\n]*\n[\s\S]*>")  # before this, the terminal would interpret the keys
    screen.type("more\x1b\rlines\r")  # Alt-Enter
    screen.wait_for(r"\[prompt ", 2)
    screen.type(f"/save {saved}\r")
    screen.wait_for(r"continue with[\s\S]*>")
    screen.type("\x04")
    screen.process.wait(SECONDS)
    said = [m["content"] for m in json.loads(saved.read_text())["messages"] if m["role"] == "user"]
    assert said == ["one\ntwo\nthree", "more\nlines"]
    history = (tmp_path / "chat_history").read_text()
    assert "+one\n+two\n+three\n" in history


def test_tab_completes_commands_and_ctrl_c_discards_a_line(terminal):
    screen = terminal("-n", 4)
    screen.type("/sta\t")
    screen.wait_for("/status")
    screen.type("\r")
    screen.wait_for("0 turns")
    screen.type("wrong\x03")
    screen.type("/status\r")
    screen.wait_for("0 turns", 2)
    assert "[prompt" not in screen.shown


SLOW = """
import time
from chunkrt.runtime.executor import Executor
run_task = Executor.run_task
def slowly(self, index, chunk, slot):
    time.sleep(0.05 if chunk.num_tokens > 1 else 0)
    return run_task(self, index, chunk, slot)
Executor.run_task = slowly
"""


@pytest.mark.slow
def test_ctrl_c_in_a_prefill_discards_the_turn(terminal, tmp_path):
    saved = tmp_path / "chat.json"
    screen = terminal("-n", 4, "--chunk", 2, before=SLOW)  # the first turn takes about 15 seconds
    screen.type("long " * 15 + "\r")
    screen.wait_for("prefill")
    screen.type("\x03")
    screen.wait_for(r"\[stopped; the turn is discarded\]")
    screen.type("hi\r")
    screen.wait_for(r"\[prompt ")
    screen.type(f"/save {saved}\r")
    screen.wait_for("continue with")
    messages = json.loads(saved.read_text())["messages"]
    assert [m["content"] for m in messages if m["role"] == "user"] == ["hi"]


def test_long_paste_shows_progress_and_can_be_stopped(terminal, chat_model, tmp_path):
    """25 kB of lines are one turn; the next turn does not contain them."""
    saved, model = (
        tmp_path / "chat.json",
        write_folder(tmp_path / "long", vocab_size=128, max_position_embeddings=65536),
    )
    shutil.copy(chat_model / "tokenizer.json", model)
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    screen = terminal("-n", 4, model=model, before=SLOW)
    lines = "\n".join(f"line {number:05}" for number in range(25_000 // 11))
    screen.type(f"\x1b[200~{lines}\x1b[201~")
    screen.wait_for(lines[-5:])
    screen.type("\r")
    screen.wait_for(r"prefill\D*\d+")
    screen.type("\x03")
    screen.wait_for(r"\[stopped; the turn is discarded\]")
    screen.type("hi\r")
    screen.wait_for(r"\[prompt (\d|1\d) tokens")
    screen.type(f"/save {saved}\r")
    screen.wait_for("continue with")
    messages = json.loads(saved.read_text())["messages"]
    assert [m["content"] for m in messages if m["role"] == "user"] == ["hi"]


def test_markdown_is_rendered_in_a_terminal(monkeypatch):
    """Each complete block is rendered; code is unchanged."""
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True, write=screen.write, flush=lambda: None))
    real = Console
    monkeypatch.setattr("rich.console.Console", lambda: real(file=screen, force_terminal=True, width=60))
    monkeypatch.setenv("TERM", "xterm")
    shown = Shown(renders=True)
    for piece in ("# Ti", "tle\n\nA **bo", "ld** word\n\n```\n**x", "**\n\ny\n```"):
        shown(piece)
    assert "\x1b[1mbold\x1b[0m" in screen.getvalue()
    shown.end()
    after = screen.getvalue().rpartition("\x1b[2K")[2]
    assert "**x**" in after
    assert "**bold**" not in after
