"""Reports on this processor, and forcing an instruction set."""

from __future__ import annotations

import pytest
from native_isas import isa_parameters

from chunkrt import _native
from chunkrt.backends.native.backend import NativeBackend
from chunkrt.backends.native.cpu import cpu_info
from chunkrt.errors import ConfigError


def test_cpu_info_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHUNKRT_FORCE_ISA", raising=False)
    info = cpu_info()
    assert info["processor"]
    isas = {isa["name"]: isa for isa in info["isas"]}
    assert isas["reference"] == {"name": "reference", "built": True, "present": True, "supported": True}
    for kernel, name in info["selected"].items():
        assert isas[name]["built"], kernel
        assert isas[name]["supported"], kernel


def test_reference_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHUNKRT_FORCE_ISA", "reference")
    assert set(cpu_info()["selected"].values()) == {"reference"}


@pytest.mark.parametrize("isa", isa_parameters())
def test_forced_instruction_set_is_the_highest_selected(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order = ["reference", "neon", "neon_dotprod", "neon_i8mm", "neon_bf16"]
    order += ["avx2", "avxvnni", "avx512vnni", "avx512bf16", "amx", "amx_bf16"]
    monkeypatch.setenv("CHUNKRT_FORCE_ISA", isa)
    selected = set(cpu_info()["selected"].values())
    assert isa in selected
    assert all(order.index(name) <= order.index(isa) for name in selected)


def test_unknown_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHUNKRT_FORCE_ISA", "avx9")
    for act in (cpu_info, lambda: NativeBackend(1)):
        with pytest.raises(ConfigError, match="CHUNKRT_FORCE_ISA: unknown instruction set 'avx9'; there are: "):
            act()


def test_errors_distinguish_not_built_from_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    built, present, supported = _native.built_isas(), _native.present_isas(), _native.supported_isas()
    for name in built:
        monkeypatch.setenv("CHUNKRT_FORCE_ISA", name)
        if not built[name]:
            with pytest.raises(ConfigError, match=f"the {name} kernels are not built"):
                cpu_info()
        elif not present[name]:
            with pytest.raises(ConfigError, match=f"this processor does not support {name}"):
                cpu_info()
        elif not supported[name]:
            with pytest.raises(ConfigError, match=f"the operating system does not allow {name}"):
                cpu_info()
