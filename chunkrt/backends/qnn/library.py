"""Qualcomm's libraries: detection of the packages and of an NPU, and sessions on the NPU.

`onnxruntime-qnn` is a plug-in of ONNX Runtime. On x86-64 its Hexagon library compiles for any Snapdragon and emulates
that processor's arithmetic; on Arm it communicates with the NPU of the machine.
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from chunkrt.backends.qnn.socs import SOCS, Soc
from chunkrt.backends.qnn.timed_calls import TimedCalls
from chunkrt.errors import BackendUnavailableError, ConfigError

PACKAGE = "onnxruntime-qnn"
INSTALL = 'pip install "chunkrt[qnn]"'
PROVIDER = "QNNExecutionProvider"
EMULATING_MACHINES = ("x86_64", "amd64")
_OPTION = re.compile(
    rb"(?<=\0)(?:htp|qnn_context|enable|profiling|offload|skip|dump|op_packages|device)_?[a-z0-9_]+(?=\0)"
)
"""Prefix of the string constants that name options in the library."""

LINUX_DEVICES = Path("/sys/devices")
LINUX_NPU_DEVICES = ("fastrpc-cdsp", "fastrpc-cdsp-secure", "adsprpc-smd")


@dataclass(frozen=True, kw_only=True)
class Htp:
    """The Hexagon Tensor Processor as ONNX Runtime lists it.

    Attributes:
        device: the device on which sessions are opened.
        calls: the thread that calls the processor, because it computes one graph at a time.
    """

    version: str
    is_emulated: bool
    device: Any
    backend_path: str
    calls: TimedCalls = field(default_factory=TimedCalls)


def is_installed() -> bool:
    """Return whether the plug-in is installed, without loading it."""
    return importlib.util.find_spec("onnxruntime_qnn") is not None


def library_version() -> str:
    """Return the installed plug-in's version. Raises BackendUnavailableError if it is not installed."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise BackendUnavailableError(
            f"the qnn backend needs {PACKAGE}, which is not installed; {INSTALL}, or use `npu='auto'`"
        ) from error


@cache
def provider_option_names() -> tuple[str, ...]:
    """Return the options of the installed plug-in's provider, read from its library; empty if it is not installed.

    The plug-in has no function that lists its options. Short names, which compilers store within instructions, are not
    found.
    """
    if not is_installed():
        return ()
    import onnxruntime_qnn

    found = _OPTION.findall(Path(onnxruntime_qnn.get_library_path()).read_bytes())
    return tuple(sorted({name.decode() for name in found}))


def this_soc() -> Soc | None:
    """Return the SoC of this machine, or None if NPUs are emulated here.

    Raises:
        ConfigError: this machine has an NPU, and its operating system does not report a known SoC.
    """
    if is_emulating():
        return None
    described = " ".join(_descriptions())
    for soc in SOCS.values():
        if any(mark.lower() in described.lower() for mark in (soc.name, *soc.marks)):
            return soc
    raise ConfigError(
        f"cannot determine the SoC of this machine ({described or 'the system reports no name'}); name it with `soc` ("
        f"{', '.join(SOCS)}), or run with `npu='native'`"
    )


def _descriptions() -> Iterator[str]:
    """Yield the operating system's names for the processor, from Linux's soc bus or Windows' registry."""
    for path in sorted(LINUX_DEVICES.glob("soc[0-9]*/machine")):
        yield path.read_text(errors="replace").strip()
    if sys.platform == "win32":
        import winreg

        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0") as key:
            yield str(winreg.QueryValueEx(key, "ProcessorNameString")[0])


def has_npu() -> bool:
    """Return whether this machine has a Hexagon NPU that the plug-in can reach."""
    if not is_installed() or is_emulating():
        return False
    import onnxruntime as ort

    try:
        device = open_htp().device.device
    except BackendUnavailableError:
        return False
    # ONNX Runtime finds NPUs on Windows; on Linux the driver's device file shows one.
    is_listed = bool(device.type == ort.OrtHardwareDeviceType.NPU)
    return is_listed or any(os.access(Path("/dev", name), os.R_OK) for name in LINUX_NPU_DEVICES)


@cache
def open_htp() -> Htp:
    """Load the plug-in once per process, and return the processor.

    Raises:
        BackendUnavailableError: it is not installed, or does not load.
    """
    version = library_version()
    import onnxruntime as ort
    import onnxruntime_qnn

    with _quiet_stdout():  # the library prints a banner when it is loaded
        try:
            ctypes.CDLL(onnxruntime_qnn.get_qnn_htp_path())
            ort.register_execution_provider_library(PROVIDER, onnxruntime_qnn.get_library_path())
        except Exception as error:
            raise BackendUnavailableError(f"{PACKAGE} {version} does not load: {error}") from error
    devices = [device for device in ort.get_ep_devices() if device.ep_name == PROVIDER]
    if not devices:
        what = f"{PACKAGE} {version} finds no usable device on this {platform.machine()} machine"
        raise BackendUnavailableError(f"{what}: {_missing_driver()}; without an NPU: `npu='native'`")
    is_npu = ort.OrtHardwareDeviceType.NPU
    device = min(devices, key=lambda d: d.device.type != is_npu)
    return Htp(
        version=version,
        is_emulated=is_emulating(),
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
    """Open an inference session that runs all nodes on the NPU; it fails if a node is not supported.

    Args:
        model: an ONNX model, or the path of one; for a compiled context, its ONNX wrapper.
        options: further provider options.
        write_context: path for the compiled context's wrapper; its binary goes next to it.

    Raises:
        Exception: ONNX Runtime's own, of many types.
    """
    import onnxruntime as ort

    settings = ort.SessionOptions()
    settings.intra_op_num_threads = 1  # all nodes run on the NPU, and the default is a thread per core
    settings.log_severity_level = 4  # the exception has the relevant message
    settings.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    if write_context is not None:
        settings.add_session_config_entry("ep.context_enable", "1")
        settings.add_session_config_entry("ep.context_embed_mode", "0")
        settings.add_session_config_entry("ep.context_file_path", str(write_context))
    target = {"soc_model": str(soc.soc_model), "htp_arch": str(soc.htp_arch)}
    # Without this option the compiler silently turns blocks of 4-bit weights into float16.
    common = {"backend_path": htp.backend_path, "enable_block_quant_weight_optimization": "1"}
    settings.add_provider_for_devices([htp.device], {**common, **target, **options})
    return ort.InferenceSession(model if isinstance(model, bytes) else str(model), settings)


def _missing_driver() -> str:
    devices = [Path("/dev", name) for name in LINUX_NPU_DEVICES]
    if sys.platform != "linux":
        return "is the NPU's driver installed?"
    if there := [path for path in devices if path.exists()]:
        return f"does this user have read access to {there[0]}?"
    return f"this kernel lacks the vendor's driver, which provides {devices[0]}"


def is_emulating() -> bool:
    """Return True if the library emulates NPUs on this machine."""
    return platform.machine().lower() in EMULATING_MACHINES


@contextlib.contextmanager
def _quiet_stdout() -> Iterator[None]:
    """Discard the output of a native library: stdout is for data."""
    if sys.stdout is not None:
        sys.stdout.flush()
    try:
        saved = os.dup(1)
    except OSError:  # stdout is missing
        yield
        return
    try:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
