"""Installation of a wheel with only Python and no compiler, and its answer: `make wheels` runs this.

python tests/packaging/install_wheel.py dist/chunkrt-*.whl
"""

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ANSWER = Path(__file__).with_name("answer.py")


def main() -> None:
    wheel = f"{Path(sys.argv[1]).resolve(strict=True)}[compile]"
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        venv.create(place / "venv", with_pip=True)
        programs = place / "venv" / ("Scripts" if os.name == "nt" else "bin")
        without = {"PATH": str(programs), "HOME": folder, "CC": "/bin/false", "CXX": "/bin/false"}
        kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name == "SYSTEMROOT"}
        environment = kept | without
        install = [programs / "python", "-m", "pip", "--quiet", "install", "--only-binary", ":all:", wheel]
        subprocess.run(install, env=environment, cwd=place, check=True)
        subprocess.run([programs / "chunkrt", "doctor"], env=environment, cwd=place, check=True)
        subprocess.run([programs / "python", "-P", ANSWER], env=environment, cwd=place, check=True)


if __name__ == "__main__":
    main()
