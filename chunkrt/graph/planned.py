"""A checkpoint, its decoder and its plan, together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from chunkrt.checkpoints.source import BlockTensor, TensorSource
from chunkrt.graph.modules import Float32, Module, Parameter
from chunkrt.graph.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A checkpoint with its decoder and plan: all that is known before a weight is read."""

    source: TensorSource
    decoder: Module
    plan: Plan

    def load(self, name: str) -> Float32:
        """A weight's values, by its plan name. Raises ModelError as `Parameter.load` does."""
        return self.parameters[name].load(self.source)

    def load_blocks(self, name: str) -> BlockTensor | None:
        """A linear's weight in the checkpoint's own blocks of 4 bits, by its plan name; None if it has none.

        Raises:
            ModelError, QuantizationError: see `Parameter.load_blocks`.
        """
        return self.parameters[name].load_blocks(self.source)

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """All that the decoder reads, by plan name."""
        return {parameter.name: parameter for parameter in self.decoder.parameters()}
