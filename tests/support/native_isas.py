"""Instruction sets that kernel tests use."""

from __future__ import annotations

import pytest

from chunkrt import _native


def isa_parameters(*names: str) -> list[object]:
    """Return parameters for the instruction sets that are built, of `names` or all; unsupported ones are skipped."""
    built, supported = _native.built_isas(), _native.supported_isas()
    return [
        pytest.param(
            name,
            marks=pytest.mark.skipif(not supported[name], reason=f"this processor does not support {name}"),
        )
        for name in names or built
        if built[name]
    ]
