"""Memory that CPU and NPU share, with a stand-in for the driver that counts the bytes it copies.

The library allocates shared memory from a fake `libcdsprpc.so`. Graphs run in the emulator, which cannot map shared
memory: the fake driver copies inputs to it and outputs from it.
"""

import ctypes
import json
import logging
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from calibrated import calibrated
from fixture_checkpoints import checkpoint

import chunkrt
from chunkrt.backends import qnn
from chunkrt.backends.qnn.library import open_session
from chunkrt.backends.qnn.session_buffers import SHARED_MEMORY_OPTION
from chunkrt.errors import DeviceLostError

pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn, which emulates the NPU, is not installed")
if not qnn.open_htp().is_emulated:
    pytest.skip("this machine has an NPU, and a compiler for that NPU alone", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("own_home")

NAME, CHUNK, CONTEXT = "llama_gqa", 32, 96
ATTENTION = {"attention": "npu", "npu_window": str(CONTEXT)}


@pytest.fixture(scope="module")
def rpcmem(tmp_path_factory):
    """The fake library, loaded under the name by which onnxruntime-qnn looks for it."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("this machine has no C compiler")
    path = tmp_path_factory.mktemp("rpcmem") / "libcdsprpc.so"
    source = Path(__file__).parents[1] / "support" / "fake_rpcmem.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wl,-soname,libcdsprpc.so", "-o", path, source], check=True)
    library = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    library.fake_is_shared.argtypes = [ctypes.c_void_p]
    return library


class Driver:
    """Sessions whose runs copy all inputs and outputs that are not in shared memory, and count the bytes."""

    def __init__(self, rpcmem):
        self.rpcmem = rpcmem
        self.num_copied = self.num_runs = self.num_shared = 0
        self.refuses = ""
        """Part that fails with shared memory: "open", "run", or none; "all" fails without shared memory too."""

    def open(self, htp, soc, model, *, options, **more):
        if "write_context" in more:
            return open_session(htp, soc, model, options=options, **more)
        if self.refuses == "all":
            raise RuntimeError("no DSP")
        if SHARED_MEMORY_OPTION in options and self.refuses == "open":
            raise RuntimeError("Unable to load RPCMem library: libcdsprpc.so")
        plain = {name: value for name, value in options.items() if name != SHARED_MEMORY_OPTION}
        allocating = open_session(htp, soc, model, options=options, **more)
        computing = open_session(htp, soc, model, options=plain, **more)
        return CopyingSession(self, allocating, computing, is_sharing=plain != options)


class CopyingSession:
    def __init__(self, driver, allocating, computing, *, is_sharing):
        self._driver, self._computing, self._is_sharing = driver, computing, is_sharing
        self._sess = allocating._sess

    def io_binding(self):
        return Binding()

    def run_with_iobinding(self, binding):
        if self._is_sharing and self._driver.refuses == "run":
            raise RuntimeError("memRegister() failed")
        self._driver.num_runs += 1
        inputs = {name: self._reached(value) for name, value in binding.inputs.items()}
        results = self._computing.run(list(binding.outputs), inputs)
        for value, result in zip(binding.outputs.values(), results, strict=True):
            self._reached(value)[...] = result

    def _reached(self, value):
        is_int8 = value.data_type() == "tensor(int8)"
        elements = ctypes.cast(value.data_ptr(), ctypes.POINTER(ctypes.c_int8 if is_int8 else ctypes.c_uint16))
        array = np.ctypeslib.as_array(elements, tuple(value.shape())).view(np.int8 if is_int8 else np.float16)
        if self._driver.rpcmem.fake_is_shared(value.data_ptr()):
            self._driver.num_shared += array.nbytes
        else:
            self._driver.num_copied += array.nbytes
        return array


class Binding:
    def __init__(self):
        self.inputs, self.outputs = {}, {}

    def bind_ortvalue_input(self, name, value):
        self.inputs[name] = value

    def bind_ortvalue_output(self, name, value):
        self.outputs[name] = value


@pytest.fixture
def driver(rpcmem, monkeypatch):
    """A device, with the fake driver."""
    made = Driver(rpcmem)
    htp = replace(qnn.open_htp(), is_emulated=False)
    monkeypatch.setattr("chunkrt.backends.qnn.backend.open_htp", lambda: htp)
    monkeypatch.setattr("chunkrt.backends.qnn.backend.open_session", made.open)
    return made


@pytest.fixture(scope="module")
def calibration(tmp_path_factory):
    path = tmp_path_factory.mktemp("calibration") / "tiny.npz"
    calibrated(NAME, path, prompt(CONTEXT))
    return path


def prompt(num_tokens):
    return np.random.default_rng(0).integers(0, 48, num_tokens)


def load(calibration, **options):
    wanted = {"npu": "qnn", "scheme": "w8a16", "chunk_length": CHUNK, "context_length": CONTEXT, "threads": 1}
    return chunkrt.load(checkpoint(NAME), **(wanted | {"calibration": calibration, "prefix_cache": "off"} | options))


def answers(engine):
    session = engine.session()
    return session.prefill(prompt(2 * CHUNK + 3), logits="all").logits, session.prefill([5]).logits


INT8 = {**ATTENTION, "cache_dtype": "int8"}


@pytest.mark.parametrize("options", [{}, ATTENTION, INT8, {**ATTENTION, "decode_on": "npu"}], ids=str)
def test_shared_buffers_are_not_copied_and_hold_the_same_values(calibration, driver, caplog, monkeypatch, options):
    with load(calibration, **options) as engine:
        driver.num_runs = 0
        found = answers(engine)
    assert driver.num_runs > 0
    assert driver.num_copied == 0 < driver.num_shared
    assert not [message for message in caplog.messages if "share" in message]
    monkeypatch.undo()
    with load(calibration, **options) as engine:
        for one, other in zip(found, answers(engine), strict=True):
            np.testing.assert_array_equal(one, other)


def copied_by_plan(command, calibration, *others):
    arguments = ("plan", checkpoint(NAME), "--npu", "qnn", "--scheme", "w8a16", "--calibration", calibration)
    arguments += ("--attention", "npu", "--npu-window", str(CONTEXT), "--context", str(CONTEXT), "--chunk", str(CHUNK))
    figures = json.loads(command(*arguments, *others, "--json").out)["subgraphs"]
    return sum(of_subgraph["driver_bytes"] for of_subgraph in figures)


@pytest.mark.parametrize(
    ("refuses", "options", "flags"),
    [("open", ATTENTION, ()), ("run", ATTENTION, ()), ("open", INT8, ("--cache-type", "q8_0"))],
    ids=["open", "run", "int8"],
)
def test_driver_copies_the_bytes_of_the_plan_without_shared_memory(
    calibration, driver, command, caplog, refuses, options, flags
):
    driver.refuses = refuses
    with load(calibration, decode_on="npu", **options) as engine, caplog.at_level(logging.INFO):
        driver.num_copied = driver.num_runs = 0
        session = engine.session()
        session.prefill(prompt(2 * CHUNK))
        assert driver.num_runs == 2
        per_chunk = driver.num_copied / 2
        session.prefill([5])
        assert driver.num_runs == 3
        assert driver.num_copied == 3 * per_chunk
        assert per_chunk == copied_by_plan(command, calibration, *flags)
        assert driver.num_shared == 0
    (told,) = [message for message in caplog.messages if "share" in message]
    assert told.startswith("CPU and NPU share no memory (")
    assert told.endswith("; the driver copies all inputs and outputs of each run")


def test_memory_is_shared_again_after_a_failure_of_the_npu(calibration, driver, caplog):
    with load(calibration) as engine:
        backend = engine.loaded.npu_backend
        driver.refuses = "all"
        with pytest.raises(DeviceLostError, match="no DSP"):
            backend.restore()
        driver.refuses = ""
        backend.restore()
        driver.num_runs = driver.num_copied = 0
        engine.session().prefill(prompt(CHUNK))
        assert driver.num_runs > 0
        assert driver.num_copied == 0
    assert not [message for message in caplog.messages if "share" in message]


def test_emulator_gets_ordinary_buffers(calibration, driver, monkeypatch):
    monkeypatch.setattr("chunkrt.backends.qnn.backend.open_htp", qnn.open_htp)
    with load(calibration) as engine:
        answers(engine)
    assert driver.num_shared == 0 < driver.num_copied
