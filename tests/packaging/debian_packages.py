"""Packages of Debian for other architectures or of other releases: they are unpacked, not installed."""

import os
import shutil
import subprocess
from pathlib import Path

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
TOOLS = {"apt-get": "apt", "dpkg-deb": "dpkg"}


def missing_tools() -> list[str]:
    """Return the programs and files that `unpack` needs and that this machine lacks."""
    missing = [f"{tool} ({package})" for tool, package in TOOLS.items() if shutil.which(tool) is None]
    return missing if KEYRING.exists() else [*missing, str(KEYRING)]


def unpack(packages: tuple[str, ...], suite: str, architecture: str, place: Path, *, with_dependencies: bool) -> Path:
    """Unpack packages of a Debian release in `place`/root, and return this folder.

    APT's state is in `place` too, so the machine's own lists and packages are unchanged.
    """
    apt, archives, root = place / "apt", place / "debs", place / "root"
    shutil.rmtree(root, ignore_errors=True)
    shutil.rmtree(archives, ignore_errors=True)
    for folder in (apt / "lists", archives):
        (folder / "partial").mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    (apt / "sources.list").write_text(f"deb [signed-by={KEYRING}] http://deb.debian.org/debian {suite} main\n")
    options = {
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Sandbox::User": "",
        "Dir::State": apt,
        "Dir::State::status": apt / "status",
        "Dir::Etc::sourcelist": apt / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Cache": apt,
        "Dir::Cache::archives": archives,
        "Debug::NoLocking": "true",
    }
    apt_get = ["apt-get", "-qq", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
    if with_dependencies:
        fetch = [*apt_get, "install", "--yes", "--download-only", "--no-install-recommends", *packages]
    else:
        fetch = [*apt_get, "download", *packages]
    for command in ([*apt_get, "update"], fetch):
        subprocess.run(command, cwd=archives, check=True, env=os.environ | {"LC_ALL": "C"})
    for package in sorted(archives.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, root], check=True)
    return root
