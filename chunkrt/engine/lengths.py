"""Choice of the context length and the chunk length of an engine, which is the same for every command."""

from __future__ import annotations

from chunkrt.engine.options import CPU_CHUNK_LENGTH, DEFAULT_CHUNK_LENGTH, EngineOptions
from chunkrt.engine_directory.manifest import Manifest
from chunkrt.errors import ConfigError
from chunkrt.graph.plan import Plan


def choose_context_length(plan: Plan, options: EngineOptions) -> int:
    """Return the context length of sessions in tokens. Raise ConfigError if it exceeds the model's context length."""
    wanted = options.context_length or plan.context_length
    if wanted > plan.context_length:
        raise ConfigError(f"`context_length` is {wanted}, but the model takes at most {plan.context_length}")
    return wanted


def choose_chunk_length(
    options: EngineOptions, context_length: int, *, has_npu: bool, manifest: Manifest | None = None
) -> int:
    """Return the number of tokens of a chunk.

    Args:
        has_npu: True if a backend other than the CPU's serves as the NPU.
        manifest: manifest of the engine directory, if it exists already.

    Raises:
        ConfigError: a chunk would be longer than the context.
    """
    is_compiled = manifest is not None and bool(manifest.npu)
    if options.chunk_length is None and not (is_compiled or has_npu):
        return min(CPU_CHUNK_LENGTH, context_length)
    wanted = options.chunk_length or (compiled_chunk_length(manifest) if manifest else DEFAULT_CHUNK_LENGTH)
    if wanted > context_length:
        raise ConfigError(
            f"`chunk_length` is {wanted}, longer than the context of {context_length}; choose a shorter one"
        )
    return wanted


def compiled_chunk_length(manifest: Manifest) -> int:
    """Return the chunk length of an engine directory. Of several lengths, prefer the usual one, then the longest.

    The first length of the list would not be suitable: with "1,32,128" the NPU would run token by token.
    """
    lengths = {target.chunk_length for target in manifest.npu}
    return DEFAULT_CHUNK_LENGTH if DEFAULT_CHUNK_LENGTH in lengths or not lengths else max(lengths)
