"""Qualcomm's libraries: errors if they are missing, the SoC of this machine, and a clean stdout."""

import importlib.metadata
import importlib.util
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from chunkrt.backends.qnn import INSTALL, library
from chunkrt.errors import BackendUnavailableError, ConfigError

COMPILE = """
import sys
from pathlib import Path
from chunkrt.backends.qnn import QnnBackend, find_soc
from chunkrt.quant.scheme import SCHEMES
from chunkrt.testing.random_decoders import CONFIG_IN_BLOCKS, random_decoder
scheme = SCHEMES["w8a16"]
decoder = random_decoder([scheme], CONFIG_IN_BLOCKS)
backend = QnnBackend(find_soc("SM8650"), contexts=Path(sys.argv[1]))
backend.compile(decoder.plan.static_subgraphs[0], decoder.plan, 8, scheme, decoder.weights["w8a16"])
assert backend.num_compiled == 1
print("the end")
"""


@pytest.fixture
def on_arm(monkeypatch, tmp_path):
    """Return a function that simulates an Arm machine with the given SoC name."""
    monkeypatch.setattr(library.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(library, "LINUX_DEVICES", tmp_path)
    monkeypatch.setattr(sys, "platform", "linux")

    def describe(machine):
        (tmp_path / "soc0").mkdir()
        (tmp_path / "soc0" / "machine").write_text(f"{machine}\n")

    return describe


@pytest.fixture
def on_windows(monkeypatch):
    """Return a function that simulates a Windows machine on Arm with the given processor name."""

    def describe(processor):
        winreg = SimpleNamespace(
            HKEY_LOCAL_MACHINE=0,
            OpenKey=lambda root, path: nullcontext(),
            QueryValueEx=lambda key, name: (processor, 1) if name == "ProcessorNameString" else None,
        )
        monkeypatch.setitem(sys.modules, "winreg", winreg)
        monkeypatch.setattr(library.platform, "machine", lambda: "ARM64")
        monkeypatch.setattr(sys, "platform", "win32")

    return describe


def test_stdout_is_for_data(tmp_path):
    """The library prints to stdout, which is a pipe here: its buffered output must not appear later either."""
    pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn is not installed")
    if library.this_soc() is not None:
        pytest.skip("this machine has an NPU, and a compiler for that NPU alone")
    run = [sys.executable, "-P", "-c", COMPILE, str(tmp_path)]
    finished = subprocess.run(run, capture_output=True, text=True, check=True)
    assert finished.stdout == "the end\n"
    assert finished.stderr == ""


def test_missing_package_is_named_with_the_install_command(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailableError, match="needs onnxruntime-qnn, which is not installed") as raised:
        library.open_htp.__wrapped__()
    assert INSTALL in str(raised.value)
    assert not library.is_installed()
    assert not library.has_npu()


def test_package_that_does_not_load_reports_why(monkeypatch):
    pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn is not installed")
    import onnxruntime_qnn

    monkeypatch.setattr(onnxruntime_qnn, "get_qnn_htp_path", lambda: "/nowhere/libQnnHtp.so")
    with pytest.raises(BackendUnavailableError, match=r"onnxruntime-qnn [\d.]+ does not load: .*nowhere.libQnnHtp"):
        library.open_htp.__wrapped__()


@pytest.mark.skipif(sys.platform == "win32", reason="the error names device files of Linux")
def test_machine_without_the_device_reports_the_missing_part(monkeypatch, tmp_path):
    ort = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn is not installed")
    monkeypatch.setattr(library.sys, "platform", "linux")
    monkeypatch.setattr(ort, "register_execution_provider_library", lambda name, path: None)
    monkeypatch.setattr(ort, "get_ep_devices", list)
    with pytest.raises(BackendUnavailableError, match=r"driver, which provides /dev/fastrpc-cdsp; .*native'`$"):
        library.open_htp.__wrapped__()
    (tmp_path / "adsp").touch()
    monkeypatch.setattr(library, "LINUX_NPU_DEVICES", ("cdsp", str(tmp_path / "adsp")))
    with pytest.raises(
        BackendUnavailableError, match=r"does this user have read access to .*adsp\?; without an NPU: `npu='native'`$"
    ):
        library.open_htp.__wrapped__()


def test_emulating_machine_is_no_soc(monkeypatch):
    for machine in ("x86_64", "AMD64"):
        monkeypatch.setattr(library.platform, "machine", lambda name=machine: name)
        assert library.this_soc() is None
        assert not library.has_npu()


@pytest.mark.parametrize(
    ("machine", "name"), [("SM8650", "SM8650"), ("SM8550P", "SM8550"), ("X1E80100", "SC8380XP"), ("QCS9075", "QCS9100")]
)
def test_soc_of_linux(on_arm, machine, name):
    on_arm(machine)
    found = library.this_soc()
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    ("processor", "name"),
    [
        ("Snapdragon(R) X Elite - X1E80100 - Qualcomm(R) Oryon(TM) CPU", "SC8380XP"),
        ("Snapdragon(R) X Plus - X1P42100 - Qualcomm(R) Oryon(TM) CPU", "SC8380XP"),
        ("Snapdragon(R) X 12-core X1P64100 @ 3.40 GHz", "SC8380XP"),
        ("Snapdragon(R) X - X126100 - Qualcomm(R) Oryon(TM) CPU", "SC8380XP"),
        ("Snapdragon(R) X2 Elite - X2E80100 - Qualcomm(R) Oryon(TM) CPU", "SC8480XP"),
    ],
)
def test_soc_of_windows(on_windows, processor, name):
    on_windows(processor)
    found = library.this_soc()
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("machine", ["Raspberry Pi 5", "SM8250", None])
def test_unknown_soc_must_be_named(on_arm, machine):
    if machine:
        on_arm(machine)
    says = machine or "the system reports no name"
    expected = rf"cannot determine the SoC of this machine \({says}\); name it with `soc` \(.*SM8650.*"
    with pytest.raises(ConfigError, match=expected):
        library.this_soc()


@pytest.mark.parametrize(
    ("kind", "device", "expected"), [("CPU", "cdsp", True), ("CPU", "none", False), ("NPU", "none", True)]
)
def test_has_npu_if_driver_or_onnx_runtime_lists_it(monkeypatch, on_arm, tmp_path, kind, device, expected):
    import onnxruntime as ort

    (tmp_path / "cdsp").touch()

    listed = SimpleNamespace(device=SimpleNamespace(type=getattr(ort.OrtHardwareDeviceType, kind)))
    monkeypatch.setattr(library, "open_htp", lambda: SimpleNamespace(device=listed))
    monkeypatch.setattr(library, "is_installed", lambda: True)
    monkeypatch.setattr(library, "LINUX_NPU_DEVICES", (str(tmp_path / device),))
    assert library.has_npu() is expected


def test_library_that_does_not_load_is_no_npu(monkeypatch, on_arm):
    def unavailable():
        raise BackendUnavailableError("it does not load")

    monkeypatch.setattr(library, "open_htp", unavailable)
    monkeypatch.setattr(library, "is_installed", lambda: True)
    assert not library.has_npu()
