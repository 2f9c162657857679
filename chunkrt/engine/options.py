"""How an engine runs a model: every choice, checked where it is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Literal, TypeGuard, get_args

from chunkrt.backends import BACKENDS, PLUGINS
from chunkrt.backends.qnn.options import HtpOptions
from chunkrt.backends.qnn.socs import find_soc
from chunkrt.backends.switches import Switches
from chunkrt.errors import ConfigError, unknown_name
from chunkrt.graph.placement import Placement, check_placement
from chunkrt.quant.scheme import find_scheme
from chunkrt.runtime.affinity import NO_AFFINITY, available_cpus, check_affinity, find_cpus
from chunkrt.runtime.chunk_slots import check_chunks_in_flight
from chunkrt.runtime.policy import DEFAULT_POLICY, find_policy
from chunkrt.runtime.state_tensors import CACHE_DTYPES, CacheDtype

NPU_CHOICES = ("auto", "qnn", *BACKENDS, "off")
DEFAULT_CHUNK_LENGTH = 32
"""With an NPU."""
CPU_CHUNK_LENGTH = 128
"""Without one: a processor reads weights once for all rows of a chunk, and pads none."""
DEFAULT_CONTEXT_KEEP = 4
MOST_THREADS = 256

Outputs = Literal["grid", "float"]
OUTPUTS: tuple[Outputs, ...] = get_args(Outputs)
OnNpuFailure = Literal["fallback", "fail"]
ON_NPU_FAILURE: tuple[OnNpuFailure, ...] = get_args(OnNpuFailure)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine runs a model.

    npu: who plays the NPU: "auto" (an NPU if there is one, else "native"), "qnn" (Qualcomm's NPU, emulated where there
        is none), "native", "onnxrt", "reference", a plug-in's name, or "off": the whole decoder is one subgraph on the
        CPU.
    ops: which operators run in the form of their backend or of a plug-in, and which in the reference's: "all", "none",
        "+name", "-name", several with commas between or as several texts; see `backends/switches.py`. By default "all",
        and "none" for npu "reference".
    chunk_length: tokens of a chunk, 1 to the context length; by default what an engine directory was compiled for
        (of several lengths 32, or else the longest), else 32 with an NPU and up to 128 without one.
    scheme: how linears are quantised; by default what an engine directory was compiled with, else the catalogue's or
        "w8a8-dynamic"; "w8a16" on an NPU that does not have those.
    policy: the order of tasks, by name; see `runtime/policy.py`. Results do not depend on it.
    chunks_in_flight: chunks that are under way at once, 1 to 256, each with buffers of its own; by default as many as
        help and fit into 64 MiB.
    threads: the budget for workers and kernel threads together; by default as many as the CPUs of `affinity`, or the
        processor's cores.
    affinity: the CPUs that the threads run on: "none" (the system chooses), "big" (the fast cores), or a list such as
        "0,2,4-7". Only on Linux.
    context_length: positions a session can hold; by default the model's.
    context_shift: whether tokens may outgrow the context: then the oldest half of them is dropped, except for the first
        `context_keep`, and the others move down. Keys are then cached before RoPE, which costs time at every use. By
        default a prompt that does not fit is refused, and a generation ends.
    context_keep: the first tokens, which a shift leaves where they are; 0 to the context length less 2.
    cache_dtype: of keys and values; by default float16 on the native backend, float32 elsewhere. The native backend has
        int8 as well, with a scale for each position of a head.
    placement: devices by patterns of module paths, or a TOML file of them; see `graph/placement.py`.
    calibration: a file that `chunkrt calibrate` wrote, for static schemes; by default one is made from a text that
        comes with chunkrt.
    shadow: which linears of 8 bits get a shadow (`quant/scheme.py`): "none", "all", "auto" (the fewest that keep the
        loss within the budget), or patterns of weight names with commas between. By default "none"; scheme "mixed"
        chooses by itself.
    budget: of "auto" and of scheme "mixed": the most mean KL divergence from the float model, in nats; by default
        0.015 and 0.01.
    outputs: what static linears give: "grid", as many bits as they take, which is Hexagon's rule; or "float". By
        default "float" for scheme "w8a8" where that can be run, else "grid".
    equalisation: how much of the unevenness of activations moves into the weights, 0 to 1, or "off"; by default the
        scheme's.
    rotation: whether the residual stream is rotated before static schemes quantise.
    soc: the processor whose NPU is compiled for, such as "SM8650"; by default this machine's, and in emulation what an
        engine directory was compiled for.
    htp: settings of Qualcomm's NPU.
    on_npu_failure: "fallback" finishes on the CPU, with a warning; "fail" raises DeviceLostError. By default "fallback"
        for npu "auto", else "fail".
    """

    npu: str = "auto"
    ops: str | tuple[str, ...] | None = None
    chunk_length: int | None = None
    scheme: str | None = None
    policy: str = DEFAULT_POLICY
    chunks_in_flight: int | None = None
    threads: int | None = None
    affinity: str = NO_AFFINITY
    context_length: int | None = None
    context_shift: bool = False
    context_keep: int = DEFAULT_CONTEXT_KEEP
    cache_dtype: CacheDtype | None = None
    placement: Path | Placement | None = None
    calibration: Path | None = None
    shadow: str | None = None
    budget: float | None = None
    outputs: Outputs | None = None
    equalisation: float | Literal["off"] | None = None
    rotation: bool = False
    soc: str | None = None
    htp: HtpOptions = field(default_factory=HtpOptions)
    on_npu_failure: OnNpuFailure | None = None

    def __post_init__(self) -> None:
        always = ("npu", "policy", "affinity")
        for name in (*always, "scheme", "cache_dtype", "shadow", "outputs", "soc", "on_npu_failure"):
            value = getattr(self, name)
            if not (isinstance(value, str) or (value is None and name not in always)):
                raise ConfigError(f"{name} is {value!r}, expected text")
        if PLUGINS.find(self.npu) is None and self.npu not in NPU_CHOICES:
            raise unknown_name("NPU choice", self.npu, npu_choices())
        if self.npu == "off" and self.placement is not None:
            raise ConfigError("a placement and npu 'off' contradict each other; give one of them")
        for name in ("chunk_length", "chunks_in_flight", "threads", "context_length"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
                raise ConfigError(f"{name} is {value!r}, expected a whole number")
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}, expected at least 1")
        if self.chunks_in_flight is not None:
            check_chunks_in_flight(self.chunks_in_flight)
        if self.placement is not None and not isinstance(self.placement, Path):
            check_placement(self.placement, "placement")
        if self.calibration is not None and not isinstance(self.calibration, Path):
            raise ConfigError(f"calibration is {self.calibration!r}, expected a pathlib.Path")
        if not isinstance(self.htp, HtpOptions):
            raise ConfigError(f"htp is {self.htp!r}, expected HtpOptions")
        if self.cache_dtype is not None and self.cache_dtype not in CACHE_DTYPES:
            raise unknown_name("type of the cache", self.cache_dtype, CACHE_DTYPES)
        if self.cache_dtype == "int8" and self.npu in BACKENDS and self.npu != "native":
            raise ConfigError(f"npu {self.npu!r} has no caches of int8; choose float32 or float16, or another npu")
        if self.threads is not None and self.threads > MOST_THREADS:
            raise ConfigError(f"threads is {self.threads}, expected at most {MOST_THREADS}")
        if self.on_npu_failure is not None and self.on_npu_failure not in ON_NPU_FAILURE:
            raise unknown_name("answer to an NPU's failure", self.on_npu_failure, ON_NPU_FAILURE)
        if self.outputs is not None and self.outputs not in OUTPUTS:
            raise unknown_name("kind of outputs", self.outputs, OUTPUTS)
        for name in ("rotation", "context_shift"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}, expected true or false")
        if isinstance(self.context_keep, bool) or not isinstance(self.context_keep, Integral) or self.context_keep < 0:
            raise ConfigError(f"context_keep is {self.context_keep!r}, expected a whole number, 0 or more")
        if self.budget is not None and not (_is_number(self.budget) and self.budget > 0):
            raise ConfigError(f"budget is {self.budget!r}, expected a number of nats above 0")
        if self.equalisation not in (None, "off") and not (
            _is_number(self.equalisation) and 0 <= self.equalisation <= 1
        ):
            raise ConfigError(f"equalisation is {self.equalisation!r}, expected 0 to 1, or 'off'")
        Switches.parse(self.ops)
        check_affinity(self.affinity)
        find_policy(self.policy)
        if self.scheme is not None:
            find_scheme(self.scheme)
        if self.soc is not None:
            find_soc(self.soc)

    @property
    def num_threads(self) -> int:
        """The thread budget. Raises ConfigError as `find_cpus` does."""
        return self.threads or len(find_cpus(self.affinity) or available_cpus())

    @property
    def falls_back(self) -> bool:
        """Whether the CPU takes over when the NPU fails."""
        return (self.on_npu_failure or ("fallback" if self.npu == "auto" else "fail")) == "fallback"


def npu_choices() -> tuple[str, ...]:
    """Who can play the NPU, plug-ins too."""
    return (*NPU_CHOICES, *PLUGINS.names)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def available_cores() -> int:
    """Cores that this process may use."""
    return len(available_cpus())
