"""How many positions an engine holds and how many tokens make a chunk: decided here for every command."""

from __future__ import annotations

from chunkrt.engine.options import CPU_CHUNK_LENGTH, DEFAULT_CHUNK_LENGTH, EngineOptions
from chunkrt.engine_directory.manifest import Manifest
from chunkrt.errors import ConfigError
from chunkrt.graph.plan import Plan


def choose_context_length(plan: Plan, options: EngineOptions) -> int:
    """Positions that a session holds. Raises ConfigError if that is more than the model's."""
    wanted = options.context_length or plan.context_length
    if wanted > plan.context_length:
        raise ConfigError(f"context_length is {wanted}, but the model takes at most {plan.context_length}")
    return wanted


def choose_chunk_length(
    options: EngineOptions, context_length: int, *, has_npu: bool, manifest: Manifest | None = None
) -> int:
    """Tokens of a chunk.

    Args:
        has_npu: whether another than the CPU plays the NPU's role.
        manifest: of the engine directory, where there is one already.

    Raises:
        ConfigError: a chunk would be longer than the context.
    """
    is_compiled = manifest is not None and bool(manifest.npu)
    if options.chunk_length is None and not (is_compiled or has_npu):
        return min(CPU_CHUNK_LENGTH, context_length)
    wanted = options.chunk_length or (compiled_chunk_length(manifest) if manifest else DEFAULT_CHUNK_LENGTH)
    if wanted > context_length:
        raise ConfigError(
            f"chunk_length is {wanted}, longer than the context of {context_length}; choose a shorter one"
        )
    return wanted


def compiled_chunk_length(manifest: Manifest) -> int:
    """The chunk length that an engine directory is for: of several the usual one, or else the longest.

    The first that was named would not do: of "1,32,128" it would have the NPU run token by token.
    """
    lengths = {target.chunk_length for target in manifest.npu}
    return DEFAULT_CHUNK_LENGTH if DEFAULT_CHUNK_LENGTH in lengths or not lengths else max(lengths)
