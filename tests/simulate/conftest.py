"""A small plan and a device, and the fake NPU of the benchmarks, for tests that compare predictions with runs."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from small_shape import SMALL_SHAPE

from chunkrt.backends import PLUGINS
from chunkrt.graph.plan import Plan
from chunkrt.simulate import DeviceProfile, find_device

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return SMALL_SHAPE.plan()


@pytest.fixture(scope="module")
def device() -> DeviceProfile:
    found = find_device("sd8gen3")
    assert isinstance(found, DeviceProfile)
    return found


@pytest.fixture
def fake_npu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the fake NPU, which is available as `npu="fake"`, and with several graphs as "fake-several"."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(PLUGINS, "plugins", PLUGINS.plugins)  # restored after the test
    import fake_npu

    fake_npu.register()
    return fake_npu
