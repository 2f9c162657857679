"""Tests of the x86-64 wheel for Windows under Wine: `make test-windows` runs this.

python tests/packaging/windows_tests.py [--short | PATH ...]

Debian's wine64 runs the C++ tests, and then CPython for Windows with the Python tests. Everything is in build/windows/,
with a Wine prefix of its own. `wine_gaps.py` lists the tests that Wine cannot run.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from windows_python import PLACE, SOURCE, python_for_windows
from windows_wheels import build

TAG = "311"
PREFIX, PYTHON = PLACE / "prefix", PLACE / "wine-python"
EXTRAS = ("compile", "test", "qnn", "plot", "serve", "structured")
PINNED = ("numpy==2.1.3",)  # later releases of NumPy need functions that Wine 8 lacks
SHORT_EXTRAS = ("compile", "test")
SHORT = (
    "tests/cli/test_encodings.py",
    "tests/engine/test_session_file.py",
    "tests/engine_directory",
    "tests/runtime/test_windows_processors.py",
    "tests/tokenizer/test_damaged_vocabularies.py",
    "tests/test_errors.py",
    "tests/test_files.py",
)
"""Tests of the parts that differ on Windows: files, locks, processors, code pages, and answers of the command line."""
SECONDS_FOR_OUTPUT = 10
"""Time for the output that is left when a program has ended."""
SERVER_TOO = {"WINEPREFIX": str(PREFIX), "WINEDEBUG": "-all", "WINEARCH": "win64", "DISPLAY": ""}


def main() -> None:
    wine = shutil.which("wine64") or shutil.which("/usr/lib/wine/wine64")
    server = shutil.which("wineserver64") or shutil.which("/usr/lib/wine/wineserver64")
    if wine is None or server is None:
        sys.exit("test-windows: wine64 is missing; on Debian: apt-get install wine64")
    arguments = sys.argv[1:]
    is_short = arguments[:1] == ["--short"]
    paths = list(SHORT) if is_short else arguments or ["tests"]
    make_python(build("x86_64", TAG), SHORT_EXTRAS if is_short else EXTRAS)
    with wine_server(wine, server):
        if is_short or not arguments:
            run_cpp_tests(wine, ("program",) if is_short else ("kernel", "program"))
        run_python_tests(wine, paths)


@contextmanager
def wine_server(wine: str, server: str) -> Iterator[None]:
    """Keep one server and one desktop for all processes. A server or desktop that a process starts would inherit the
    process's pipes, and a reader of these pipes would wait for their end forever.
    """
    environment = os.environ | SERVER_TOO
    PREFIX.mkdir(parents=True, exist_ok=True)
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([server, "-p"], env=environment, check=False, start_new_session=True, **quiet)  # it may run already
    try:
        if not (PREFIX / "system.reg").exists():
            subprocess.run([wine, "wineboot", "-i"], env=environment, check=True, timeout=600, **quiet)
        subprocess.Popen([wine, "explorer", "/desktop"], env=environment, start_new_session=True, **quiet)
        yield
    finally:
        subprocess.run([server, "-k"], env=environment, check=False, **quiet)  # it ends the desktop too


def make_python(wheel: Path, names: tuple[str, ...]) -> None:
    """Make a CPython with the wheel and the packages of these extras, unless there is one with more."""
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *(line for name in names for line in extras[name]), *PINNED]
    stamp = PYTHON / "requirements.txt"
    if not stamp.exists() or not set(requirements) <= set(stamp.read_text().splitlines()):
        shutil.rmtree(PYTHON, ignore_errors=True)
        shutil.copytree(python_for_windows(TAG), PYTHON)
        zig = [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-windows-gnu", "-O2", "-s", "-shared"]
        library = ["-o", PYTHON / "bcryptprimitives.dll", Path(__file__).with_name("bcryptprimitives.c")]
        cache = {"ZIG_GLOBAL_CACHE_DIR": str(PLACE / "zig")}
        subprocess.run([*zig, *library, "-ladvapi32"], env=os.environ | cache, check=True)
        install(*requirements)
        stamp.write_text("\n".join(requirements) + "\n")
    install("--no-deps", "--reinstall-package", "chunkrt", wheel)


def install(*what: str | Path) -> None:
    """Install Windows' wheels with uv, which evaluates the conditions of requirements for Windows."""
    uv = Path(sysconfig.get_path("scripts")) / "uv"
    platform = ["--python-platform", "x86_64-pc-windows-msvc", "--python-version", "3.11", "--only-binary", ":all:"]
    place = ["--target", PYTHON / "Lib" / "site-packages", "--link-mode", "copy"]
    subprocess.run([uv, "pip", "install", "--quiet", "--no-config", *platform, *place, *what], check=True)


def run_cpp_tests(wine: str, parts: tuple[str, ...]) -> None:
    folder = SOURCE / "build" / f"temp.win-amd64-{sys.implementation.cache_tag}" / "chunkrt._native"
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "ZIG_GLOBAL_CACHE_DIR": str(PLACE / "zig")}
    for name in (f"chunkrt_{part}_tests" for part in parts):
        subprocess.run(["cmake", "--build", folder, "--target", name], env=environment, check=True)
        run_in_wine(wine, str(folder / "csrc" / "tests" / f"{name}.exe"))


def run_python_tests(wine: str, paths: list[str]) -> None:
    results = PLACE / "results.xml"
    results.unlink(missing_ok=True)
    pytest = ["-P", "-m", "pytest", "-n", "2", "-m", "not slow", "-p", "wine_gaps"]
    python = str(PYTHON / "python.exe")
    status = run_in_wine(
        wine, python, *pytest, f"--junitxml={windows_path(results)}", "-p", "no:cacheprovider", *paths, check=False
    )
    if not results.exists():
        sys.exit(f"test-windows: pytest ended with status {status} before it wrote its results")
    print_counts(results)
    sys.exit(status)


def windows_path(path: Path) -> str:
    return "Z:" + str(path).replace("/", "\\")


def run_in_wine(wine: str, *command: str, check: bool = True) -> int:
    """Run a program of Windows, and print its output. Python starts in Wine only if its files are pipes.

    Wine's explorer, which a program starts if it asks for a desktop, inherits the pipe and survives the program. So the
    output ends with the program, not with the pipe.
    """
    environment = (
        os.environ
        | SERVER_TOO
        | {
            "PYTHONPATH": windows_path(Path(__file__).parent),
            "OPENBLAS_NUM_THREADS": "1",
        }
    )
    print(shlex.join(command), flush=True)
    process = subprocess.Popen(
        [wine, *command],
        env=environment,
        cwd=SOURCE,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    reader = threading.Thread(target=print_lines, args=(process.stdout,), daemon=True)
    reader.start()
    status = process.wait()
    reader.join(SECONDS_FOR_OUTPUT)
    if check and status != 0:
        sys.exit(f"test-windows: status {status}: {shlex.join(command)}")
    return status


def print_lines(lines: IO[str]) -> None:
    for line in lines:
        print(line, end="", flush=True)


def print_counts(results: Path) -> None:
    """Print the numbers of tests by folder and result, and the reasons of skipped tests."""
    counts: dict[str, Counter[str]] = {}
    reasons: Counter[str] = Counter()
    for case in ET.parse(results).getroot().iter("testcase"):
        folder = case.get("classname", "").split(".")[1] if "." in case.get("classname", "") else "?"
        skipped = case.find("skipped")
        is_failed = case.find("failure") is not None or case.find("error") is not None
        result = "failed" if is_failed else "passed" if skipped is None else "skipped"
        counts.setdefault(folder, Counter())[result] += 1
        if skipped is not None:
            reasons[skipped.get("message", "")] += 1
    print(f"\n{'folder':20} passed failed skipped")
    for folder, found in sorted(counts.items()):
        print(f"{folder:20} {found['passed']:6} {found['failed']:6} {found['skipped']:7}")
    for reason, count in reasons.most_common():
        print(f"{count:6} skipped: {reason}")


if __name__ == "__main__":
    main()
