"""Fixtures of the emulated NPU."""

import pytest

from chunkrt.backends.qnn import open_htp


@pytest.fixture(scope="module")
def htp():
    pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn, which holds Qualcomm's compiler, is not installed")
    opened = open_htp()
    if not opened.is_emulated:
        pytest.skip("this machine has an NPU, and a compiler for that NPU alone")
    return opened


@pytest.fixture(scope="module")
def own_home(tmp_path_factory):
    """A cache for one file of tests, whose contexts can be counted."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("CHUNKRT_HOME", str(folder))
        yield folder
