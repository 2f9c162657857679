"""The pure parts of `bench/peers.py`: rounds, ratios, tables, choices, and a failing process. No other runtime is
needed.
"""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from bench_modules import BENCH, peers
from click.testing import CliRunner


class Fake:
    """Answers with prepared seconds, and records its requests."""

    def __init__(self, name, asked, seconds, fails_at=()):
        self.name, self.asked, self.seconds, self.fails_at = name, asked, iter(seconds), fails_at

    def ask(self, do, tokens):
        self.asked.append((self.name, do, tuple(tokens)))
        if len(tokens) in self.fails_at:
            raise peers("process").ContenderError("too long")
        return {"seconds": next(self.seconds), "token": len(tokens)}


def measured(contenders, tests, rounds=2):
    rounds_module = peers("rounds")
    parsed = [rounds_module.Test.parse(test) for test in tests]
    pauses = []
    return rounds_module.measure(
        contenders, parsed, rounds=rounds, vocabulary_size=100, seed=0, pause=pauses.append
    ), pauses


def test_contenders_take_turns_on_the_same_fresh_prompt():
    asked = []
    fakes = {name: Fake(name, asked, [1.0] * 6) for name in ("a", "b")}
    _, pauses = measured(fakes, ["pp8", "tg3"])
    turns = [("a", "prefill", 8), ("b", "prefill", 8), ("a", "decode", 3), ("b", "decode", 3)]
    assert [(name, do, len(tokens)) for name, do, tokens in asked] == turns * 3
    assert len(pauses) == len(asked)
    prompts = [tokens for _, _, tokens in asked]
    assert prompts[::2] == prompts[1::2]
    assert len(set(prompts)) == 6
    assert all(0 <= token < 100 for prompt in prompts for token in prompt)


def test_the_first_round_does_not_count_and_ratios_are_taken_within_a_round():
    contenders = {"ours": Fake("ours", [], [99.0, 1.0, 2.0, 4.0]), "theirs": Fake("theirs", [], [99.0, 2.0, 2.0, 2.0])}
    results, _ = measured(contenders, ["pp8"], rounds=3)
    assert results.rates["pp8"] == {"ours": [8.0, 4.0, 2.0], "theirs": [4.0, 4.0, 4.0]}
    assert results.ratios("pp8", "ours", "theirs") == [2.0, 1.0, 0.5]
    assert results.spread("pp8", "ours") == (4.0, 2.0, 8.0)


def test_failing_contender_is_reported_and_skipped_afterwards():
    asked = []
    contenders = {"ours": Fake("ours", asked, [1.0] * 9), "theirs": Fake("theirs", asked, [1.0] * 9, fails_at=(8,))}
    results, _ = measured(contenders, ["pp8", "pp4"])
    assert results.failures == {"pp8": {"theirs": "too long"}, "pp4": {}}
    assert results.rates["pp8"]["theirs"] == [None, None]
    assert results.spread("pp8", "theirs") is None
    assert results.ratios("pp8", "ours", "theirs") == []
    assert results.rates["pp4"]["theirs"] == [4.0, 4.0]
    assert sum(name == "theirs" and len(tokens) == 8 for name, _, tokens in asked) == 1


def test_busy_processes_run_only_during_their_test_and_shares_are_reported():
    """A contender counts the processes that exist during its request."""
    seen = []

    class Counting(Fake):
        def ask(self, do, tokens):
            seen.append(len(psutil.Process().children()))
            return super().ask(do, tokens)

    before = len(psutil.Process().children())
    contenders = {"ours": Counting("ours", [], [1.0, 1.0, 1.0, 2.0, 1.0, 4.0])}
    results, _ = measured(contenders, ["pp8", "pp8+2"])
    assert [number - before for number in seen] == [0, 2] * 3
    assert len(psutil.Process().children()) == before
    assert results.shares("ours") == {"pp8+2": [0.5, 0.25]}


@pytest.mark.parametrize("text", ["pp512", "tg64", "pp1", "pp512+2", "tg32+1"])
def test_parse_reads_names(text):
    assert str(peers("rounds").Test.parse(text)) == text


@pytest.mark.parametrize("text", ["", "pp", "pp0", "pp-4", "xx5", "pp1.5", "pp²", "pp8+", "pp8+x"])
def test_parse_refuses_malformed_names(text):
    with pytest.raises(ValueError, match="expected pp or tg and a number"):
        peers("rounds").Test.parse(text)


def report():
    contenders = {"ours": Fake("ours", [], [9, 0.5, 0.25]), "theirs": Fake("theirs", [], [9, 1, 1], fails_at=(4,))}
    results, _ = measured(contenders, ["pp8", "tg4"][:1])
    results.failures["tg4"] = {"theirs": "too long"}
    about = {name: {"versions": {"package": "1.0"}, "settings": "a|b"} for name in contenders}
    return peers("report").Report(
        conditions={"model": "m", "processor": "p", "threads": 2},
        baselines=["ours"],
        about=about,
        absent={"third": "No module named third"},
        agreement={"ours": "3 of 3"},
        results=results,
    )


def test_report_markdown_has_tables_and_failures():
    lines = peers("report").to_markdown(report()).splitlines()
    assert "- threads: 2" in lines
    assert "| pp8 | ours | 24.00 (16.00 - 32.00) | 1.00 (1.00 - 1.00) |" in lines
    assert "| pp8 | theirs | 8.000 (8.000 - 8.000) | 3.00 (2.00 - 4.00) |" in lines
    assert "| ours | package 1.0 | a/b | 3 of 3 |" in lines
    assert "- third is absent: No module named third" in lines
    assert "- theirs failed in tg4: too long" in lines


def test_json_holds_every_sample():
    data = json.loads(peers("report").to_json(report()))
    assert data["results"]["rates"]["pp8"]["ours"] == [16.0, 32.0]


def test_the_plot(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib draws the plot")
    path = tmp_path / "bars.png"
    peers("report").plot(report(), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_contenders_are_consistent_data():
    data = peers("contenders")
    names = [contender.name for contender in data.CONTENDERS]
    assert len(set(names)) == len(names)
    assert data.CONTENDERS[0].kind == "chunkrt"
    engines = Path(BENCH) / "peers" / "engines"
    for contender in data.CONTENDERS:
        assert (engines / f"{data.ENGINES[contender.kind]}.py").exists()
        assert contender.form == "checkpoint" or contender.form in data.FORMS
    for form in data.FORMS.values():
        assert (engines / f"{form.engine}.py").exists()
        assert form.of == "checkpoint" or form.of in data.FORMS


def test_a_choice_of_peers_keeps_chunkrt_and_gives_it_its_options():
    chosen = peers("command").choose(["torch"], {"chunk_length": 64, "attention_math": None})
    assert {contender.kind for contender in chosen} == {"chunkrt", "torch"}
    assert chosen[0].options == {"chunk_length": 64}
    with pytest.raises(Exception, match=r"unknown runtime 'llama'; available: llama\.cpp"):
        peers("command").choose(["llama"], {})


@pytest.mark.parametrize("kind", ["torch", "onnxruntime-genai", "llama.cpp", "openvino-genai"])
def test_only_llama_cpp_is_compiled_and_only_for_itself(kind):
    """The gguf package makes the files for other runtimes."""
    packages = peers("contenders").packages_for(peers("command").choose([kind], {}))
    assert ("llama-cpp-python" in packages) == (kind == "llama.cpp")
    assert ("nncf" in packages) == (kind == "openvino-genai")
    assert ("gguf" in packages) == (kind != "chunkrt")


def test_every_package_of_the_requirements_is_taken_by_a_peer_and_the_other_way_round():
    data, environment = peers("contenders"), peers("environment")
    listed = {line.partition("==")[0] for line in environment.REQUIREMENTS.read_text("utf-8").split()}
    packages = data.packages_for([*data.CONTENDERS, *data.SERVERS, *data.CONVERSING])
    assert set(packages) == listed
    assert set(data.packages_for(peers("command").choose([], {}))) == set()


@pytest.mark.parametrize(("package", "says_why"), [("gguf", False), ("llama-cpp-python", True)])
def test_environment_reports_and_installs_only_missing_packages(tmp_path, monkeypatch, package, says_why):
    environment, told, installed = peers("environment"), [], []

    def pretended(command, **options):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / "python").touch()
        (tmp_path / "Scripts").mkdir(exist_ok=True)
        (tmp_path / "Scripts" / "python.exe").touch()
        installed.extend(part for part in command if "==" in part)
        return subprocess.CompletedProcess(command, 0, "")

    monkeypatch.setattr(environment.subprocess, "run", pretended)
    environment.make_environment(tmp_path, told.append, {"torch": ["PyTorch"]})
    for _ in range(2):
        environment.make_environment(tmp_path, told.append, {"torch": ["PyTorch"], package: ["OpenVINO GenAI Q8_0"]})
    environment.make_environment(tmp_path, told.append, {"torch": ["PyTorch"]})
    assert [each.partition("==")[0] for each in installed] == ["torch", package]
    why = "; llama-cpp-python is compiled, in about ten minutes, for OpenVINO GenAI Q8_0"
    assert told == [
        f"installing torch into {tmp_path}",
        f"installing {package} into {tmp_path}{why if says_why else ''}",
    ]


@pytest.mark.skipif(sys.platform == "win32", reason="the reasons are a Unix system's")
@pytest.mark.parametrize(
    ("python", "reason"),
    [
        ("no/such/python", "No such file or directory"),
        (BENCH, "Permission denied"),
        ("true", "is not a Python 3 interpreter"),
        ("a\0b", "embedded null byte"),
    ],
)
def test_a_wrong_interpreter_prints_one_line_before_anything_else(python, reason):
    finished = CliRunner().invoke(peers("command").peers, ["no-such-model", "--python", python])
    assert finished.exit_code == 1
    (line,) = finished.output.splitlines()
    assert line.startswith(f"Error: {python!r} ")
    assert reason in line


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_report_file_is_checked_before_measuring(tmp_path, option):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "report"
    finished = CliRunner().invoke(peers("command").peers, ["no-such-model", option, str(path)])
    assert finished.exit_code == 2
    assert finished.output.splitlines()[-1] == f"Error: cannot write {path}: {tmp_path / 'file'} is not a folder"


def test_an_environment_that_cannot_be_made_is_an_error_in_a_line(tmp_path):
    (tmp_path / "file").touch()
    environment, process = peers("environment"), peers("process")
    with pytest.raises(process.ContenderError, match=r"^cannot create an environment in [^\n]+$"):
        environment.make_environment(tmp_path / "file" / "environment", lambda what: None, {"gguf": ["GGUF"]})


def test_an_absent_runtime_is_an_error_in_a_line(tmp_path, monkeypatch):
    process, contenders = peers("process"), peers("contenders")
    monkeypatch.setitem(contenders.ENGINES, "absent", "no_such_engine")
    with pytest.raises(process.ContenderError, match=r"No module named 'peers\.engines\.no_such_engine'"):
        process.ContenderProcess(
            contenders.Contender(name="absent", kind="absent"),
            python=sys.executable,
            model=tmp_path,
            threads=1,
            context_length=8,
            log=tmp_path / "log",
        )


def contender_process(tmp_path, kind="chunkrt", **options):
    """A contender that has no model to load."""
    contender = peers("contenders").Contender(name=kind, kind=kind)
    sizes = {"model": tmp_path / "none.gguf", "threads": 1, "context_length": 8, "log": tmp_path / "log"}
    return peers("process").ContenderProcess(contender, **{"python": sys.executable, **sizes, **options})


def test_contender_imports_installed_packages_and_not_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "chunkrt").mkdir()
    (tmp_path / "chunkrt" / "__init__.py").write_text("raise ImportError('a source folder, without a native module')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(peers("process").ContenderError, match=r"none\.gguf") as raised:
        contender_process(tmp_path)
    assert "native module" not in str(raised.value)


@pytest.fixture
def busy(tmp_path, monkeypatch):
    """An interpreter that is busy for minutes on any input, and the processes that were started."""
    path, started, popen = tmp_path / "busy", [], subprocess.Popen

    def start(*arguments, **options):
        started.append(popen(*arguments, **options))
        return started[-1]

    path.write_text('#!/bin/sh\necho \'{"versions": {}, "settings": ""}\'\nexec sleep 600\n')
    path.chmod(0o755)
    monkeypatch.setattr(peers("process").subprocess, "Popen", start)
    yield str(path), started
    for process in started:
        process.kill()


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands for an interpreter")
def test_ctrl_c_ends_the_contender_that_starts_and_those_that_run(tmp_path, monkeypatch, busy):
    python, started = busy
    contenders, process, command = peers("contenders"), peers("process"), peers("command")
    pair = [contenders.Contender(name=name, kind="torch") for name in ("first", "second")]
    loads = json.loads

    def interrupted(line):
        if len(started) == 2:
            raise KeyboardInterrupt
        return loads(line)

    monkeypatch.setattr(process.json, "loads", interrupted)
    forms = SimpleNamespace(make=lambda form: tmp_path, folder=tmp_path)
    with pytest.raises(KeyboardInterrupt), command.started(pair, forms, python, 1, 8):
        pass
    assert [each.poll() for each in started] == [-9, -9]


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands for an interpreter")
def test_ctrl_c_during_a_request_kills_the_contender(tmp_path, busy):
    python, started = busy
    with pytest.raises(KeyboardInterrupt), contender_process(tmp_path, python=python):
        raise KeyboardInterrupt
    assert [each.poll() for each in started] == [-9]


def test_a_form_that_cannot_be_made_is_an_error_in_a_line_and_leaves_nothing(tmp_path):
    process = peers("process")
    with pytest.raises(process.ContenderError, match=r"x\.gguf cannot be made: .*no_such_engine"):
        process.convert("no_such_engine", tmp_path, tmp_path / "x.gguf", {}, python=sys.executable)
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf.log"]


def test_model_is_found_by_its_name_in_the_catalogue(monkeypatch, tmp_path):
    (tmp_path / "m.gguf").touch()
    (tmp_path / "mine.toml").write_text(
        'family = "llama"\nscheme = "float"\ncontext_length = 64\nlicence = "mit"\n'
        '[source]\nkind = "path"\npath = "m.gguf"\n'
    )
    monkeypatch.setenv("CHUNKRT_MODELS", str(tmp_path))
    assert peers("command").find_checkpoint("mine") == tmp_path / "m.gguf"
