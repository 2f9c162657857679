"""Ranks that mpiexec starts: they give the same answers as one rank, and end together."""

import io
import json
import os
import shutil
import subprocess
import sys
import uuid
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import pytest
import rank_program
from fixture_checkpoints import checkpoint

from chunkrt.engine.options import EngineOptions
from chunkrt.engine.resolve import engine_folder
from chunkrt.errors import BackendError, ConfigError, DeviceLostError
from chunkrt.files import no_progress
from chunkrt.graph.plan import ALONE, Ranks
from chunkrt.runtime.ranks import last_words
from chunkrt.runtime.ranks.last_words import KILLED
from chunkrt.runtime.ranks.launch import connect, launched_ranks
from chunkrt.runtime.ranks.mailbox import Channel, Envelope, Mailbox

PROGRAM = Path(rank_program.__file__)
LLAMA = checkpoint("llama_gqa")
GGUF = checkpoint("llama_biased_gguf")
BENCH = ("bench", LLAMA, "--npu", "reference", "--scheme", "float", "--chunk", "8", "-p", "64", "-n", "0", "-r")
MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
HANGS = 120
"""Seconds after which a launch counts as hanging."""

needs_mpi = pytest.mark.skipif(
    MPIEXEC is None or find_spec("mpi4py") is None, reason="mpiexec or mpi4py is not installed: chunkrt[mpi]"
)


@pytest.fixture(scope="module", autouse=True)
def compiled(home):
    """Compile the model that most launches load, so that no rank imports the compiler; launches that load GGUF compile
    it."""
    for name, size, options in (
        ("llama_gqa", 2, rank_program.FLOAT),
        ("llama_gqa", 2, {"npu": "native"}),
        ("lfm2", 2, {"npu": "native"}),
        ("lfm2", 4, rank_program.FLOAT),
    ):
        for rank in range(size):
            engine_folder(str(checkpoint(name)), EngineOptions(**options), no_progress, Ranks(rank, size))


def launch(size, *arguments, options=(), program=(PROGRAM,), **variables):
    """Start ranks and wait for them; no process of them may be left. Those of size 1 start without mpiexec."""
    mark = uuid.uuid4().hex
    start = [] if size == 1 else [MPIEXEC, "-launcher", "fork", *options, "-n", str(size)]
    finished = subprocess.run(
        [*start, sys.executable, *map(str, (*program, *arguments))],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HANGS,
        env=os.environ | {"CHUNKRT_LAUNCH": mark} | variables,
    )
    _, alive = psutil.wait_procs(processes_of(mark), timeout=HANGS)
    assert not alive
    return finished


def processes_of(mark):
    """Return the processes of a launch that still run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("CHUNKRT_LAUNCH") == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


def said(finished):
    """Return the lines that chunkrt itself wrote on stderr."""
    return [line for line in finished.stderr.splitlines() if line.startswith("chunkrt: ")]


def alone(what, *arguments):
    """Return the JSON that a program of ranks prints with a single rank, in this process."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        vars(rank_program)[what](*arguments)
    return json.loads(printed.getvalue())


def result(finished):
    """Return the JSON that rank 0 printed; there must be no other output."""
    assert (finished.returncode, finished.stderr) == (0, "")
    return json.loads(finished.stdout)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ALONE),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, Ranks(1, 4)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, Ranks(0, 2)),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, ALONE),
        ({"PMI_RANK": "0"}, ALONE),
    ],
)
def test_launch_is_detected_by_its_variables(monkeypatch, variables, expected):
    for name in ("PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "mpi4py", raising=False)  # others may have imported it
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launched_ranks() == expected
    if expected == ALONE:
        assert connect([]) is None
        assert "mpi4py" not in sys.modules


@pytest.mark.parametrize(("rank", "size"), [("one", "2"), ("2", "2")])
def test_invalid_variables_are_rejected(monkeypatch, rank, size):
    monkeypatch.setenv("PMI_RANK", rank)
    monkeypatch.setenv("PMI_SIZE", size)
    with pytest.raises(ConfigError):
        launched_ranks()


def test_mailbox_keeps_early_messages_and_drops_late_ones():
    mailbox, early, late = Mailbox(), Envelope(Channel.SUM, 2), Envelope(Channel.SUM, 1)
    for source in (1, 2):
        mailbox.deliver(early, source, memoryview(b"x" * source))
    mailbox.begin(2)
    mailbox.deliver(late, 1, memoryview(b"late"))
    assert {source: bytes(payload) for source, payload in mailbox.take(early, (1, 2)).items()} == {1: b"x", 2: b"xx"}
    mailbox.abort(1, "too late to matter")
    mailbox.abort(2, "rank 1: no")
    mailbox.abort(2, "rank 0 ended the run")
    for envelope in (early, Envelope(Channel.DONE, 2)):
        with pytest.raises(BackendError, match=r"^rank 1: no$"):
            mailbox.take(envelope, (1,))
    mailbox.begin(3)
    mailbox.deliver(early, 1, memoryview(b"2 goes on beside 3"))
    mailbox.end(2)
    mailbox.deliver(early, 2, memoryview(b"late"))
    mailbox.abort(2, "too late to matter")
    assert not mailbox.is_aborted(2)
    with pytest.raises(BackendError, match="belongs to work that has ended"):
        mailbox.take(early, (1,))
    assert mailbox.fail(DeviceLostError("rank 2 was lost"))
    assert not mailbox.fail(DeviceLostError("rank 1 was lost"))
    with pytest.raises(DeviceLostError, match="rank 2"):
        mailbox.take(Envelope(Channel.COMMAND, 1), (0,))
    assert mailbox.was_failure_told


@pytest.mark.skipif(os.name != "posix", reason="needs a shell and signals")
@pytest.mark.parametrize(
    ("end", "line"),
    [
        ("words.say('a\\nb')", "a b\n"),
        ("words.say('')", ""),
        ("os.kill(os.getpid(), 9)", f"{KILLED}\n"),
        ("words.prepare('a\\nb'); os.kill(os.getpid(), 9)", "a b\n"),
        ("words.prepare('a'); words.prepare('b'); os.kill(os.getpid(), 9)", "b\n"),
        ("words.prepare('a'); words.say('b')", "b\n"),
        ("words.prepare('a'); words.say('')", ""),
        ("words.say('a'); words.prepare('b'); os.kill(os.getpid(), 9)", "a\n"),
    ],
)
def test_last_words_are_at_most_one_line(end, line):
    folder = str(Path(last_words.__file__).parent)  # without the rest of chunkrt, which takes long to import
    program = f"import os, sys; sys.path.append({folder!r}); import last_words; words = last_words.LastWords(); {end}"
    finished = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=HANGS)
    assert finished.stderr == line


def check_sessions(found, expected, path, size):
    """Check the results of `sessions`; their state is in a file of each rank."""
    assert found["tokens"] == expected["tokens"]
    np.testing.assert_allclose(found["logits"], expected["logits"], rtol=1e-4, atol=1e-4)
    names = sorted(written.name for written in path.parent.glob(f"{path.name}*"))
    assert names == [path.name, *(f"{path.name}.rank{rank}" for rank in range(1, size))]


@pytest.mark.slow
@needs_mpi
def test_program_may_initialise_mpi_itself(tmp_path):
    """Sessions; a context that shifts on every rank; two engines at once."""
    begin = (
        f"from mpi4py import MPI; import sys; sys.path.insert(0, {str(PROGRAM.parent)!r}); from rank_program import *"
    )
    model, path = str(LLAMA), str(tmp_path / "2.npz")
    finished = launch(
        2, program=("-c", f"{begin}; sessions({model!r}, {path!r}); shifting({model!r}); at_once({model!r})")
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    of_sessions, *others = map(json.loads, finished.stdout.splitlines())
    check_sessions(of_sessions, alone("sessions", LLAMA, tmp_path / "1.npz"), tmp_path / "2.npz", 2)
    assert others == [alone("shifting", LLAMA), alone("at_once", LLAMA)]


@needs_mpi
def test_command_line_answers_like_one_rank(command):
    arguments = ("run", GGUF, "-p", "hello", "-n", "8", "--scheme", "float", "--npu", "reference")
    one, two = command(*arguments), launch(2, "-m", "chunkrt", *arguments, program=())
    assert (one.status, two.returncode, two.stdout) == (0, 0, one.out)
    assert len(two.stderr.splitlines()) == len(one.err.splitlines()) == 1


@needs_mpi
def test_failed_or_cancelled_run_restores_all_ranks():
    finished = launch(2, "failing", LLAMA)
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    assert lines[1::2] == ["True"] * 5
    kinds = ["BackendError", "BackendError", "ClosedError", "KeyboardInterrupt", "ModelError"]
    assert [line.split()[0] for line in lines[::2]] == kinds
    assert all("made to fail" in line for line in lines[:4:2])
    assert lines[8].startswith("ModelError cannot load a state from nowhere.npz")


@needs_mpi
@pytest.mark.parametrize(
    ("first", "step"), [(1, 503), *(pytest.param(first, 20, marks=pytest.mark.slow) for first in range(1, 21))]
)
def test_interrupt_at_any_point_leaves_all_ranks_consistent(first, step):
    num_interrupts, num_wrong = result(launch(2, "interrupts", LLAMA, first, step))
    assert num_interrupts > 5
    assert num_wrong == 0


@pytest.mark.sampled(every=7)
@needs_mpi
@pytest.mark.parametrize("options", [(), ("-disable-auto-cleanup",)], ids=["plain", "disable-auto-cleanup"])
@pytest.mark.parametrize(("size", "name"), [(2, "SIGKILL"), (4, "SIGKILL"), (2, "SIGTERM")])
def test_dead_rank_ends_all_with_one_line(options, size, name):
    finished = launch(size, "signalled", name, *BENCH, "1", options=options)
    assert finished.returncode != 0
    (line,) = said(finished)
    assert "rank 1 was lost" in line or line == KILLED
    assert "|" not in finished.stdout


@pytest.mark.sampled(every=2)
@needs_mpi
@pytest.mark.parametrize("size", [2, 4])
def test_silent_rank_ends_all_with_one_line(size):
    finished = launch(size, "silent", *BENCH, "1")
    assert finished.returncode != 0
    (line,) = said(finished)
    assert "rank 1 was lost: no message arrived from it" in line


@pytest.mark.slow
@needs_mpi
def test_silent_leader_ends_all_with_one_line():
    finished = launch(2, "silent_leader", *BENCH, "1")
    assert finished.returncode != 0
    assert said(finished) == [KILLED]


@pytest.mark.sampled(every=2, size=[2])
@needs_mpi
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("how", "why"),
    [("breaks", "rank 1 failed: ValueError: made to fail"), ("leaves", "rank 1 ended before the leader did")],
)
def test_rank_that_ends_reports_the_reason(how, why, size):
    """mpiexec kills the others at once, so rank 0's message must be known before."""
    finished = launch(size, "ending", how, *BENCH, "1")
    assert finished.returncode != 0
    (line,) = said(finished)
    assert line.endswith(f"{why}; start all ranks again")


@needs_mpi
def test_dead_rank_ends_a_rank_that_waits_for_other_input():
    finished = launch(2, "waiting", LLAMA, options=("-disable-auto-cleanup",))
    assert finished.returncode != 0
    (line,) = said(finished)
    assert "rank 1 was lost" in line or line == KILLED


@needs_mpi
def test_interrupt_ends_all_ranks():
    finished = launch(2, "interrupted", *BENCH, "100000")
    assert finished.returncode == 130
    assert "interrupted" in finished.stderr
    assert not said(finished)


@needs_mpi
def test_ranks_must_be_started_with_the_same_arguments():
    rank = ("-m", "chunkrt", "run", GGUF, "-p")
    finished = launch(2, *rank, "this", ":", "-n", "1", sys.executable, *rank, "that", program=())
    assert finished.returncode != 0
    (line,) = said(finished)
    assert "-p that" in line
    assert "-p this" in line


@pytest.mark.sampled(every=3)
@needs_mpi
@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        (("run", "no-such-model", "-p", "x"), 1, "chunkrt: no model is called 'no-such-model'"),
        (("run", LLAMA, "--no-such-option"), 2, "chunkrt: No such option"),
        pytest.param(
            *(("run", LLAMA, "-p", "x", "--npu", "reference", "--scheme", "w8a16"), 1, "chunkrt: "),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_errors_are_printed_once(arguments, status, line):
    finished = launch(2, "-m", "chunkrt", *arguments, program=())
    assert finished.returncode == status
    (only,) = said(finished)
    assert only.startswith(line)


@needs_mpi
@pytest.mark.parametrize(
    ("ranks", "register", "uses"),
    [
        ("0", "pass", "rank 0 uses the {} and rank 1 does not"),
        pytest.param("1", "pass", "rank 1 uses the {} and rank 0 does not", marks=pytest.mark.slow),
        pytest.param(
            *("01", "int(os.environ['PMI_RANK']) and no_such_name", "rank 0 uses the {} and rank 1 does not"),
            marks=pytest.mark.slow,
        ),
        pytest.param("01", "pass", "", marks=pytest.mark.slow),
    ],
)
def test_plugin_of_only_one_rank_is_named(ranks, register, uses, tmp_path):
    """It may compute its operators differently, so that the ranks diverge."""
    info = tmp_path / "lone_operators-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lone-operators\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[chunkrt.operators]\nlone = lone_operators:register\n")
    (tmp_path / "lone_operators.py").write_text(f"import os\ndef register(operators):\n    {register}\n")
    finished = launch(2, "plugged", tmp_path, ranks, "run", GGUF, "-p", "x", "-n", "1")
    lines = [line for line in said(finished) if "is skipped" not in line]
    assert (finished.returncode, len(lines)) == ((1, 1) if uses else (0, 0)), finished.stderr
    plugin = "plug-in 'lone' of lone-operators 1.0 (chunkrt.operators)"
    assert not uses or lines[0].startswith(f"chunkrt: {uses.format(plugin)}; install")


@needs_mpi
def test_launch_without_mpi4py_names_the_missing_package(tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise ImportError('made to fail')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    finished = launch(2, "command", "run", LLAMA, "-p", "x", PYTHONPATH=path)
    assert finished.returncode == 1
    (line,) = said(finished)
    assert 'pip install "chunkrt[mpi]"' in line
