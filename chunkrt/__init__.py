"""chunkrt: a heterogeneous CPU/NPU chunked-prefill runtime for decoder language models."""

from chunkrt.cpu import cpu_info
from chunkrt.engine import Engine, load
from chunkrt.errors import ChunkrtError
from chunkrt.options import EngineOptions
from chunkrt.sampling import SamplingOptions
from chunkrt.session import Piece, PrefillResult, Session

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
    "load",
]
