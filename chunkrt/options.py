"""How an engine runs a model: every choice, checked where it is made."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from chunkrt.backends import BACKENDS
from chunkrt.backends.qnn.options import HtpOptions
from chunkrt.backends.qnn.socs import find_soc
from chunkrt.errors import ConfigError, unknown_name
from chunkrt.quant.scheme import find_scheme
from chunkrt.runtime.policy import DEFAULT_POLICY, find_policy
from chunkrt.runtime.state import CacheDtype

NPU_CHOICES = ("auto", "qnn", *BACKENDS, "off")
DEFAULT_CHUNK_LENGTH = 32
MOST_THREADS = 256

OnNpuFailure = Literal["fallback", "fail"]
ON_NPU_FAILURE: tuple[OnNpuFailure, ...] = get_args(OnNpuFailure)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine runs a model.

    npu: who plays the NPU: "auto" (an NPU if there is one, else "native"), "qnn" (Qualcomm's NPU, emulated where there
        is none), "native", "onnxrt", "reference", or "off": the whole decoder is one subgraph on the CPU.
    chunk_length: tokens of a chunk, 1 to the context length; by default what an engine directory was compiled for
        (of several lengths 32, or else the longest), else 32.
    scheme: how linears are quantised; by default what an engine directory was compiled with, else "w8a16" on an NPU,
        else the catalogue's, else "w8a8-dynamic".
    policy: the order of tasks, by name; see `runtime/policy.py`. Results do not depend on it.
    chunks_in_flight: chunks that are under way at once, at least 1, each with buffers of its own; by default as many as
        help and fit into 64 MiB.
    threads: the budget for workers and kernel threads together; by default the processor's cores.
    context_length: positions a session can hold; by default the model's.
    cache_dtype: of keys and values; by default float16 on the native backend, float32 elsewhere.
    placement: a TOML file that places modules; see `graph/placement.py`.
    calibration: a file that `chunkrt calibrate` wrote, for static schemes; by default one is made from a text that
        comes with chunkrt.
    soc: the processor whose NPU is compiled for, such as "SM8650"; by default this machine's, and in emulation what an
        engine directory was compiled for.
    htp: settings of Qualcomm's NPU.
    on_npu_failure: "fallback" finishes on the CPU, with a warning; "fail" raises DeviceLostError. By default "fallback"
        for npu "auto", else "fail".
    """

    npu: str = "auto"
    chunk_length: int | None = None
    scheme: str | None = None
    policy: str = DEFAULT_POLICY
    chunks_in_flight: int | None = None
    threads: int | None = None
    context_length: int | None = None
    cache_dtype: CacheDtype | None = None
    placement: Path | None = None
    calibration: Path | None = None
    soc: str | None = None
    htp: HtpOptions = field(default_factory=HtpOptions)
    on_npu_failure: OnNpuFailure | None = None

    def __post_init__(self) -> None:
        if self.npu not in NPU_CHOICES:
            raise unknown_name("NPU choice", self.npu, NPU_CHOICES)
        if self.npu == "off" and self.placement is not None:
            raise ConfigError("a placement and npu 'off' contradict each other; give one of them")
        for name in ("chunk_length", "chunks_in_flight", "threads", "context_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}, expected at least 1")
        if self.threads is not None and self.threads > MOST_THREADS:
            raise ConfigError(f"threads is {self.threads}, expected at most {MOST_THREADS}")
        if self.on_npu_failure is not None and self.on_npu_failure not in ON_NPU_FAILURE:
            raise unknown_name("answer to an NPU's failure", self.on_npu_failure, ON_NPU_FAILURE)
        find_policy(self.policy)
        if self.scheme is not None:
            find_scheme(self.scheme)
        if self.soc is not None:
            find_soc(self.soc)

    @property
    def num_threads(self) -> int:
        """The thread budget."""
        return self.threads or available_cores()

    @property
    def falls_back(self) -> bool:
        """Whether the CPU takes over when the NPU fails."""
        return (self.on_npu_failure or ("fallback" if self.npu == "auto" else "fail")) == "fallback"


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
