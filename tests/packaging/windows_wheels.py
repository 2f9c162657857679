"""Wheels for Windows on x86-64 and 64-bit Arm, without Windows: `make wheel-windows` runs this.

python tests/packaging/windows_wheels.py [x86_64|aarch64] [311 312 ...]

Clang of the package ziglang compiles them. The module in each wheel is inspected: its processor, the libraries that it
imports, and the instruction sets that its code contains.
"""

import email
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections import Counter
from pathlib import Path

import iced_x86
import pefile
from windows_python import SOURCE, TAGS, headers, import_library

PLATFORMS = {"x86_64": "win-amd64", "aarch64": "win-arm64"}
MACHINES = {"x86_64": pefile.MACHINE_TYPE["IMAGE_FILE_MACHINE_AMD64"], "aarch64": 0xAA64}
SYSTEM = re.compile(r"(api-ms-win-crt-[a-z]+-l\d-\d-\d|kernel32|ntdll|advapi32|ws2_32)\.dll", re.IGNORECASE)
INSTRUCTIONS = {
    "x86_64": {"AVX2", "FMA", "F16C", "AVX_VNNI", "AVX512F", "AVX512_VNNI", "AVX512_BF16"},
    "aarch64": {"dotprod", "i8mm", "bf16"},
}
ARM_ENCODINGS = {
    "dotprod": ((0xBFE0FC00, 0x0E809400), (0xBFC0F400, 0x0F80E000)),  # sdot: of vectors, by element
    "i8mm": ((0xFFE0FC00, 0x4E80A400),),  # smmla
    "bf16": ((0xFFE0FC00, 0x6E40EC00),),  # bfmmla
}
"""Masks and values of instructions. Source: Arm Architecture Reference Manual for A-profile, C7.2."""


def main() -> None:
    machines = [word for word in sys.argv[1:] if word in PLATFORMS] or list(PLATFORMS)
    tags = [word for word in sys.argv[1:] if word in TAGS] or list(TAGS)
    if unknown := set(sys.argv[1:]) - PLATFORMS.keys() - set(TAGS):
        sys.exit(f"windows_wheels.py: unknown: {', '.join(unknown)}; there are {', '.join([*PLATFORMS, *TAGS])}")
    for machine in machines:
        for tag in tags:
            print(inspect(build(machine, tag), machine, tag), flush=True)


def build(machine: str, tag: str) -> Path:
    """Return a wheel in dist/. The Pythons of one machine share the folder of compiled kernels."""
    options = [
        "--toolchain",
        str(SOURCE / "cmake" / "windows-zig.cmake"),
        f"-DCHUNKRT_WINDOWS_MACHINE={machine}",
        "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON",
        f"-DPython_INCLUDE_DIR={headers(tag)}",
        f"-DPython_LIBRARY={import_library(tag, machine)}",
        f"-DPYBIND11_PYTHON_EXECUTABLE_LAST={sys.executable}",  # pybind11 forgets the others if it changes
        "-DPYTHON_IS_DEBUG=0",  # all three, or pybind11 runs this machine's Python
        "-DPYTHON_MODULE_DEBUG_POSTFIX=",
        f"-DPYTHON_MODULE_EXTENSION=.cp{tag}-{PLATFORMS[machine].replace('-', '_')}.pyd",
    ]
    place = SOURCE / "build" / "windows" / "wheels"
    shutil.rmtree(place, ignore_errors=True)
    for left in (SOURCE / "build").glob(f"lib*{PLATFORMS[machine]}*"):
        shutil.rmtree(left)
    environment = os.environ | {
        "PATH": f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}",
        "ZIG_GLOBAL_CACHE_DIR": str(SOURCE / "build" / "windows" / "zig"),
        "_PYTHON_HOST_PLATFORM": PLATFORMS[machine],
        "CMAKE_ARGS": shlex.join(options),
    }
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-build-isolation", "--no-deps"]
    done = subprocess.run([*pip, "--wheel-dir", place, SOURCE], env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)
    (built,) = place.glob("*.whl")
    tags = [f"--python-tag=cp{tag}", f"--abi-tag=cp{tag}", f"--platform-tag={PLATFORMS[machine].replace('-', '_')}"]
    command = [sys.executable, "-m", "wheel", "tags", *tags, built]
    named = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]
    (SOURCE / "dist").mkdir(exist_ok=True)
    return Path(shutil.copy(place / named, SOURCE / "dist" / named))


def inspect(wheel: Path, machine: str, tag: str) -> str:
    """Return a line that describes the wheel. Exit if a part of the wheel is wrong."""
    platform = PLATFORMS[machine].replace("-", "_")
    module_name = f"chunkrt/_native.cp{tag}-{platform}.pyd"
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        module = files.read(module_name)
        (metadata,) = (name for name in names if name.endswith(".dist-info/WHEEL"))
        tags = email.message_from_bytes(files.read(metadata)).get_all("Tag")
    require(tags == [f"cp{tag}-cp{tag}-{platform}"], f"{wheel.name} has the tags {tags}")
    binaries = [name for name in names if Path(name).suffix in (".pyd", ".pdb", ".lib", ".dll", ".so", ".exe")]
    require(binaries == [module_name], f"{wheel.name} contains {', '.join(binaries)}")
    for suffix in ("METADATA", "RECORD", "entry_points.txt", "licenses/LICENSE"):
        require(any(name.endswith(f".dist-info/{suffix}") for name in names), f"{wheel.name} lacks {suffix}")
    for data in ("chunkrt/models/smollm2-135m-instruct.toml", "chunkrt/_native.pyi"):
        require(data in names, f"{wheel.name} lacks {data}")

    image = pefile.PE(data=module, fast_load=False)
    require(image.FILE_HEADER.Machine == MACHINES[machine], f"{module_name} is for {image.FILE_HEADER.Machine:#x}")
    exported = [symbol.name for symbol in image.DIRECTORY_ENTRY_EXPORT.symbols]
    require(b"PyInit__native" in exported, f"{module_name} does not export PyInit__native")
    libraries = {entry.dll.decode() for entry in image.DIRECTORY_ENTRY_IMPORT}
    foreign = {name for name in libraries if not SYSTEM.fullmatch(name)}
    require(foreign == {f"python{tag}.dll"}, f"{module_name} imports from {', '.join(sorted(foreign))}")
    (code,) = (section.get_data() for section in image.sections if section.Name.rstrip(b"\0") == b".text")
    found = x86_instruction_sets(code) if machine == "x86_64" else arm_instruction_sets(code)
    missing = {name for name in INSTRUCTIONS[machine] if not found[name]}
    require(not missing, f"{module_name} has no instructions of {', '.join(sorted(missing))}")
    counts = ", ".join(f"{found[name]:,} {name}" for name in sorted(INSTRUCTIONS[machine]))
    return f"{wheel.name}: {len(module) / 1e6:.1f} MB of code and data; {counts}"


def require(condition: bool, problem: str) -> None:
    if not condition:
        sys.exit(f"windows_wheels.py: {problem}")


def x86_instruction_sets(code: bytes) -> Counter[str]:
    """Count the instructions that need each feature of the processor."""
    names = {value: name for name, value in vars(iced_x86.CpuidFeature).items() if name in INSTRUCTIONS["x86_64"]}
    found: Counter[str] = Counter()
    for instruction in iced_x86.Decoder(64, code):
        found.update(names[feature] for feature in instruction.cpuid_features() if feature in names)
    return found


def arm_instruction_sets(code: bytes) -> Counter[str]:
    words = memoryview(code[: len(code) // 4 * 4]).cast("I")
    return Counter(
        name
        for word in words
        for name, encodings in ARM_ENCODINGS.items()
        if any(word & mask == value for mask, value in encodings)
    )


if __name__ == "__main__":
    main()
