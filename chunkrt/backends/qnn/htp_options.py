"""Settings of the NPU: Qualcomm's own options, validated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chunkrt.backends.qnn.library import library_version, provider_option_names
from chunkrt.errors import ConfigError, unknown_name

PERFORMANCE_MODES = (
    "burst",
    "sustained_high_performance",
    "high_performance",
    "balanced",
    "low_balanced",
    "high_power_saver",
    "power_saver",
    "low_power_saver",
    "extreme_power_saver",
    "default",
)


PROFILING_LEVELS = ("off", "basic", "detailed", "optrace")
CONTEXT_PRIORITIES = ("low", "normal", "normal_high", "high")
MOST_GRAPH_OPTIMIZATION = 3

PROVIDER_NAMES = {
    "performance_mode": "htp_performance_mode",
    "vtcm_mb": "vtcm_mb",
    "rpc_control_latency_us": "rpc_control_latency",
    "graph_optimization": "htp_graph_finalization_optimization_mode",
    "context_priority": "qnn_context_priority",
    "profiling_level": "profiling_level",
    "profiling_file": "profiling_file_path",
}
"""Names of settings in onnxruntime-qnn."""

SET_BY_CHUNKRT = {
    "soc_model": "name the SoC with `soc`",
    "htp_arch": "name the SoC with `soc`",
    "enable_block_quant_weight_optimization": "without it 4-bit weights are computed wrongly",
    "enable_htp_shared_memory_allocator": "buffers are in memory that CPU and NPU share, where this is possible",
    "ep.share_ep_contexts": "a context holds one subgraph and shares no weights with others",
    "offload_graph_io_quantization": "values enter and leave as float16",
}
"""Provider options that only chunkrt may set, with the reasons."""

NOT_FOUND = ("rpc_control_latency", "vtcm_mb")
"""Options that the search in the library does not find."""

_WHOLE_NUMBERS = ("vtcm_mb", "rpc_control_latency_us", "graph_optimization")


@dataclass(frozen=True, kw_only=True)
class HtpOptions:
    """Settings of the Hexagon Tensor Processor.

    performance_mode: clock and power mode, one of PERFORMANCE_MODES.
    vtcm_mb: vector tightly coupled memory that a graph may use, in MiB; by default all of the SoC's. Compiled in.
    rpc_control_latency_us: longest wait of a call into the NPU, in microseconds; by default the driver's setting.
    graph_optimization: optimisation level of the compiler, 0 to 3; by default the compiler's choice. Compiled in.
    context_priority: priority of contexts relative to those of other programs, one of CONTEXT_PRIORITIES; default:
    normal.
    profiling_level: the provider's measurements, one of PROFILING_LEVELS; needs profiling_file.
    profiling_file: the CSV file to which the provider appends its measurements; needs profiling_level.
    more: other options of the provider, as pairs of name and value, under the provider's names. Treated as compiled in.
    """

    performance_mode: str = "burst"
    vtcm_mb: int | None = None
    rpc_control_latency_us: int | None = None
    graph_optimization: int | None = None
    context_priority: str | None = None
    profiling_level: str | None = None
    profiling_file: str | None = None
    more: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for kind, value, known in (
            ("performance mode", self.performance_mode, PERFORMANCE_MODES),
            ("context priority", self.context_priority, CONTEXT_PRIORITIES),
            ("profiling level", self.profiling_level, PROFILING_LEVELS),
        ):
            if value is not None and value not in known:
                raise unknown_name(kind, value, known)
        for name in ("vtcm_mb", "rpc_control_latency_us"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}, expected at least 1")
        if self.graph_optimization is not None and not 0 <= self.graph_optimization <= MOST_GRAPH_OPTIMIZATION:
            raise ConfigError(
                f"graph_optimization is {self.graph_optimization}, expected 0 to {MOST_GRAPH_OPTIMIZATION}"
            )
        if (self.profiling_file is None) != (self.profiling_level in (None, "off")):
            raise ConfigError(
                "profiling_level and profiling_file need each other, e.g. profiling_level=basic and "
                "profiling_file=npu.csv"
            )
        if self.profiling_file is not None and not Path(self.profiling_file).absolute().parent.is_dir():
            raise ConfigError(f"profiling_file is {self.profiling_file}, whose folder does not exist")

    @property
    def compiled_in(self) -> dict[str, str]:
        """Options other than VTCM that affect contexts, by the provider's names; empty if none is set."""
        graph = {} if self.graph_optimization is None else {"graph_optimization": self.graph_optimization}
        return {PROVIDER_NAMES[name]: str(value) for name, value in graph.items()} | dict(sorted(self.more))

    @property
    def compiled_settings(self) -> dict[str, str]:
        """Settings that affect contexts, including VTCM, by the names that `parse` takes."""
        vtcm = {} if self.vtcm_mb is None else {PROVIDER_NAMES["vtcm_mb"]: str(self.vtcm_mb)}
        ours = {provider: name for name, provider in PROVIDER_NAMES.items()}
        return {ours.get(name, name): value for name, value in (vtcm | self.compiled_in).items()}

    def with_compiled(self, settings: Mapping[str, str]) -> HtpOptions:
        """Return these options, with settings of compiled contexts for those that are not set. Raise ConfigError for a
        setting that this version does not know.
        """
        added = [f"{name}={value}" for name, value in settings.items() if name not in self.compiled_settings]
        if not added:
            return self
        compiled = HtpOptions.parse(added)
        named = {name: getattr(compiled, name) for name in PROVIDER_NAMES if name in settings}
        return replace(self, more=(*self.more, *compiled.more), **{n: v for n, v in named.items() if v is not None})

    def check_known(self) -> None:
        """Raise ConfigError if the installed onnxruntime-qnn does not support an option, because its provider would
        ignore it.
        """
        known = (*provider_option_names(), *NOT_FOUND)
        for name in self.as_provider_options():
            if name not in known:
                raise unknown_name(f"option of onnxruntime-qnn {library_version()}", name, known)

    def as_provider_options(self, *, compiling: bool = False) -> dict[str, str]:
        """Return the options under onnxruntime-qnn's names; without profiling while compiling."""
        left_out = ("profiling_level", "profiling_file") if compiling else ()
        named = {name: getattr(self, name) for name in PROVIDER_NAMES if name not in left_out}
        return {PROVIDER_NAMES[name]: str(v) for name, v in named.items() if v is not None} | dict(self.more)

    @staticmethod
    def parse(settings: Sequence[str]) -> HtpOptions:
        """Read NAME=VALUE settings, as from a command line.

        A name is a field of this class, or an option of the installed onnxruntime-qnn. Unknown names are refused,
        because the provider would silently ignore them.

        Raises:
            ConfigError: a setting has no '=', an unknown name, or a value of the wrong kind.
        """
        ours = {provider: name for name, provider in PROVIDER_NAMES.items()}
        values: dict[str, Any] = {}
        more: dict[str, str] = {}
        for setting in settings:
            name, equals, value = setting.partition("=")
            name = ours.get(name, name)
            if not equals:
                names = ", ".join(PROVIDER_NAMES)
                raise ConfigError(f"{setting!r} is not a NAME=VALUE setting of the NPU; names: {names}")
            if name in SET_BY_CHUNKRT:
                raise ConfigError(f"chunkrt sets {name} itself: {SET_BY_CHUNKRT[name]}")
            if name not in PROVIDER_NAMES:
                if name not in (theirs := provider_option_names()):
                    raise unknown_name("NPU setting", name, dict.fromkeys((*PROVIDER_NAMES, *theirs)))
                more[name] = value
            elif name not in _WHOLE_NUMBERS:
                values[name] = value
            elif value.isdecimal():
                values[name] = int(value)
            else:
                raise ConfigError(f"{name} is {value!r}, expected a whole number")
        return HtpOptions(**values, more=tuple(more.items()))
