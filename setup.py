"""Build the C++ core with CMake, and the description of the package; all else is in pyproject.toml."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

SOURCE = Path(__file__).parent.resolve()
DATA = [f"chunkrt.simulate.{folder}" for folder in ("devices", "links", "shapes", "software")]


class CMakeBuild(build_ext):
    """Command that configures, builds and installs the extension module.

    CMake and Ninja are the first ones on PATH; in an isolated build, pip has installed them. On Windows, CMake finds
    Visual Studio without a prepared shell. CMAKE_ARGS may hold further options.
    """

    def build_extension(self, extension: Extension) -> None:
        destination = Path(self.get_ext_fullpath(extension.name)).resolve().parent
        build = Path(self.build_temp).resolve() / extension.name
        configuration = "Debug" if self.debug else "Release"
        # pip's isolated builds have another Ninja each time; the cache of an earlier one must not keep its path
        ninja = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja') or 'ninja'}"]
        generator = [] if sys.platform == "win32" else ninja
        options = [
            f"-DCMAKE_BUILD_TYPE={configuration}",
            f"-DCMAKE_INSTALL_PREFIX={destination}",
            f"-DPython_EXECUTABLE={sys.executable}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        jobs = str(self.parallel or os.cpu_count() or 1)
        subprocess.run(["cmake", "-S", SOURCE, "-B", build, *generator, *options], check=True)
        subprocess.run(["cmake", "--build", build, "--config", configuration, "--parallel", jobs], check=True)
        subprocess.run(["cmake", "--install", build, "--config", configuration], check=True)


def description() -> str:
    """Return README.md with absolute links, as it is shown outside of the repository."""
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pages = project["urls"]["Repository"] + "/blob/main/"
    text = (SOURCE / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^]]*\]\()(?!\w+:)", rf"\g<1>{pages.replace('/blob/', '/raw/')}", text)
    return re.sub(r"(?<!!)(\[[^]]*\]\()(?!\w+:|#)", rf"\g<1>{pages}", text)


setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    packages=[*find_packages(include=["chunkrt*"]), *DATA, "chunkrt.models"],
    package_dir={"chunkrt.models": "models"},  # the catalogue, which a wheel carries inside the package
    package_data={
        "chunkrt": ["py.typed", "*.pyi", "*.txt"],
        "chunkrt.models": ["*.toml"],
        "chunkrt.reports": ["*.css", "*.html", "*.js"],
        "chunkrt.server": ["*.html"],
        "chunkrt.simulate": ["socs.toml"],
        **{folder: ["*.toml"] for folder in DATA},
    },
    ext_modules=[Extension("chunkrt._native", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
