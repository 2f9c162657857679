"""chunkrt: a heterogeneous CPU/NPU chunked-prefill runtime for decoder language models.

Names are imported at their first use, so that `import chunkrt` and the start of the command line are fast.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chunkrt.backends.native.cpu import cpu_info
    from chunkrt.engine.engine import Engine
    from chunkrt.engine.generation import Piece
    from chunkrt.engine.loaded import EngineStats
    from chunkrt.engine.loading import load
    from chunkrt.engine.options import EngineOptions
    from chunkrt.engine.prefill_result import PrefillResult
    from chunkrt.engine.sampling import SamplingOptions
    from chunkrt.engine.scoring import Score
    from chunkrt.engine.session import Session
    from chunkrt.errors import ChunkrtError
    from chunkrt.reports import report
    from chunkrt.runtime.record import RunRecord
    from chunkrt.simulate.experiments import experiment

__version__ = "0.2.0"
__all__ = [
    "ChunkrtError",
    "Engine",
    "EngineOptions",
    "EngineStats",
    "Piece",
    "PrefillResult",
    "RunRecord",
    "SamplingOptions",
    "Score",
    "Session",
    "cpu_info",
    "experiment",
    "load",
    "report",
]

_MODULES = {
    "ChunkrtError": "errors",
    "Engine": "engine.engine",
    "EngineOptions": "engine.options",
    "EngineStats": "engine.loaded",
    "Piece": "engine.generation",
    "PrefillResult": "engine.prefill_result",
    "RunRecord": "runtime.record",
    "SamplingOptions": "engine.sampling",
    "Score": "engine.scoring",
    "Session": "engine.session",
    "cpu_info": "backends.native.cpu",
    "experiment": "simulate.experiments",
    "load": "engine.loading",
    "report": "reports",
}


def __getattr__(name: str) -> object:
    """Import a public name, or a submodule, at its first use. Raises AttributeError if it does not exist."""
    if name in _MODULES:
        value: object = getattr(import_module(f"chunkrt.{_MODULES[name]}"), name)
    elif not name.startswith("_") and find_spec(f"chunkrt.{name}") is not None:
        value = import_module(f"chunkrt.{name}")
    else:
        raise AttributeError(f"module 'chunkrt' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
