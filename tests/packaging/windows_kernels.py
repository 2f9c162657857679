"""Comparison of the Arm kernels' code for Windows with that for Linux, both by the same Clang.

`make wheel-windows` runs this after the wheels. An emulator can run the kernels for Linux, but not those for Windows.
Their code may only differ by the conventions of the system: each function must have the same number of vector
instructions, up to `TOLERANCE`. A larger difference shows an option that one of the compilers did not receive.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from windows_python import PLACE, SOURCE

BUILD = SOURCE / "build" / f"temp.win-arm64-{sys.implementation.cache_tag}" / "chunkrt._native"
TARGETS = {"Windows": "aarch64-windows-gnu", "Linux": "aarch64-linux-gnu"}
ENVIRONMENT = os.environ | {
    "PATH": f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}",
    "ZIG_GLOBAL_CACHE_DIR": str(PLACE / "zig"),
}
TOLERANCE = 4
"""Instructions of a function: a few loads and stores of registers differ, because Windows reserves the register x18."""
FUNCTION = re.compile(r'"?(_Z[^"]*?)"?:')
INSTRUCTION = re.compile(r"\t[a-z]")
VECTOR = re.compile(r"\b[vq]\d+\b")


def main() -> None:
    if not BUILD.exists():
        sys.exit("windows_kernels.py: the kernels for Windows on Arm are not built yet; run windows_wheels.py aarch64")
    listed = run("ninja", "-C", BUILD, "--quiet", "-t", "compdb")
    commands = {entry["file"]: entry["command"] for entry in json.loads(listed) if "/neon" in entry["file"]}
    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        windows, linux = (
            list(compilers.map(code_of_functions, commands.values(), [target] * len(commands)))
            for target in TARGETS.values()
        )
    num_functions = num_equal = num_here = num_there = 0
    for file, here, there in zip(commands, windows, linux, strict=True):
        if not here or here.keys() != there.keys():
            sys.exit(f"windows_kernels.py: {file}: functions differ: {', '.join(here.keys() ^ there.keys())}")
        for function in here:
            vectors, expected = (count_vectors(code[function]) for code in (here, there))
            if abs(vectors - expected) > TOLERANCE:
                sys.exit(
                    f"windows_kernels.py: {file}: {function} has {vectors} vector instructions for Windows, "
                    f"and {expected} for Linux"
                )
            num_functions += 1
            num_equal += vectors == expected
            num_here += len(here[function])
            num_there += len(there[function])
    print(
        f"Arm kernels: {num_functions} functions, {num_here:,} instructions for Windows, {num_there:,} for Linux; "
        f"{num_equal} functions have as many vector instructions, the others differ by at most {TOLERANCE}"
    )


def code_of_functions(command: str, target: str) -> dict[str, list[str]]:
    """Compile a file for a target, and return the instructions of each function."""
    words = [target if word == TARGETS["Windows"] else word for word in shlex.split(command)]
    for option in ("-o", "-MT", "-MF"):
        at = words.index(option)
        del words[at : at + 2]
    words = [word for word in words if word not in ("-c", "-MD", "-Werror")]  # Zig adds an unused one
    functions: dict[str, list[str]] = {}
    with TemporaryDirectory() as folder:
        assembly = Path(folder) / "code.s"
        run(*words, "-S", "-o", assembly)
        code = assembly.read_text(errors="replace")
    for line in code.splitlines():
        if label := FUNCTION.match(line):
            lines = functions[label[1]] = []
        elif functions and INSTRUCTION.match(line):
            lines.append(line)
    plain = run("c++filt", stdin="\n".join(functions)).splitlines()
    # Types of 64 bits are long long on Windows, and long on Linux.
    names = (re.sub(r"(\d)ull\b", r"\1ul", name.replace("long long", "long")) for name in plain)
    return dict(zip(names, functions.values(), strict=True))


def count_vectors(instructions: list[str]) -> int:
    return sum(bool(VECTOR.search(instruction)) for instruction in instructions)


def run(*command: str | Path, stdin: str = "") -> str:
    done = subprocess.run(command, cwd=BUILD, env=ENVIRONMENT, input=stdin, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"windows_kernels.py: status {done.returncode}: {shlex.join(map(str, command))}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
