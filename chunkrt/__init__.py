"""chunkrt: a heterogeneous CPU/NPU chunked-prefill runtime for decoder language models."""

from typing import TYPE_CHECKING

from chunkrt.backends.native.cpu import cpu_info
from chunkrt.engine.engine import Engine
from chunkrt.engine.generation import Piece
from chunkrt.engine.loading import load
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.prefill_result import PrefillResult
from chunkrt.engine.sampling import SamplingOptions
from chunkrt.engine.session import Session
from chunkrt.errors import ChunkrtError

if TYPE_CHECKING:
    from chunkrt.simulate.experiments import experiment

__version__ = "0.1.0"
__all__ = [
    "ChunkrtError",
    "Engine",
    "EngineOptions",
    "Piece",
    "PrefillResult",
    "SamplingOptions",
    "Session",
    "cpu_info",
    "experiment",
    "load",
]


def __getattr__(name: str) -> object:
    """`experiment`, which brings the simulator with it, is imported when it is asked for."""
    if name == "experiment":
        from chunkrt.simulate.experiments import experiment

        return experiment
    raise AttributeError(f"module 'chunkrt' has no attribute {name!r}")
