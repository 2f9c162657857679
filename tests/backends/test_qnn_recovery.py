"""Failures of the NPU at random places: right results, and the NPU is used again as soon as it works.

The sessions are fake ones, in which ONNX Runtime's CPU provider computes the graphs for the NPU: the emulator would
take minutes.
"""

import logging
import random
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from functools import partial

import httpx
import numpy as np
import onnxruntime as ort
import pytest
from calibrated import calibrated
from fake_backend import wait_until
from fixture_checkpoints import checkpoint
from gates import at_once
from server_of_tests import serving

import chunkrt
from chunkrt.backends import fallback, qnn
from chunkrt.backends.qnn.timed_calls import TimedCalls
from chunkrt.errors import ConfigError, DeviceLostError, NumberRangeError

pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn, which emulates the NPU, is not installed")
if not qnn.open_htp().is_emulated:
    pytest.skip("this machine has an NPU, and a compiler for that NPU alone", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("own_home")

NAME, CHUNK, CONTEXT, NUM_TOKENS, NUM_GENERATED = "llama_gqa", 8, 64, 13, 2
LIMIT_S = 5.0
"""Time limit with a call that hangs; far above the duration of a call of this model."""
TOLERANCE = 2.0**-7
"""Tolerance of logits of NPU and CPU (root mean square)."""


class Faults:
    """The NPU of a test. From a given run on, counted over all sessions, it fails in one of four ways.

    kill: all open sessions fail from then on; new ones can be opened.
    fail: one run fails.
    hang: one run does not return, and other open sessions fail.
    overflow: the outputs of one run are infinite.
    """

    def __init__(self):
        self.kind = ""
        self.at = 0
        self.num_runs = self.num_opened = self.num_refused = 0
        self.refusals = 0
        """Number of sessions that are refused after a fault."""
        self.epoch = 0
        self.released = threading.Event()

    def arm(self, kind, at, refusals=0):
        self.kind, self.at, self.refusals = kind, self.num_runs + at, refusals

    def open(self, htp, soc, model, *, options, write_context=None):
        if write_context is not None:
            write_context.write_bytes(model)
            write_context.with_name("context_qnn.bin").write_bytes(b"")
            return None
        if self.refusals:
            self.refusals -= 1
            self.num_refused += 1
            raise RuntimeError("no DSP")
        self.num_opened += 1
        settings = ort.SessionOptions()
        settings.add_session_config_entry("session.disable_quant_qdq", "1")
        settings.intra_op_num_threads = 1
        return FaultySession(self, ort.InferenceSession(str(model), settings, providers=["CPUExecutionProvider"]))


class FaultySession:
    def __init__(self, faults, session):
        self._faults, self._session, self._epoch = faults, session, faults.epoch

    def io_binding(self):
        return FaultyBinding(self._session.io_binding())

    def run_with_iobinding(self, binding):
        faults = self._faults
        faults.num_runs += 1
        if self._epoch != faults.epoch:
            raise RuntimeError("SSR: subsystem restart")
        kind = faults.kind if faults.num_runs >= faults.at else ""
        if kind:
            faults.kind = ""
        if kind in ("kill", "hang"):
            faults.epoch += 1
        if kind == "hang":
            faults.released.wait()
        if kind in ("kill", "fail", "hang"):
            raise RuntimeError("QNN 1100")
        self._session.run_with_iobinding(binding.inner)
        if kind == "overflow":
            for value in binding.outputs:
                value.update_inplace(np.full(value.shape(), np.inf, np.float16))


class FaultyBinding:
    def __init__(self, inner):
        self.inner, self.outputs = inner, []
        self.bind_ortvalue_input = inner.bind_ortvalue_input

    def bind_ortvalue_output(self, name, value):
        self.inner.bind_ortvalue_output(name, value)
        self.outputs.append(value)


@pytest.fixture
def faults(monkeypatch):
    made = Faults()
    monkeypatch.setattr("chunkrt.backends.qnn.backend.open_session", made.open)
    monkeypatch.setattr(fallback, "RESTORE_DELAYS_S", (0.0,) * 20)
    yield made
    made.released.set()


@pytest.fixture(scope="module")
def calibration(tmp_path_factory):
    path = tmp_path_factory.mktemp("calibration") / "tiny.npz"
    calibrated(NAME, path, prompt(0, CONTEXT))
    return path


def prompt(seed, num_tokens=NUM_TOKENS):
    return np.random.default_rng(seed).integers(0, 48, num_tokens)


def load(calibration, **options):
    wanted = {"npu": "qnn", "scheme": "w8a16", "chunk_length": CHUNK, "context_length": CONTEXT, "threads": 2}
    wanted |= {"calibration": calibration, "decode_on": "npu", "prefix_cache": "off"}
    wanted |= {"attention_math": "float32"}  # exact enough for the tolerance on every processor
    return chunkrt.load(checkpoint(NAME), **(wanted | options))


@dataclass(frozen=True)
class Answer:
    """Logits after a prompt, the generated tokens, and the logits after these."""

    first: np.ndarray
    tokens: tuple[int, ...]
    last: np.ndarray


def answer(engine, seed):
    session = engine.session()
    first = session.prefill(prompt(seed)).logits
    tokens = tuple(piece.token_id for piece in session.generate(max_new_tokens=NUM_GENERATED))
    return Answer(first, tokens, session.prefill([7, 8]).logits)


@pytest.fixture(scope="module")
def native(calibration):
    with load(calibration, npu="native", decode_on="cpu") as engine:
        yield engine


def check_right(found, seed, native):
    """Compare with the CPU's logits for the same tokens."""
    session = native.session()
    assert_near(found.first, session.prefill(prompt(seed)).logits)
    assert_near(found.last, session.prefill([*found.tokens, 7, 8]).logits)


def assert_near(found, expected):
    assert np.sqrt(np.mean((found - expected) ** 2)) < TOLERANCE * np.sqrt(np.mean(expected**2))


def assert_same(found, expected):
    np.testing.assert_array_equal(found.first, expected.first)
    assert found.tokens == expected.tokens
    np.testing.assert_array_equal(found.last, expected.last)


ATTENTION = {"attention": "npu", "npu_window": str(CONTEXT)}
CASES = [
    (kind, mode, num_sessions, attention)
    for kind in ("kill", "fail", "overflow", "hang")
    for mode in ("fallback", "fail")
    for num_sessions in (1, 4)
    for attention in ("cpu", "npu")
]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("kind", "mode", "num_sessions", "attention"), CASES)
def test_npu_is_used_again_after_a_fault_at_any_place(calibration, native, faults, kind, mode, num_sessions, attention):
    rng = random.Random(f"{kind} {mode} {num_sessions} {attention}")
    options = {"on_npu_failure": mode, **(ATTENTION if attention == "npu" else {})}
    options |= {"npu_timeout": LIMIT_S} if kind == "hang" else {}
    with load(calibration, **options) as engine:
        healthy = [answer(engine, seed) for seed in range(num_sessions)]
        num_runs = faults.num_runs
        for _ in range(1 if kind == "hang" else 3):
            faults.arm(kind, rng.randint(1, num_runs), refusals=rng.randint(0, 2) if mode == "fallback" else 0)
            if kind == "overflow":
                faults.refusals = 0
            found = at_once(*[partial(answer, engine, seed) for seed in range(num_sessions)])
            if mode == "fallback":
                for seed, result in enumerate(found):
                    check_right(result, seed, native)
            else:
                failed = NumberRangeError if kind == "overflow" else DeviceLostError
                assert any(isinstance(result, failed) for result in found) or faults.kind
                for seed, result in enumerate(found):
                    if not isinstance(result, failed):
                        check_right(result, seed, native)
            faults.kind = ""
            wait_until(lambda: engine.stats().npu.status == "ok" or mode == "fail")
            before = faults.num_runs
            for seed, expected in enumerate(healthy):
                assert_same(answer(engine, seed), expected)
            assert faults.num_runs > before
            assert engine.stats().npu.status == "ok"


@pytest.mark.parametrize("mode", ["fallback", "fail"])
def test_state_and_log_report_failures(calibration, faults, caplog, mode):
    with load(calibration, on_npu_failure=mode, policy="sequential") as engine:  # no second run is in progress
        assert engine.stats().npu == fallback.NpuState()
        faults.arm("kill", 2, refusals=1)
        with caplog.at_level(logging.INFO):
            if mode == "fail":
                with pytest.raises(DeviceLostError, match="QNN 1100"):
                    answer(engine, 0)
                assert engine.stats().npu.status == "restoring"
                with pytest.raises(DeviceLostError, match=r"was lost \(.*QNN 1100\), and cannot be restored: .*no DSP"):
                    answer(engine, 0)
            answer(engine, 0)
            wait_until(lambda: engine.stats().npu.status == "ok")
        state = engine.stats().npu
        assert (state.failures, state.restored) == (1, 1)
        assert "QNN 1100" in state.error
        assert (state.fallbacks > 0) == (mode == "fallback")
    told = [record.getMessage() for record in caplog.records if record.name == "chunkrt.backends.fallback"]
    taking_over = ["the CPU takes over", "no DSP"] if mode == "fallback" else []
    for message, expected in zip(told, [*taking_over, "the NPU is restored"], strict=True):
        assert expected in message


def test_number_of_attempts_is_limited(calibration, native, faults, caplog, monkeypatch):
    monkeypatch.setattr(fallback, "RESTORE_DELAYS_S", (0.0,) * 4)
    with load(calibration, on_npu_failure="fallback") as engine:
        faults.arm("kill", 3, refusals=1000)
        check_right(answer(engine, 0), 0, native)
        wait_until(lambda: engine.stats().npu.status == "lost")
        assert faults.num_refused == len(fallback.RESTORE_DELAYS_S)
        check_right(answer(engine, 1), 1, native)
        faults.refusals = 0
        check_right(answer(engine, 2), 2, native)
        assert engine.stats().npu.status == "lost"
    assert caplog.messages[-1] == "the NPU did not come back after 4 attempts; the CPU computes from now on"


def test_late_failure_of_a_closed_context_is_not_a_new_one():
    """Two runs are in progress: one fails, the NPU is restored, and then the other fails."""
    health = fallback.NpuHealth(lambda: None)
    health.report(DeviceLostError("first"), 0, in_background=True)
    wait_until(lambda: health.state.status == "ok")
    health.report(DeviceLostError("late"), 0, in_background=True)
    assert health.state == fallback.NpuState(failures=1, restored=1, error="first")
    health.report(DeviceLostError("second"), 1, in_background=True)
    wait_until(lambda: health.state.restored == 2)
    assert health.state == fallback.NpuState(failures=2, restored=2, error="second")
    health.close()


def test_any_error_of_an_attempt_counts_as_its_failure(monkeypatch):
    """A plug-in's backend may raise any type of error."""
    monkeypatch.setattr(fallback, "RESTORE_DELAYS_S", (0.0,) * 3)
    attempts = []

    def restore():
        attempts.append(None)
        raise OSError("no such device")

    health = fallback.NpuHealth(restore)
    health.report(DeviceLostError("lost"), 0, in_background=True)
    wait_until(lambda: health.state.status == "lost")
    assert len(attempts) == 3
    with pytest.raises(DeviceLostError, match=r"was lost \(lost\), and cannot be restored: no such device"):
        health.require()
    health.close()


def test_close_ends_the_attempts(calibration, faults, monkeypatch):
    monkeypatch.setattr(fallback, "RESTORE_DELAYS_S", (0.0, 3600.0))
    with load(calibration, on_npu_failure="fallback") as engine:
        faults.arm("kill", 1, refusals=1000)
        answer(engine, 0)
    assert not [thread for thread in threading.enumerate() if thread.name == "chunkrt-npu-restore"]


def test_call_that_hangs_fails_alone_and_its_waiting_calls():
    calls, released, began = TimedCalls(), threading.Event(), threading.Event()

    def hang():
        began.set()
        released.wait()

    found = []
    first = threading.Thread(target=lambda: found.append(outcome(lambda: calls.call(hang, 0.5))))
    first.start()
    began.wait()
    found.append(outcome(lambda: calls.call(hang, 3600.0)))
    first.join()
    assert calls.call(lambda: threading.current_thread().name, 60.0) == "chunkrt-npu-calls"
    released.set()
    assert sorted(map(str, found)) == [
        "another call to the NPU did not return",
        "the NPU did not respond within 0.5 s (`npu_timeout`)",
    ]
    with pytest.raises(ZeroDivisionError):
        calls.call(lambda: 1 // 0, 60.0)


EXITS = """
import signal, threading, time
from chunkrt.backends.fallback import NpuHealth
from chunkrt.backends.qnn.timed_calls import TimedCalls

calls, began = TimedCalls(), threading.Event()

def slow():
    began.set()
    if how == "interrupted":
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    time.sleep(0.5)
    print("ended", flush=True)

how = HOW
if how == "interrupted":
    try:
        calls.call(slow, 60.0)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
elif how == "waiting":
    threading.Thread(target=calls.call, args=(slow, 60.0), daemon=True).start()
    began.wait()
else:
    health = NpuHealth(lambda: calls.call(slow, 60.0))
    health.report(RuntimeError("x"), 0, in_background=True)
    began.wait()
"""


@pytest.mark.parametrize(
    ("how", "printed"),
    [
        pytest.param(
            *("interrupted", ["ended", "interrupted"]),
            marks=pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals of single threads"),
        ),
        ("waiting", ["ended"]),
        ("restoring", ["ended"]),
    ],
)
def test_process_exits_after_a_call_in_progress(how, printed):
    """A thread that returns from native code after the interpreter has shut down would abort the process."""
    command = [sys.executable, "-P", "-c", EXITS.replace("HOW", repr(how))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.splitlines()) == printed


def outcome(call):
    try:
        return call()
    except DeviceLostError as error:
        return error


@pytest.mark.parametrize("kind", ["kill", "hang"])
def test_server_answers_and_reports_the_npu(calibration, native, faults, kind):
    options = {"on_npu_failure": "fallback", "npu_timeout": LIMIT_S}
    with load(calibration, **options) as engine, serving(engine) as (_, url):
        assert httpx.get(f"{url}/health").json() == {"status": "ok", "npu": asdict(fallback.NpuState())}
        faults.arm(kind, 1)
        found = []
        thread = threading.Thread(target=lambda: found.append(answer(engine, 0)))
        thread.start()
        while thread.is_alive():
            assert httpx.get(f"{url}/health").status_code == 200
        check_right(found[0], 0, native)
        wait_until(lambda: httpx.get(f"{url}/health").json()["npu"]["status"] == "ok")
        told = httpx.get(f"{url}/health").json()["npu"]
        assert (told["failures"], told["restored"]) == (1, 1)
        assert httpx.get(f"{url}/stats").json()["npu"] == told


@pytest.mark.parametrize("value", [0, -1, float("inf"), "soon"])
def test_time_limit_is_validated(value):
    with pytest.raises(ConfigError, match="`npu_timeout` is"):
        chunkrt.load("x", npu="qnn", npu_timeout=value)
