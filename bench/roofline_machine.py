"""The machine's own peaks and bandwidths, and chunkrt's kernels on it, measured by the program in bench/roofline/."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import click
from roofline_cases import KernelCase, kernel_cases
from roofline_work import Spread, attainable

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "roofline"

SAMPLE_SECONDS = 0.002
PEAK_ASKS, KERNEL_ASKS = 6, 3
"""Samples in each round: of a peak or a bandwidth, and of a kernel."""

READ_PIECE_BYTES = 65536
"""Bytes that one call of "read" reads."""

MIB = 1 << 20
LEAST_RING_BYTES, MOST_RING_BYTES = 256 * MIB, 2048 * MIB
USUAL_CACHES = {2: MIB, 3: 32 * MIB}

Level = Literal["L2", "L3", "memory"]


class Probe:
    """The running program: one request at a time. For use in a `with` statement."""

    def __init__(self, program: Path, ring_bytes: int) -> None:
        self._process = subprocess.Popen(
            [program, str(ring_bytes), str(SAMPLE_SECONDS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, line: str) -> dict[str, Any]:
        """Return the answer to one line; main.cc lists the requests."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            raise click.ClickException(f"the probe ended with status {process.wait()} at {line!r}")
        parsed: dict[str, Any] = json.loads(answer)
        return parsed

    def seconds(self, line: str) -> float:
        """Return the seconds of one call, on every thread."""
        answer = self.ask(line)
        return float(answer["seconds"]) / int(answer["calls"])

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._process.communicate()


def build_probe() -> Path:
    """Compile the program, with the flags of chunkrt's kernels."""
    if shutil.which("cmake") is None:
        raise click.ClickException("cmake is not on the PATH; `pip install cmake` installs it")
    options = ["-DCHUNKRT_BUILD_PYTHON=OFF", "-DCHUNKRT_BUILD_BENCH=ON"]
    for command in (
        ["cmake", "-S", str(ROOT), "-B", str(BUILD), *options],
        ["cmake", "--build", str(BUILD), "--target", "roofline_probe", "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise click.ClickException(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return BUILD / "bench" / "roofline" / "roofline_probe"


def caches() -> dict[int, int]:
    """Return bytes of each cache level from the second on, if the operating system reports them; else empty."""
    sizes: dict[int, int] = {}
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        level, size = int((index / "level").read_text()), (index / "size").read_text().strip()
        if level >= 2 and size.endswith("K"):
            sizes[level] = 1024 * int(size[:-1])
    return sizes


class Machine:
    """All measurements of the probe, round by round.

    Args:
        probe: the program.
        thread_counts: 1 and perhaps all.
        cache_bytes: by level.
        ring_bytes: size of the streamed weights.
    """

    def __init__(
        self, probe: Probe, thread_counts: Sequence[int], cache_bytes: dict[int, int], ring_bytes: int
    ) -> None:
        self._probe = probe
        self._about = probe.ask("about")
        self._caches, self._ring_bytes = cache_bytes, ring_bytes
        self._samples: dict[str, list[float]] = {}
        self.thread_counts = thread_counts
        kinds = {row["kind"] for row in self._about["peaks"]}
        self.cases = kernel_cases(ring_bytes, with_bfloat16="bfloat16" in kinds)

    @property
    def selected(self) -> dict[str, str]:
        """The instruction set that chunkrt selects, by kernel."""
        selected: dict[str, str] = self._about["selected"]
        return selected

    @property
    def levels(self) -> list[Level]:
        """Memory levels with known bandwidth, the nearest first."""
        found: list[Level] = []
        found += ["L2"] if 2 in self._caches else []
        found += ["L3"] if 3 in self._caches else []
        return [*found, "memory"]

    def measure(self) -> None:
        """Run one round: everything once, and peaks more often."""
        for threads in self.thread_counts:
            peaks = [f"peak {index} {threads}" for index in range(len(self._about["peaks"]))]
            reads = [self._read_line(level, threads) for level in self.levels]
            for line in (peaks + reads) * PEAK_ASKS:
                self._take(line)
            for case in self.cases * KERNEL_ASKS:
                self._take(f"{case.line} {threads}")

    def _take(self, line: str) -> None:
        self._samples.setdefault(line, []).append(self._probe.seconds(line))

    def _read_line(self, level: Level, threads: int) -> str:
        return f"read {self._read_bytes(level, threads)} {threads}"

    def _read_bytes(self, level: Level, threads: int) -> int:
        """Return the bytes of each thread: half of the cache; a second-level one belongs to a core, a third-level one
        to all.
        """
        sizes = {
            "L2": self._caches.get(2, 0) // 2,
            "L3": self._caches.get(3, 0) // (2 * threads),
            "memory": self._ring_bytes // threads,
        }
        return sizes[level] // READ_PIECE_BYTES * READ_PIECE_BYTES

    def peak_rows(self) -> list[dict[str, Any]]:
        """Return every loop: its description, and by number of threads the best rate in multiply-adds a second."""
        return [
            row
            | {
                "macs_per_s": {
                    str(t): t * row["work"] / min(self._samples[f"peak {index} {t}"]) for t in self.thread_counts
                }
            }
            for index, row in enumerate(self._about["peaks"])
        ]

    def peak(self, isa: str, kind: str, threads: int) -> float | None:
        """Return the best rate of an instruction set's loops, in multiply-adds a second; None if it has none."""
        rows = [row for row in self.peak_rows() if row["isa"] == isa and row["kind"] == kind]
        return max((row["macs_per_s"][str(threads)] for row in rows), default=None)

    def bandwidth(self, level: Level, threads: int) -> float:
        """Return the best bandwidth in bytes a second."""
        best = min(self._samples[self._read_line(level, threads)])
        return threads * READ_PIECE_BYTES / best

    def level_of(self, num_bytes: float) -> Level:
        """Return the nearest cache that holds `num_bytes`."""
        return next((x for x in self.levels if x == "memory" or num_bytes <= self._caches[int(x[1])]), "memory")

    def kernel_row(self, case: KernelCase, threads: int) -> dict[str, Any]:
        """Return rates of one case in its unit, all threads together, and the median's shares of peak and roofline."""
        samples = self._samples[f"{case.line} {threads}"]
        rate = Spread.of([threads * case.work / seconds / 1e9 for seconds in samples])
        level = self.level_of(case.walked_bytes)
        bandwidth = self.bandwidth(level, threads)
        isa = self.selected[case.kernel]
        macs = self.peak(isa, case.kind, threads) if case.kind else None
        peak = None if macs is None else macs * (2 if case.unit == "GFLOP/s" else 1)
        roof = attainable(peak or float("inf"), bandwidth, case.work, case.read_bytes)
        is_bounded = peak is not None or case.kind is None
        return {
            "kernel": case.kernel,
            "case": case.what,
            "isa": isa,
            "threads": threads,
            "unit": case.unit,
            "rate": rate._asdict(),
            "reads_from": level,
            "share_of_peak": None if peak is None else 1e9 * rate.median / peak,
            "share_of_roofline": 1e9 * rate.median / roof if is_bounded else None,
        }


def ring_bytes_for(cache_bytes: dict[int, int]) -> int:
    """Return four times the last cache, within limits."""
    return min(MOST_RING_BYTES, max(LEAST_RING_BYTES, 4 * max(cache_bytes.values())))
