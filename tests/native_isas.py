"""The instruction sets that kernel tests run for."""

from __future__ import annotations

import pytest

from chunkrt import _native


def isa_parameters(*names: str) -> list[object]:
    """Those of the names (or all) that are built; one that this processor lacks is skipped with that reason."""
    built, supported = _native.built_isas(), _native.supported_isas()
    return [
        pytest.param(
            name,
            marks=pytest.mark.skipif(not supported[name], reason=f"this processor does not support {name}"),
        )
        for name in names or built
        if built[name]
    ]
