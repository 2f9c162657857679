"""The fake NPU of the benchmarks, for tests that compare predictions with runs."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from chunkrt.backends import PLUGINS

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def fake_npu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the fake NPU, which is available as `npu="fake"`, and with several graphs as "fake-several"."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(PLUGINS, "plugins", PLUGINS.plugins)  # restored after the test
    import fake_npu

    fake_npu.register()
    return fake_npu
