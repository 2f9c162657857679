"""Report of a measurement: a table in Markdown, every sample in JSON, bars in a picture."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from peers.rounds import Results, spread


@dataclass(kw_only=True)
class Report:
    """A measurement and its circumstances.

    conditions: of the run and the machine, in the order of the report.
    baselines: the contenders (chunkrt's) whose rate is divided by each other's.
    about: versions and settings of each contender that runs.
    absent: contenders that could not be measured at all, and why.
    measure: name of the figures.
    agreement: for each contender, the prompts after which its most likely token is the first baseline's; or why not.
    """

    conditions: dict[str, Any]
    baselines: Sequence[str]
    about: Mapping[str, Mapping[str, Any]]
    absent: Mapping[str, str]
    agreement: Mapping[str, str]
    results: Results
    measure: str = "tokens/s"


def describe_machine() -> dict[str, str]:
    """Return processor, cores, memory and operating system."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": f"{psutil.cpu_count(logical=False)} ({os.cpu_count()} hardware threads)",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def to_markdown(report: Report) -> str:
    """Return the complete report as Markdown."""
    lines = [f"- {key}: {value}" for key, value in report.conditions.items()]
    lines += ["", "Median (least - most) of the rounds. Ratios: within a round, likewise.", ""]
    heads = ["test", "contender", report.measure, *(f"{name} / this" for name in report.baselines)]
    lines += [_row(heads), _row(["---", "---", *["---:"] * (len(heads) - 2)])]
    for test, by_name in report.results.rates.items():
        for name in by_name:
            rate = _spread_text(report.results.spread(test, name), 4)
            ratios = [_spread_text(spread(report.results.ratios(test, of, name)), 3) for of in report.baselines]
            lines.append(_row([test, name, rate, *ratios]))
    shares = {name: report.results.shares(name) for name in report.about}
    if loaded := list(next(iter(shares.values()), {})):
        lines += ["", "Share of a rate that remains next to busy processes:", "", _row(["contender", *loaded])]
        lines += [_row(["---", *["---:"] * len(loaded)])]
        lines += [
            _row([name, *(_spread_text(spread(found[test]), 3) for test in loaded)]) for name, found in shares.items()
        ]
    lines += ["", _row(["contender", "versions", "settings", "same next token as the first"]), _row(["---"] * 4)]
    for name, about in report.about.items():
        versions = ", ".join(f"{package} {number}" for package, number in about["versions"].items())
        lines.append(_row([name, versions, about["settings"], report.agreement.get(name, "not asked")]))
    problems = [f"- {name} is absent: {reason}" for name, reason in report.absent.items()]
    for test, failures in report.results.failures.items():
        problems += [f"- {name} failed in {test}: {reason}" for name, reason in failures.items()]
    return "\n".join([*lines, *(["", *problems] if problems else [])])


def to_json(report: Report) -> str:
    """Return the complete report with every sample."""
    return json.dumps(asdict(report), indent=2)


def plot(report: Report, path: Path) -> None:
    """Draw bars of median rates with minimum and maximum, one picture a test, side by side. Needs matplotlib."""
    from matplotlib.figure import Figure

    tests = list(report.results.rates)
    figure = Figure(figsize=(4 * len(tests) + 2, 1.5 + 0.35 * len(report.about)), layout="constrained")
    axes = figure.subplots(1, len(tests), sharey=True, squeeze=False)[0]
    for axis, test in zip(axes, tests, strict=True):
        names = list(report.results.rates[test])
        for place, name in enumerate(names):
            if found := report.results.spread(test, name):
                median, least, most = found
                error = [[median - least], [most - median]]
                axis.barh(place, median, xerr=error, color="C0" if name in report.baselines else "C7")
        axis.set_yticks(range(len(names)), names)
        axis.set_title(test)
        axis.set_xlabel("tokens/s")
    axes[0].invert_yaxis()
    figure.suptitle(f"{report.conditions['processor']}, {report.conditions['threads']} threads")
    part = path.with_name(f"part-{path.name}")
    figure.savefig(part)
    part.replace(path)


def _spread_text(found: tuple[float, float, float] | None, digits: int) -> str:
    if found is None:
        return "-"
    median, least, most = (_number(value, digits) for value in found)
    return f"{median} ({least} - {most})"


def _number(value: float, digits: int) -> str:
    """Format with this many significant digits, but with every one before the point."""
    return f"{value:.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits - len(f'{value:.0f}')}f}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
