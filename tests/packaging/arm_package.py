"""Test of the package on 64-bit Arm Linux without an Arm machine: `make test-arm-package` runs this.

Debian's Python for arm64 is unpacked (not installed, and the kernel needs no support for it), the wheel is
cross-compiled, the other wheels are PyPI's for aarch64, and qemu runs Python. The answers are compared with this
machine's.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import debian_packages

from chunkrt.checkpoints import catalogue

SOURCE = Path(__file__).resolve().parents[2]
PLACE = SOURCE / "build" / "arm-package"
ROOT, SITE, HOME = PLACE / "root", PLACE / "site", PLACE / "home"
ARM_PYTHON = ROOT / "usr" / "bin" / "python3"
ANSWER = Path(__file__).with_name("answer.py")
TINY = SOURCE / "tests" / "parity" / "fixtures" / "llama_biased_gguf" / "model.gguf"
NAME = "smollm2-135m-instruct"
QUESTION = ("-p", "Why is the sky blue?", "-n", "6", "--json", "--prefix-cache", "off")
SUITE, VERSION = "bookworm", (3, 11)
PACKAGES = ("python3.11-minimal", "libpython3.11-stdlib", "libpython3.11-dev", "libstdc++6")
TOOLS = {"aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu", "qemu-aarch64-static": "qemu-user-static"}
PLATFORMS = [f"manylinux_2_{minor}_aarch64" for minor in range(17, 37)] + ["manylinux2014_aarch64"]  # 2.36: bookworm's
PROCESSORS = {"max": "neon_i8mm", "cortex-a76": "neon_dotprod", "cortex-a57": "neon"}
CPUINFO = """processor\t: {}
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x4
CPU part\t: 0xd0b
CPU revision\t: 1

"""


def main() -> None:
    missing = [f"{tool} ({package})" for tool, package in TOOLS.items() if shutil.which(tool) is None]
    missing += debian_packages.missing_tools()
    if missing:
        sys.exit(f"test-arm-package: missing: {', '.join(missing)}; it needs Debian's packages")
    if sys.version_info[:2] != VERSION:
        sys.exit(
            "test-arm-package: the wheel is built for Debian 12's Python: make clean, then make PYTHON=python3.11 ..."
        )
    make_root()
    install_dependencies()
    install(build_wheel())
    check_answers()
    check_model()
    check_engine_directory()


def make_root() -> None:
    """Unpack Debian's Python for arm64 with its dependencies, and make it callable from here."""
    if ARM_PYTHON.exists():
        return
    debian_packages.unpack(PACKAGES, SUITE, "arm64", PLACE, with_dependencies=True)

    # Python's own header includes the architecture's next to the system's, which are not the cross compiler's
    (ROOT / "usr/include/python3.11/aarch64-linux-gnu").symlink_to("../aarch64-linux-gnu")
    # qemu exposes this machine's files; ONNX Runtime's library identifies the processor by them, and crashes
    (ROOT / "proc").mkdir()
    (ROOT / "proc" / "cpuinfo").write_text("".join(CPUINFO.format(index) for index in range(os.cpu_count() or 1)))
    packages = ROOT / "usr/local/lib/python3.11/dist-packages"
    packages.parent.mkdir(parents=True, exist_ok=True)
    packages.symlink_to(SITE)
    # A script, so that Python can start itself again: the kernel could not execute
    emulated = shlex.join(["qemu-aarch64-static", "-L", str(ROOT), "-0", str(ARM_PYTHON), f"{ROOT}/usr/bin/python3.11"])
    ARM_PYTHON.write_text(f'#!/bin/sh\nexec {emulated} "$@"\n')
    ARM_PYTHON.chmod(0o755)


def install_dependencies() -> None:
    """Install the package's requirements, with the NPU's library, from PyPI's wheels for aarch64."""
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *extras["compile"], extras["qnn"][0].split(";")[0]]
    stamp = PLACE / "requirements.txt"
    if stamp.exists() and stamp.read_text().splitlines() == requirements:
        return
    shutil.rmtree(SITE, ignore_errors=True)
    install(*requirements)
    stamp.write_text("\n".join(requirements) + "\n")


def install(*what: str | Path) -> None:
    """Install wheels for aarch64 into the root's Python, with this machine's pip."""
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--upgrade"]
    one = ["--no-deps"] if isinstance(what[0], Path) else []
    run(*pip, *one, "--target", SITE, "--python-version", "3.11", "--only-binary", ":all:", *platforms, *what)


def build_wheel() -> Path:
    """Cross-compile it, and have auditwheel determine the required system version."""
    for folder in ("wheel", "repaired"):
        shutil.rmtree(PLACE / folder, ignore_errors=True)
    options = [
        "--toolchain",
        str(SOURCE / "cmake" / "aarch64-linux-gnu.cmake"),
        f"-DPython_INCLUDE_DIR={ROOT}/usr/include/python3.11",
        "-DPYTHON_IS_DEBUG=0",  # all three, or pybind11 runs this machine's Python
        "-DPYTHON_MODULE_DEBUG_POSTFIX=",
        "-DPYTHON_MODULE_EXTENSION=.cpython-311-aarch64-linux-gnu.so",
    ]
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "_PYTHON_HOST_PLATFORM": "linux-aarch64", "CMAKE_ARGS": shlex.join(options)}
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "wheel"]
    for left in (SOURCE / "build").glob("lib*aarch64*"):
        shutil.rmtree(left)
    run(*pip, "--no-build-isolation", "--no-deps", "--wheel-dir", PLACE / "wheel", SOURCE, **environment)
    (built,) = (PLACE / "wheel").glob("*.whl")
    run("auditwheel", "repair", "--wheel-dir", PLACE / "repaired", built, **environment)
    (repaired,) = (PLACE / "repaired").glob("*.whl")
    print(repaired.name)
    return repaired


def check_answers() -> None:
    """Compare bits on the kernels of three processors with this machine's."""
    expected = json.loads(run(sys.executable, "-P", ANSWER))
    for processor, kernels in PROCESSORS.items():
        found = json.loads(run(ARM_PYTHON, "-P", ANSWER, QEMU_CPU=processor))
        assert found["machine"] == "aarch64"
        assert kernels in found["kernels"], found
        for what in ("text", "logits"):
            assert found[what] == expected[what], (processor, found, expected)
        print(f"{processor}: {', '.join(found['kernels'])}: the bits of {', '.join(expected['kernels'])}")


def check_model() -> None:
    """Check that `doctor` succeeds, and that a real model gives this machine's answer."""
    print(chunkrt(ARM_PYTHON, "doctor"))
    pulled = catalogue.pulled(catalogue.find(NAME))
    assert pulled is not None, f"chunkrt pull {NAME} first"
    place = HOME / "models" / NAME / pulled.name
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.exists():
        place.symlink_to(pulled)
    here, there = (json.loads(chunkrt(python, "run", NAME, *QUESTION)) for python in (sys.executable, ARM_PYTHON))
    assert there["text"] == here["text"], (there, here)
    print(f"{NAME}: {there['text']!r}")


def check_engine_directory() -> None:
    """Check an engine directory compiled here for a board: it loads there, except for the missing NPU."""
    folder = PLACE / "tiny"
    shutil.rmtree(folder, ignore_errors=True)
    chunkrt(sys.executable, "compile", TINY, "-o", folder, "--soc", "QCS8550")
    asked = ("run", folder, "-p", "Hello", "-n", "4")
    here, there = (chunkrt(python, *asked, "--npu", "native") for python in (sys.executable, ARM_PYTHON))
    assert there == here, (there, here)
    refused = chunkrt(ARM_PYTHON, *asked, "--npu", "qnn", "--soc", "QCS8550", status=1)
    print(refused)
    assert "finds no usable device on this aarch64 machine" in refused
    assert "/dev/fastrpc-cdsp" in refused
    assert refused.count("\n") == 1


def chunkrt(python: str | Path, *arguments: str | Path, status: int = 0) -> str:
    return run(python, "-P", "-m", "chunkrt", *arguments, status=status, CHUNKRT_HOME=str(HOME), QEMU_CPU="max")


def run(*command: str | Path, status: int = 0, **environment: str) -> str:
    """Return its standard output, or standard error if it is expected to fail."""
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode != status:
        print(done.stdout, done.stderr, file=sys.stderr)
        sys.exit(f"status {done.returncode}: {shlex.join(map(str, command))}")
    return done.stderr if status else done.stdout


if __name__ == "__main__":
    main()
