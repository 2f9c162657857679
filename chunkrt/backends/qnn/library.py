"""Qualcomm's libraries: whether they are here, whether there is an NPU beneath them, and sessions on it.

`onnxruntime-qnn` is a plug-in of ONNX Runtime. On x86-64 its Hexagon library compiles for any Snapdragon and executes
with that processor's arithmetic in emulation; on Arm it talks to the NPU of the machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from chunkrt.backends.qnn.socs import SOCS, Soc
from chunkrt.errors import BackendUnavailableError, ConfigError

PACKAGE = "onnxruntime-qnn"
INSTALL = "pip install 'chunkrt[qnn]'"
PROVIDER = "QNNExecutionProvider"
EMULATING_MACHINES = ("x86_64", "amd64")
_OPTION = re.compile(
    rb"(?<=\0)(?:htp|qnn_context|enable|profiling|offload|skip|dump|op_packages|device)_?[a-z0-9_]+(?=\0)"
)
"""Of a string constant by which an option begins."""

LINUX_DEVICES = Path("/sys/devices")
LINUX_NPU_DEVICES = ("fastrpc-cdsp", "fastrpc-cdsp-secure", "adsprpc-smd")


@dataclass(frozen=True, kw_only=True)
class Htp:
    """The Hexagon Tensor Processor as ONNX Runtime offers it. `device` is what sessions are opened on.

    turn: held while it computes, for it computes one graph at a time.
    """

    version: str
    is_emulated: bool
    device: Any
    backend_path: str
    turn: threading.Lock = field(default_factory=threading.Lock)


def is_installed() -> bool:
    """Whether the plug-in is installed, without loading it."""
    return importlib.util.find_spec("onnxruntime_qnn") is not None


def library_version() -> str:
    """The installed plug-in's version. Raises BackendUnavailableError if there is none."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise BackendUnavailableError(
            f"the qnn backend needs {PACKAGE}, which is not installed; {INSTALL}, or use --npu auto"
        ) from error


@cache
def provider_option_names() -> tuple[str, ...]:
    """The options of the installed plug-in's provider, as they stand in its library; empty if it is not installed.

    It has no list of them to ask for. Names that compilers put into code, because they are short, are not found.
    """
    if not is_installed():
        return ()
    import onnxruntime_qnn

    found = _OPTION.findall(Path(onnxruntime_qnn.get_library_path()).read_bytes())
    return tuple(sorted({name.decode() for name in found}))


def this_soc() -> Soc | None:
    """The SoC of this machine, or None where NPUs are emulated.

    Raises:
        ConfigError: this is a machine with an NPU, and it does not say which.
    """
    if _is_emulating():
        return None
    described = " ".join(_descriptions())
    for soc in SOCS.values():
        if any(mark.lower() in described.lower() for mark in (soc.name, *soc.marks)):
            return soc
    raise ConfigError(
        f"cannot tell which SoC this machine has ({described or 'it says nothing'}); name it with --soc ("
        f"{', '.join(SOCS)}), or run with --npu native"
    )


def _descriptions() -> Iterator[str]:
    """What the operating system says of the processor: Linux's soc bus, Windows' registry by way of `platform`."""
    for path in sorted(LINUX_DEVICES.glob("soc[0-9]*/machine")):
        yield path.read_text(errors="replace").strip()
    if sys.platform == "win32":
        import winreg

        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0") as key:
            yield str(winreg.QueryValueEx(key, "ProcessorNameString")[0])


def has_npu() -> bool:
    """Whether this machine has a Hexagon NPU that the plug-in can reach."""
    if not is_installed() or _is_emulating():
        return False
    import onnxruntime as ort

    try:
        device = open_htp().device.device
    except BackendUnavailableError:
        return False
    # ONNX Runtime finds NPUs on Windows; on Linux the driver's device file tells.
    is_listed = bool(device.type == ort.OrtHardwareDeviceType.NPU)
    return is_listed or any(os.access(f"/dev/{name}", os.R_OK) for name in LINUX_NPU_DEVICES)


@cache
def open_htp() -> Htp:
    """Load the plug-in, once a process.

    Raises:
        BackendUnavailableError: it is not installed, or does not load.
    """
    version = library_version()
    import onnxruntime as ort
    import onnxruntime_qnn

    with _quiet_stdout():  # the library announces itself when it is loaded
        try:
            ctypes.CDLL(onnxruntime_qnn.get_qnn_htp_path())
            ort.register_execution_provider_library(PROVIDER, onnxruntime_qnn.get_library_path())
        except Exception as error:
            raise BackendUnavailableError(f"{PACKAGE} {version} does not load: {error}") from error
    devices = [device for device in ort.get_ep_devices() if device.ep_name == PROVIDER]
    if not devices:
        what = f"{PACKAGE} {version} finds no device that it can use on this {platform.machine()} machine"
        raise BackendUnavailableError(f"{what}: {_missing_driver()}; without an NPU: --npu native")
    is_npu = ort.OrtHardwareDeviceType.NPU
    device = min(devices, key=lambda d: d.device.type != is_npu)
    return Htp(
        version=version,
        is_emulated=_is_emulating(),
        device=device,
        backend_path=onnxruntime_qnn.get_qnn_htp_path(),
    )


def open_session(
    htp: Htp,
    soc: Soc,
    model: bytes | Path,
    *,
    options: Mapping[str, str],
    write_context: Path | None = None,
) -> Any:
    """An inference session of which every node runs on the NPU, or none is made.

    Args:
        model: an ONNX model, or the path of one; of a compiled context, its ONNX wrapper.
        options: further provider options.
        write_context: where the compiled context's wrapper shall be written; its binary goes beside it.

    Raises:
        Exception: ONNX Runtime's own, of many types.
    """
    import onnxruntime as ort

    settings = ort.SessionOptions()
    settings.intra_op_num_threads = 1  # no node is left to its own threads, which would be as many as the cores
    settings.log_severity_level = 4  # what matters is in the exception
    settings.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    if write_context is not None:
        settings.add_session_config_entry("ep.context_enable", "1")
        settings.add_session_config_entry("ep.context_embed_mode", "0")
        settings.add_session_config_entry("ep.context_file_path", str(write_context))
    target = {"soc_model": str(soc.soc_model), "htp_arch": str(soc.htp_arch)}
    # Without this the compiler turns blocks of 4-bit weights into float16 and says nothing.
    common = {"backend_path": htp.backend_path, "enable_block_quant_weight_optimization": "1"}
    settings.add_provider_for_devices([htp.device], {**common, **target, **options})
    return ort.InferenceSession(model if isinstance(model, bytes) else str(model), settings)


def _missing_driver() -> str:
    devices = [Path("/dev", name) for name in LINUX_NPU_DEVICES]
    if sys.platform != "linux":
        return "is the NPU's driver installed?"
    if there := [path for path in devices if path.exists()]:
        return f"may this user read {there[0]}?"
    return f"the vendor's kernel has a driver that makes {devices[0]}, and this one has not"


def _is_emulating() -> bool:
    return platform.machine().lower() in EMULATING_MACHINES


@contextlib.contextmanager
def _quiet_stdout() -> Iterator[None]:
    """Drop what a native library prints: stdout is for data."""
    if sys.stdout is not None:
        sys.stdout.flush()
    try:
        saved = os.dup(1)
    except OSError:  # there is no stdout
        yield
        return
    try:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
