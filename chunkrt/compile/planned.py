"""Open a checkpoint, build its decoder, and cut it into subgraphs."""

from __future__ import annotations

from pathlib import Path

from chunkrt.checkpoints.checkpoint import open_checkpoint
from chunkrt.checkpoints.source import TensorSource
from chunkrt.errors import ConfigError
from chunkrt.graph.decoders import build_decoder
from chunkrt.graph.modules import Module
from chunkrt.graph.partition import partition
from chunkrt.graph.placement import Placement, place
from chunkrt.graph.planned import Planned
from chunkrt.graph.ranks import ALONE, Ranks
from chunkrt.graph.shadow import cut_shadowed
from chunkrt.graph.tracing import trace
from chunkrt.onnx.importing import import_decoder, is_onnx
from chunkrt.quant.scheme import Scheme, check_scheme_of_ranks


def open_decoder(checkpoint: Path, ranks: Ranks = ALONE) -> tuple[TensorSource, Module]:
    """A checkpoint and its module tree: built by its family, or imported from ONNX.

    Raises:
        ModelError: the checkpoint is damaged, incomplete or unsupported.
        ConfigError: so many ranks cannot share the decoder.
    """
    if is_onnx(checkpoint):
        if not ranks.are_alone:
            raise ConfigError(f"{checkpoint} is an ONNX decoder, which runs on one rank, not on {ranks.size}")
        return import_decoder(checkpoint)
    source = open_checkpoint(checkpoint)
    return source, build_decoder(source, ranks)


def plan_checkpoint(
    checkpoint: Path, placement: Placement, scheme: Scheme | None = None, *, ranks: Ranks = ALONE
) -> Planned:
    """Open a checkpoint, build its decoder, place it and cut it into subgraphs.

    Args:
        scheme: linears that it shadows are cut out.
        ranks: which of how many processes the plan is for.

    Raises:
        ModelError: the checkpoint is damaged, incomplete or unsupported.
        ConfigError: the placement names no module; so many ranks cannot share the decoder, or not under the scheme.
    """
    if scheme is not None:
        check_scheme_of_ranks(scheme, ranks.size)
    return plan_decoder(*open_decoder(checkpoint, ranks), placement, scheme)


def plan_decoder(source: TensorSource, decoder: Module, placement: Placement, scheme: Scheme | None) -> Planned:
    """Place a decoder and cut it into subgraphs."""
    place(decoder, placement)
    graph = trace(decoder)
    if scheme is not None:
        cut_shadowed(graph, scheme.is_shadowed)
    plan = partition(graph, family=source.architecture)
    return Planned(source=source, decoder=decoder, plan=plan)
