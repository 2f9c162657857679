"""The qnn backend: static subgraphs on Qualcomm's Hexagon NPU through onnxruntime-qnn, or on its emulator."""

from chunkrt.backends.qnn.backend import CompiledFor, QnnBackend
from chunkrt.backends.qnn.htp_options import HtpOptions
from chunkrt.backends.qnn.library import (
    INSTALL,
    LINUX_NPU_DEVICES,
    PACKAGE,
    has_npu,
    is_emulating,
    is_installed,
    library_version,
    open_htp,
    this_soc,
)
from chunkrt.backends.qnn.socs import SOCS, Soc, find_soc

__all__ = [
    "INSTALL",
    "LINUX_NPU_DEVICES",
    "PACKAGE",
    "SOCS",
    "CompiledFor",
    "HtpOptions",
    "QnnBackend",
    "Soc",
    "find_soc",
    "has_npu",
    "is_emulating",
    "is_installed",
    "library_version",
    "open_htp",
    "this_soc",
]
