"""How the NPU shall run: Qualcomm's own switches, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, kw_only=True)
class HtpOptions:
    """Settings of the Hexagon Tensor Processor.

    performance_mode: clocks and votes, one of PERFORMANCE_MODES.
    vtcm_mb: vector tightly coupled memory that a graph may use, in MiB; by default all that the SoC has. Compiled in.
    rpc_control_latency_us: the longest wait of a call into the NPU, in microseconds; by default the driver's.
    """

    performance_mode: str = "burst"
    vtcm_mb: int | None = None
    rpc_control_latency_us: int | None = None

    def __post_init__(self) -> None:
        if self.performance_mode not in PERFORMANCE_MODES:
            raise unknown_name("performance mode", self.performance_mode, PERFORMANCE_MODES)
        for name in ("vtcm_mb", "rpc_control_latency_us"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}, expected at least 1")

    def as_provider_options(self) -> dict[str, str]:
        """In onnxruntime-qnn's words."""
        named = {"vtcm_mb": self.vtcm_mb, "rpc_control_latency": self.rpc_control_latency_us}
        return {
            "htp_performance_mode": self.performance_mode,
            **{name: str(value) for name, value in named.items() if value is not None},
        }

    @staticmethod
    def parse(settings: Sequence[str]) -> HtpOptions:
        """Read NAME=VALUE settings, as from a command line.

        Raises:
            ConfigError: a setting has no '=', an unknown name, or a value of the wrong kind.
        """
        known = HtpOptions.__dataclass_fields__
        values: dict[str, Any] = {}
        for setting in settings:
            name, equals, value = setting.partition("=")
            if not equals:
                raise ConfigError(f"{setting!r} is no NAME=VALUE setting of the NPU; names: {', '.join(known)}")
            if name not in known:
                raise unknown_name("NPU setting", name, known)
            if name == "performance_mode":
                values[name] = value
            elif value.isdecimal():
                values[name] = int(value)
            else:
                raise ConfigError(f"{name} is {value!r}, expected a whole number")
        return HtpOptions(**values)
