"""Tests that errors are one line on stderr and an exit status, with no output, and a traceback only with -v."""

import errno
import json
import os
import shlex
import shutil
import struct
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy
from fixture_checkpoints import checkpoint
from one_line import expect_one_line

from chunkrt.backends.qnn import SOCS
from chunkrt.checkpoints import catalogue
from chunkrt.engine.session import Session
from chunkrt.files import written_aside

GGUF = checkpoint("llama_biased_gguf")
FOLDER = checkpoint("llama_mha")
RUN = ("run", GGUF, "-p", "hello", "-n", 2)


def truncated_gguf(folder):
    path = folder / "model.gguf"
    path.write_bytes(GGUF.read_bytes()[:-1000])
    return path


def truncated_header(folder):
    path = folder / "model.gguf"
    path.write_bytes(GGUF.read_bytes()[:300])
    return path


def gguf_that_claims_too_much(folder):
    path = folder / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 10**18, 0) + bytes(64))
    return path


def other_folder(folder, change_config=lambda config: None, change_tensors=lambda tensors: None):
    """Copy a Hugging Face folder, with changes."""
    copy = shutil.copytree(FOLDER, folder / "checkpoint")
    config = json.loads((copy / "config.json").read_text())
    change_config(config)
    (copy / "config.json").write_text(json.dumps(config))
    tensors = safetensors.numpy.load_file(copy / "model.safetensors")
    change_tensors(tensors)
    safetensors.numpy.save_file(tensors, copy / "model.safetensors")
    return copy


def overlapping_tensors(folder):
    copy = other_folder(folder)
    path = copy / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    first, second = sorted((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"])[:2]
    begin, end = header[second]["data_offsets"]
    assert header[first]["data_offsets"][1] == begin
    header[second]["data_offsets"] = [begin - 4, end - 4]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return copy


def unsupported_architecture(folder):
    return other_folder(folder, lambda config: config.update(model_type="rwkv", architectures=["RwkvForCausalLM"]))


def missing_tensor(folder):
    return other_folder(folder, change_tensors=lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))


def weight_that_is_not_finite(folder):
    return other_folder(folder, change_tensors=lambda tensors: tensors["lm_head.weight"].fill(np.inf))


def empty_folder(folder):
    return folder


def empty_file(folder):
    path = folder / "model.gguf"
    path.touch()
    return path


def text_file(folder):
    path = folder / "model.gguf"
    path.write_text("not a model at all")
    return path


MODELS = {
    truncated_gguf: "model.gguf",
    truncated_header: "model.gguf",
    gguf_that_claims_too_much: "1000000000000000000",
    overlapping_tensors: "overlap",
    unsupported_architecture: "architecture 'rwkv' is not supported; supported: apertus, bamba, deepseek_v2, ",
    missing_tensor: "tensor model.layers.1.mlp.up_proj.weight is missing",
    weight_that_is_not_finite: "lm_head.weight holds values that are not finite",
    empty_folder: "has no config.json",
    empty_file: "model.gguf is empty; fetch it again",
    text_file: "is not a GGUF file",
}

LINES = [
    (("run", "smollm2", "-p", "x"), "no model is called 'smollm2'; did you mean smollm2-135m-instruct?"),
    (("run", "nowhere/model.gguf", "-p", "x"), "there is no file or folder nowhere/model.gguf"),
    (("run", GGUF, "-p", "a b " * 100), "but the context of 128 has room for 128"),
    (("run", GGUF, "-p", ""), "the prompt is empty"),
    (("run", GGUF, "-p", " \n"), "the prompt is empty"),
    (("run", GGUF), "give a prompt with -p TEXT or -f FILE"),
    (("run", GGUF, "-f", "-"), "the prompt is empty"),
    (("run", GGUF, "-p", "-", "-f", "-"), "standard input can be read only once"),
    (("run", GGUF, "-p", "@nowhere.txt"), "cannot read the prompt from nowhere.txt: No such file"),
    (("run", GGUF, "-p", "x", "-m", GGUF), "give one of them"),
    (("run", GGUF, "-p", "x", "--revision", "main"), "is no hub id (org/name)"),
    ((*RUN, "--prefill-answer", "Sure"), "an answer's beginning needs the model's chat template"),
    ((*RUN, "--prompts", "p.jsonl"), "--prompts excludes -p, -f, --messages"),
    ((*RUN, "--batcher", "sequential"), "--batcher has no effect without --prompts"),
    ((*RUN, "--keep", 8), "--keep has no effect without --context-shift"),
    ((*RUN, "--npu", "native", "--soc", "8gen3"), "--soc has no effect without an NPU (--npu is native)"),
    ((*RUN, "--top-p", "0.9"), "--top-p has no effect without --temperature above 0"),
    ((*RUN, "--prefix-cache", "off", "--prefix-cache-memory", "1GB"), "has no effect without a prefix cache"),
    (
        (*RUN, "--prefix-cache-disk", "1GB"),
        "--prefix-cache-disk has no effect without --prefix-cache disk, or a folder",
    ),
    ((*RUN, "--prefix-cache", GGUF / "cache"), "which is not a folder; choose memory, disk, off or a folder"),
    (("bench", GGUF, "--prefix-cache-memory", "1GB"), "--prefix-cache-memory has no effect without --prefix-cache"),
    (("bench", GGUF, "--parallel", 10**20), "--parallel is '100000000000000000000', expected at most 4096"),
    (("cache", "show", "--folder", "nowhere"), "Directory 'nowhere' does not exist"),
    (("cache", "clear", "--folder", GGUF), "is a file"),
    (("run", GGUF, "--messages", "nowhere.json"), "chunkrt: cannot read the prompt from nowhere.json: No such file"),
    ((*RUN, "-ctk", "q4_0"), "unknown type of the cache 'q4_0'"),
    (("plan", GGUF, "--threads", 2), "No such option '--threads'"),
    (("run", GGUF, "-f", "nowhere.txt"), "cannot read the prompt from nowhere.txt: No such file"),
    (("run", GGUF, "-f", "."), "cannot read the prompt from .: Is a directory"),
    (("run", GGUF, "-f", GGUF), "is not UTF-8 text"),
    ((*RUN, "--chunk", 0), "--chunk is '0', expected numbers of tokens, at least 1, with commas between"),
    ((*RUN, "--chunk", -3), "--chunk is '-3', expected numbers of tokens"),
    ((*RUN, "--chunk", 129), "--chunk is 129, longer than the context of 128"),
    ((*RUN, "--chunk", "1,many"), "--chunk is '1,many', expected numbers of tokens"),
    ((*RUN, "--context", 129), "the model takes at most 128"),
    ((*RUN, "--threads", 0), "threads is 0"),
    (("cache", "clear", "contexts", "--unused-days", "nan"), "nan is not a finite number"),
    (("device-test", "x", "-o", "r", "--minutes", "nan"), "nan is not a finite number"),
    (("serve", "x", "--grace", "inf"), "inf is not a finite number"),
    ((*RUN, "--temperature", "nan"), "--temperature: found nan, expected a finite number"),
    ((*RUN, "--temperature", "-1"), "--temperature: found -1.0"),
    ((*RUN, "--temperature", "inf"), "--temperature: found inf"),
    ((*RUN, "--top-p", "-0.1"), "--top-p: found -0.1"),
    ((*RUN, "--top-k", "-1"), "--top-k: found -1"),
    ((*RUN, "-n", "0"), "--max-new-tokens is 0, expected at least 1"),
    ((*RUN, "--stop", ""), "stop strings"),
    ((*RUN, "--system", "Be brief."), "needs the model's chat template"),
    ((*RUN, "--scheme", "float"), "under the scheme 'float' this linear is not int8 by int8"),
    ((*RUN, "--scheme", "int4"), "'int4' is not one of"),
    ((*RUN, "--soc", "SM8651"), "unknown SoC 'SM8651'; did you mean 'SM8650'?"),
    ((*RUN, "--htp", "vtcm=8"), "unknown NPU setting 'vtcm'; did you mean 'vtcm_mb'?"),
    ((*RUN, "--calibration", "nowhere.npz"), "the scheme 'w8a8-dynamic' uses no calibration"),
    ((*RUN, "--scheme", "w8a16", "--calibration", "nowhere.npz"), "cannot read the calibration nowhere.npz"),
    ((*RUN, "--scheme", "w8a16", "--calibration", GGUF), "model.gguf is not a calibration"),
    ((*RUN, "--npu", "tpu"), "'tpu' is not one of"),
    ((*RUN, "--place", "nowhere.toml"), "cannot read the placement file nowhere.toml"),
    ((*RUN, "--colour"), "No such option"),
    (("run",), "Missing argument 'MODEL'"),
    (("rnu", GGUF), "No such command 'rnu'; did you mean 'run'?"),
    (("run", FOLDER, "-p", "x"), "has no tokenizer"),
    (("chat", "smollm2"), "no model is called 'smollm2'"),
    (("bench", GGUF, "-p", "many"), "-p is 'many', expected whole numbers"),
    (("bench", GGUF, "-p", "-8"), "expected no negative number"),
    (("bench", GGUF, "-p", "0", "-n", "0"), "nothing to measure"),
    (("bench", GGUF, "-p", "129"), "129 tokens do not fit the context of 128"),
    (("bench", GGUF, "-r", "0"), "--repetitions is 0"),
    (("plan", GGUF, "--chunk", 129), "--chunk is 129, longer than the context of 128"),
    (("plan", GGUF, "--prompt-length", 0), "--prompt-length is 0"),
    (("plan", GGUF, "--prompt-length", 5000), "--prompt-length is 5000, expected 1 to 128, the context"),
    (("plan", GGUF, "--context", 64, "--prompt-length", 65), "--prompt-length is 65, expected 1 to 64"),
    (("plan", GGUF, "--scheme", "float"), "under the scheme 'float' this linear is not int8 by int8"),
    (
        ("plan", GGUF, "--npu", "qnn", "--scheme", "float"),
        "qnn does not support linear layers under the scheme 'float'",
    ),
    (("plan", GGUF, "--calibration", "x.npz"), "uses no calibration"),
    (("plan", "smollm2"), "no model is called 'smollm2'"),
    (("plan", GGUF, "--save-onnx", GGUF / "parts"), "cannot write ONNX files to "),
    (("compile", GGUF), "Missing option '-o'"),
    (("compile", GGUF, "-o", "out", "--soc", "SM8650,SM8999"), "unknown SoC 'SM8999'; did you mean"),
    (("compile", GGUF, "-o", "out", "--soc", "snapdragon"), f"there are: {', '.join(SOCS)}"),
    (("compile", GGUF, "-o", "out", "--soc", ""), "unknown SoC ''"),
    (("compile", GGUF, "-o", "out", "--soc", "SM8650", "--chunk", "1,many"), "--chunk is '1,many', expected whole"),
    (("compile", GGUF, "-o", "out", "--soc", "SM8650", "--chunk", "0"), "--chunk is '0', expected numbers of at least"),
    (("compile", GGUF, "-o", "out", "--chunk", "8"), "name its SoC with --soc"),
    (("compile", GGUF, "-o", GGUF.parent), "exists already; choose another folder, or delete it"),
    (("compile", FOLDER, "-o", "out", "--scheme", "w8a16"), "--ids FILE -o ranges.npz` and set --calibration to"),
    (("compile", "smollm2", "-o", "out"), "no model is called 'smollm2'"),
    (("pull", "smollm"), "no model is called 'smollm'; did you mean smollm2-135m-instruct?"),
]


@pytest.mark.parametrize("damage", MODELS, ids=lambda damage: damage.__name__)
def test_wrong_model_prints_one_line(command, tmp_path, damage):
    model = damage(tmp_path)
    expect_one_line(command("run", model, "-p", "hello"), MODELS[damage])
    if damage is not weight_that_is_not_finite:  # a plan reads no weights
        expect_one_line(command("plan", model), MODELS[damage])


@pytest.mark.parametrize(("arguments", "message"), LINES, ids=[f"{i}-{m[:24]}" for i, (_, m) in enumerate(LINES)])
def test_wrong_command_line_prints_one_line(command, arguments, message):
    expect_one_line(command(*arguments), message)


def test_error_of_a_settings_file_names_its_key(command, tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text('chunk_length = "x"\n')
    expect_one_line(command(*RUN, "--settings", path), f"{path}: chunk_length is 'x', expected numbers of tokens")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"])
@pytest.mark.parametrize("scheme", ["float", "w8a8-dynamic", "w4a8-dynamic"])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_damaged_weight_is_reported_under_every_scheme(command, tmp_path, value, scheme, name):
    def damage(tensors):
        tensors[name].flat[-1] = value

    folder = other_folder(tmp_path, change_tensors=damage)
    finished = command("compile", folder, "-o", tmp_path / "out", "--scheme", scheme)
    expect_one_line(finished, f"{name} holds values that are not finite; the checkpoint is damaged")


def test_prompt_beyond_the_context_reports_the_limit(command):
    whole = command("run", GGUF, "-p", "a b " * 100)
    part = command("run", GGUF, "-p", "a b " * 100, "--context", 64)
    assert "a context of up to" not in whole.err
    assert "choose a context of up to 128 (--context)" in part.err
    assert whole.err.endswith("let the context shift (--context-shift)\n")


WRITERS = [
    ("profile", "-o", "taken/here.toml", "chunkrt.cli.profile.measure_profile"),
    ("tune", "-o", "taken/here.toml", "chunkrt.cli.tune.search"),
    ("calibrate", "-o", "taken/here.npz", "chunkrt.cli.calibrate.cached_calibration"),
    ("compile", "-o", "taken/here", "chunkrt.engine.deploy.engine_folder"),
]


@pytest.mark.parametrize(("name", "option", "output", "work"), WRITERS, ids=[name for name, *_ in WRITERS])
def test_unwritable_output_is_refused_before_any_work(command, tmp_path, monkeypatch, name, option, output, work):
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setattr(work, lambda *_, **__: pytest.fail("it was worked for"))
    device = ("--device", "sd8gen3") if name == "tune" else ()
    expect_one_line(command(name, GGUF, option, tmp_path / output, *device), f"{tmp_path / 'taken'}")


def test_unreadable_model_file_prints_one_line(command, tmp_path, monkeypatch):
    path = Path(shutil.copy(GGUF, tmp_path / "model.gguf"))
    opened = Path.open

    def refuse(self, *arguments, **options):
        if self == path:
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    expect_one_line(command("run", path, "-p", "x"), "model.gguf: Permission denied")


@pytest.mark.parametrize("flag", ["-v", "--verbose"])
def test_verbose_adds_the_traceback(command, flag):
    finished = command("run", GGUF, "-p", "", flag)
    assert finished.status == 1
    assert finished.out == ""
    assert "Traceback (most recent call last)" in finished.err
    assert finished.err.splitlines()[-1] == "chunkrt: the prompt is empty; give text with -p TEXT or -f FILE"


def test_unexpected_exception_prints_one_line(command, monkeypatch):
    def fail(self, prompt, **options):
        raise ZeroDivisionError("by\nzero")

    monkeypatch.setattr(Session, "prefill", fail)
    finished = command(*RUN)
    assert (finished.status, finished.out) == (1, "")
    assert finished.err == "chunkrt: unexpected ZeroDivisionError: by zero (run again with -v for the traceback)\n"


def test_ctrl_c_prints_interrupted_and_exits_with_130(command, monkeypatch):
    def interrupt(self, prompt, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "prefill", interrupt)
    finished = command(*RUN)
    assert (finished.status, finished.out, finished.err.strip()) == (130, "", "interrupted")


def test_closed_pipe_prints_no_traceback():
    run = [sys.executable, "-P", "-m", "chunkrt", "plan", str(GGUF), "--json"]
    process = subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=120) == 1
    assert error == b""


def test_python_m_chunkrt_is_the_command(tmp_path):
    run = [sys.executable, "-P", "-m", "chunkrt", "run", "nowhere/model.gguf", "-p", "x"]
    finished = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path)
    assert (finished.returncode, finished.stdout) == (1, "")
    assert finished.stderr == "chunkrt: there is no file or folder nowhere/model.gguf\n"


SHELL = pytest.mark.skipif(sys.platform != "linux", reason="these are a Linux shell's redirections")


def in_shell(redirections, *arguments):
    """Start the command like a shell; return exit status, stdout and stderr."""
    line = shlex.join([sys.executable, "-P", "-m", "chunkrt", *map(str, arguments)])
    finished = subprocess.run(f"{line} {redirections}", shell=True, capture_output=True, text=True)
    return finished.returncode, finished.stdout, finished.stderr


@SHELL
@pytest.mark.parametrize(
    ("redirections", "arguments", "message"),
    [
        (">&-", RUN, "standard output is closed"),
        ("> /dev/full", RUN, "cannot write to standard output: No space left on device"),
        ("> /dev/full", (*RUN, "--json"), "cannot write to standard output: No space left on device"),
        ("> /dev/full", ("models",), "cannot write to standard output: No space left on device"),
        ("<&-", ("run", GGUF, "-f", "-"), "standard input is closed"),
        ("", ("run", GGUF, "-f", "/dev/zero"), "is longer than 67108864 characters"),
    ],
)
def test_closed_and_full_streams(redirections, arguments, message):
    status, out, err = in_shell(redirections, *arguments)
    assert (status, out) == (1, "")
    (line,) = err.splitlines()
    assert line.startswith("chunkrt: ")
    assert message in line


def test_full_disk_is_reported_with_the_name_of_the_file(command, tmp_path, monkeypatch):
    @contextmanager
    def full(path):
        if path.name == "rows.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with written_aside(path) as aside:
            yield aside

    monkeypatch.setattr("chunkrt.files.written_aside", full)
    finished = command("bench", GGUF, "-p", 4, "-n", 0, "-r", 1, "-o", tmp_path / "rows.json")
    expect_one_line(finished, f"cannot write {tmp_path / 'rows.json'}: No space left on device")


def test_missing_engine_directory_is_reported_without_the_compiler():
    """A path of two parts could also be an id of the Hugging Face hub."""
    program = "import sys; sys.modules['onnx_ir'] = None; from chunkrt.__main__ import main; main()"
    command = [sys.executable, "-P", "-c", program, "run", "engines/absent", "-p", "x"]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 1
    assert finished.stderr == (
        "chunkrt: there is no file or folder engines/absent; compiling a model of the Hugging Face hub needs onnx_ir, "
        'which is not installed; run pip install "chunkrt[compile]", or give an engine directory\n'
    )


@SHELL
def test_closed_stderr_keeps_the_answer(command):
    assert in_shell("2>&-", *RUN) == (0, command(*RUN).out, "")


def test_usage_error_has_no_traceback(command):
    finished = command("run", "-v")
    assert finished.status == 2
    assert "Traceback" not in finished.err


def test_out_of_memory_prints_one_line(command, monkeypatch):
    monkeypatch.setattr(Session, "prefill", lambda *_, **__: [0] * 10**18)
    expect_one_line(command(*RUN), "out of memory")


def test_broken_catalogue_entry_keeps_the_others(command, monkeypatch, tmp_path, caplog):
    (tmp_path / "broken.toml").write_text("x = [")
    monkeypatch.setenv("CHUNKRT_MODELS", str(tmp_path))
    finished = command("models")
    assert finished.status == 0
    assert "smollm2-135m-instruct" in finished.out
    assert "broken.toml" in caplog.text
    assert command("run", GGUF, "-p", "hello", "-n", 1).status == 0
    expect_one_line(command("run", "broken", "-p", "hello"), "broken.toml")


def test_pickled_checkpoint_is_refused_by_name(command, tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    expect_one_line(command("run", tmp_path / "pytorch_model.bin", "-p", "x"), "pickled files are not supported")


def test_chunkrt_home_expands_a_tilde(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("CHUNKRT_HOME", "~/kept")
    assert catalogue.home() == tmp_path / "kept"


def test_turn_stopped_before_its_answer_is_discarded(command, monkeypatch, tmp_path):
    asked = []

    def stream_answer(session, tokens, **_):
        asked.append([*session.history, *tokens])
        if len(asked) in (1, 3):
            raise KeyboardInterrupt
        return SimpleNamespace(figures=lambda: "")

    monkeypatch.setattr("chunkrt.cli.chat.stream_answer", stream_answer)
    monkeypatch.setattr(
        "chunkrt.tokenizer.Tokenizer.encode_chat", lambda self, messages, **_: list(map(len, map(str, messages)))
    )
    monkeypatch.setattr("chunkrt.tokenizer.Tokenizer.has_chat_template", True)
    finished = command("chat", GGUF, stdin="first\nsecond one\nthird\nfourth, the last\n")
    assert finished.status == 0
    assert finished.err.count("[stopped; the turn is discarded]") == 2
    said = [len(str({"role": "user", "content": text})) for text in ("second one", "fourth, the last")]
    empty = len(str({"role": "assistant", "content": ""}))
    assert asked[1] == said[:1]
    assert asked[3] == [said[0], empty, said[1]]


def test_unwritable_save_onnx_is_refused_before_any_work(command, monkeypatch):
    def fail(*arguments):
        raise AssertionError("it is planned first")

    monkeypatch.setattr("chunkrt.cli.plan.read_model", fail)
    expect_one_line(command("plan", GGUF, "--save-onnx", GGUF / "parts"), f"{GGUF} is not a folder")


@pytest.mark.parametrize("module", ["click", "numpy", "chunkrt.cli", "chunkrt.cli.doctor", "chunkrt.errors"])
def test_ctrl_c_during_an_import_exits_with_130(module):
    """The signal arrives while a module is imported, as at the start of a command."""
    program = (
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {module!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.argv = ['chunkrt', 'doctor']\n"
        "from chunkrt.__main__ import main\n"
        "main()\n"
    )
    finished = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60)
    assert (finished.returncode, finished.stdout, finished.stderr.strip()) == (130, "", "interrupted")


def test_command_module_is_imported_before_any_library():
    """Otherwise Ctrl-C at the start would print a traceback."""
    program = "import sys, chunkrt.__main__; print(sorted({'click', 'numpy', 'rich'} & set(sys.modules)))"
    finished = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60)
    assert finished.stdout == "[]\n"
