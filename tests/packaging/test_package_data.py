"""Check that a wheel contains all data files of the package, such as the page of `chunkrt report`."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.filterwarnings("default")  # warnings of setuptools
def test_wheel_has_every_data_file(monkeypatch):
    pytest.importorskip("setuptools", reason="needs setuptools")
    from distutils.core import run_setup  # setuptools provides it

    monkeypatch.chdir(ROOT)
    command = run_setup("setup.py", stop_after="init").get_command_obj("build_py")
    command.ensure_finalized()
    packed = {Path(folder, name).resolve() for _, folder, _, names in command.data_files for name in names}
    code = {".py", ".so", ".pyd", ".pyc"}
    data = {path.resolve() for path in (ROOT / "chunkrt").rglob("*") if path.is_file() and path.suffix not in code}
    assert ROOT / "chunkrt" / "reports" / "page.js" in data
    assert data <= packed, data - packed
