"""Sustained load: the same prompt again and again, while the device warms up and slows down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from chunkrt.errors import ConfigError
from chunkrt.simulate.profile import LEAST_CLOCK, DeviceProfile
from chunkrt.simulate.simulator import Simulation

STEPS = round(1 / LEAST_CLOCK)
"""Number of clocks between 0 and the full clock for which a prompt is simulated."""

NOTICED = 0.99
"""Share of the full rate below which a prompt counts as throttled."""

MOST_MINUTES = 1440
LEAST_CELSIUS, MOST_CELSIUS = -50.0, 120.0


@dataclass(frozen=True, kw_only=True)
class Sustained:
    """A prompt that is repeated without a pause.

    Attributes:
        num_prompts: number of complete prompts.
        first_tokens_per_s, last_tokens_per_s: rates of the first and the last prompt.
        tokens_per_s: mean rate.
        watts: mean power of the complete device.
        last_c: temperature at the end.
        throttled_after_s: start of the first prompt that ran at a lower clock; None if there is none.
    """

    seconds: float
    num_prompts: int
    first_tokens_per_s: float
    last_tokens_per_s: float
    tokens_per_s: float
    energy_joules: float
    watts: float
    first_c: float
    last_c: float
    throttled_after_s: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, for JSON."""
        return asdict(self)


def sustain(
    simulate: Callable[[DeviceProfile], Simulation], device: DeviceProfile, minutes: float, start_c: float | None = None
) -> Sustained:
    """Repeat a prompt for some minutes, but at least once.

    Clocks follow the temperature at the start of a prompt, and power is constant within a prompt. A throttled
    processor's power falls with the square of its clock.

    Args:
        simulate: simulates the prompt with a profile.
        device: the profile, which has to describe heat.
        minutes: duration; the last prompt may end later.
        start_c: temperature at the start, in degrees Celsius; by default that of the profile without load.

    Raises:
        ConfigError: the profile has no thermal figures; the minutes are not above 0.
    """
    thermal = device.thermal
    if thermal is None:
        raise ConfigError(
            f"{device.name} has no thermal figures ([thermal] in its profile), which --minutes needs; choose an SoC "
            f"with a software, e.g. {device.soc}+genie"
        )
    if not 0 < minutes <= MOST_MINUTES:
        raise ConfigError(f"--minutes is {minutes:g}, expected a number above 0 and up to {MOST_MINUTES}")

    if start_c is not None and not LEAST_CELSIUS <= start_c <= MOST_CELSIUS:
        raise ConfigError(
            f"--start-celsius is {start_c:g}, expected {LEAST_CELSIUS:g} to {MOST_CELSIUS:g} degrees Celsius"
        )

    @cache
    def at(npu: float, cpu: float) -> Simulation:
        slowed = replace(device, npu=device.npu.at(npu, npu, npu**2), cpu=device.cpu.at(cpu, cpu, cpu**2))
        return simulate(slowed)

    def clock(celsius: float, name: str) -> float:
        throttle = device.npu.throttle if name == "npu" else device.cpu.throttle
        return 1.0 if throttle is None else round(STEPS * throttle.clock(celsius)) / STEPS

    first_c = celsius = thermal.ambient_c if start_c is None else start_c
    seconds = joules = 0.0
    num_tokens = num_prompts = 0
    rates: list[float] = []
    throttled_after_s: float | None = None
    while not rates or seconds < 60 * minutes:
        clocks = clock(celsius, "npu"), clock(celsius, "cpu")
        one = at(*clocks)
        if one.energy_joules is None:
            raise ConfigError(f"{device.name} has no power figures for this run, which --minutes needs")
        if min(clocks) < 1 and throttled_after_s is None and one.tokens_per_s < NOTICED * at(1.0, 1.0).tokens_per_s:
            throttled_after_s = seconds
        duration = one.time_to_first_token_ms / 1000
        celsius = thermal.after(celsius, one.energy_joules / duration, duration)
        seconds, joules = seconds + duration, joules + one.energy_joules
        num_tokens, num_prompts = num_tokens + one.prompt_length, num_prompts + 1
        rates.append(one.tokens_per_s)
    return Sustained(
        seconds=seconds,
        num_prompts=num_prompts,
        first_tokens_per_s=rates[0],
        last_tokens_per_s=rates[-1],
        tokens_per_s=num_tokens / seconds,
        energy_joules=joules,
        watts=joules / seconds,
        first_c=first_c,
        last_c=celsius,
        throttled_after_s=throttled_after_s,
    )
