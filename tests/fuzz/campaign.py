"""Fuzzing: `python tests/fuzz/campaign.py MINUTES [FORMAT ...]` mutates files for that time and counts the outcomes.

Each format has a process of its own, a few at a time. An execution must end within 10 seconds of CPU time (not wall
time, because the machine may be busy), raise only chunkrt's errors, and take no more memory than 10 times its file and
200 MB. Failing cases are kept under build/fuzz.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from random import Random

import psutil

TESTS = Path(__file__).parents[1]
FOUND = TESTS.parent / "build" / "fuzz"
MEMORY = Path("/dev/shm")
ROUNDS = 2
"""Number of turns of every format, so that failures of the last formats show up before the end."""
SECONDS = 10
START_SECONDS = 120
"""Seconds in which a process makes the sound files."""
MOST_WAITING = 20
"""Multiple of these seconds after which a process without CPU usage is killed, too."""
ROOM_BYTES = 200_000_000


def execute(format: str, seed: int, folder: Path) -> tuple[str, str]:
    """Make one file and use it. Return the outcome ("accepted", "refused", or the failure), and a report."""
    outcome, report = _execute(format, seed, folder)
    if outcome == "memory":  # perhaps initialisation of libraries; on a second use it is the file's
        shutil.rmtree(folder)
        folder.mkdir()
        outcome, report = _execute(format, seed, folder)
    return outcome, report


def _execute(format: str, seed: int, folder: Path) -> tuple[str, str]:
    from fuzz.targets import TARGETS

    from chunkrt.errors import ChunkrtError

    random = Random(seed)
    target = TARGETS[format]
    path = target.make(random, random.choice(target.seeds), folder)
    file_bytes = sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file())
    before = _peak_bytes(reset=True)
    begin = time.process_time()  # others may use the processor; `Campaign` ends processes that wait forever
    outcome, report = "accepted", ""
    try:
        target.use(path)
    except ChunkrtError as error:
        outcome = "refused"
        if "\n" in str(error).strip():
            outcome, report = "message of several lines", str(error)
    except Exception:
        outcome, report = "foreign exception", traceback.format_exc()
    if (seconds := time.process_time() - begin) > SECONDS:
        outcome, report = "hang", f"{seconds:.1f} s of CPU"
    if (taken := _peak_bytes() - before) > 10 * file_bytes + ROOM_BYTES:
        outcome, report = "memory", f"{taken / 1e6:.0f} MB for a file of {file_bytes} bytes"
    return outcome, report


def _peak_bytes(*, reset: bool = False) -> int:
    """Return the largest resident size since the last reset, or the current size; 0 if the system reports none."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


def run(format: str, begin: int, end: int, until: float) -> Counter[str]:
    """Execute seeds from `begin` up to `end`, until a time. Keep failing cases."""
    counts: Counter[str] = Counter()
    logging.disable()
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as scratch:
        for seed in range(begin, end):
            if time.monotonic() > until:
                break
            print(f"at {seed}", flush=True)
            folder = Path(scratch) / "case"
            folder.mkdir()
            with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outcome, report = execute(format, seed, folder)
            counts[outcome] += 1
            if report:
                keep = FOUND / format / f"{seed}-{outcome.replace(' ', '-')}"
                shutil.rmtree(keep, ignore_errors=True)
                shutil.copytree(folder, keep)
                (keep / "report.txt").write_text(report, "utf-8", "backslashreplace")
            shutil.rmtree(folder)
    return counts


def main() -> None:
    """Run every format for its share of the minutes; a process that dies or hangs is counted and restarted."""
    minutes, formats = float(sys.argv[1]), sys.argv[2:]
    from fuzz.targets import TARGETS

    from chunkrt.runtime.affinity import available_cpus

    formats = formats or list(TARGETS)
    jobs = len(available_cpus())
    waiting, running, totals = formats * ROUNDS, [], {format: Counter[str]() for format in formats}
    share = minutes * 60 * jobs / len(waiting)
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(Campaign(waiting.pop(0), share))
        time.sleep(0.2)
        for campaign in list(running):
            if campaign.poll(totals[campaign.format]):
                running.remove(campaign)
                if not totals[campaign.format]["accepted"]:
                    totals[campaign.format]["nothing accepted"] += 1  # then only the first check was tested
                print(f"{campaign.format:12} {dict(sorted(totals[campaign.format].items()))}", flush=True)
    found = sum((counts for counts in totals.values()), Counter[str]())
    print(f"{'all':12} {dict(sorted(found.items()))}")
    sys.exit(any(outcome not in ("accepted", "refused") for outcome in found))


class Campaign:
    """The process of one format, which is restarted after the case that ended it."""

    def __init__(self, format: str, seconds: float) -> None:
        self.format = format
        self._until = time.monotonic() + seconds
        self._next = int.from_bytes(os.urandom(4), "little") << 16
        self._start()

    def _start(self) -> None:
        left = max(0.0, self._until - time.monotonic())
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", self.format, str(self._next), str(left)], stdout=self._output
        )
        self._seen = (self._next, time.monotonic(), 0.0)

    def poll(self, totals: Counter[str]) -> bool:
        """Return True if the campaign has ended; count its process's results when it ends."""
        lines = self._lines()
        at = next((int(line[3:]) for line in reversed(lines) if line.startswith("at ")), self._next)
        is_over = self._process.poll() is not None
        used = 0.0 if is_over else self._cpu_seconds()
        if at != self._seen[0]:
            self._seen = (at, time.monotonic(), used)
        most = 2 * SECONDS if lines else START_SECONDS
        hangs = used - self._seen[2] > most or time.monotonic() - self._seen[1] > MOST_WAITING * most
        if not is_over and not hangs:
            return False
        if hangs:
            self._process.kill()
            self._process.wait()
        counted = [line for line in lines if line.startswith("counts ")]
        if counted and not hangs:
            pairs = (pair.rpartition("=") for pair in counted[-1].removeprefix("counts ").split(",") if pair)
            totals.update({name: int(number) for name, _, number in pairs})
            return True
        totals["refused or accepted before the end of a process"] += at - self._next
        totals["hang" if hangs else f"process ended with {self._process.returncode}"] += 1
        print(f"{self.format}: seed {at} ended its process", flush=True)
        self._next = at + 1
        if time.monotonic() >= self._until:
            return True
        self._start()
        return False

    def _cpu_seconds(self) -> float:
        """Return the CPU time of the process and its children."""
        try:
            times = psutil.Process(self._process.pid).cpu_times()
        except psutil.Error:  # it has just ended
            return 0.0
        return times.user + times.system + times.children_user + times.children_system

    def _lines(self) -> list[str]:
        self._output.seek(0)
        return self._output.read().splitlines()


def worker(format: str, begin: int, seconds: float) -> None:
    """Set the limits of a process of `main`."""
    os.environ.pop("LD_PRELOAD", None)  # chat templates run in processes with less memory than a sanitizer maps
    counts = run(format, begin, begin + 2**40, time.monotonic() + seconds)
    print("counts " + ",".join(f"{name}={count}" for name, count in counts.items()))


if __name__ == "__main__":
    sys.path[:0] = [str(TESTS), str(TESTS / "support")]
    if sys.argv[1] == "--worker":
        worker(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
    else:
        os.environ.setdefault("CHUNKRT_HOME", tempfile.mkdtemp(prefix="chunkrt-fuzz-home-"))
        main()
