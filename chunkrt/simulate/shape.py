"""Shapes: dimensions of decoders without weights, and the plans that result from them.

A shape is a TOML file in `shapes/`. Its plan comes from the Llama family's modules, so partition, runtime and simulator
process it like the plan of a checkpoint. If a model differs from that family, the shape lists the approximations; the
operations and bytes of its linears and its attention are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from chunkrt.errors import ConfigError, unknown_name
from chunkrt.graph.placement import Placement
from chunkrt.graph.plan import ALONE, Plan, Ranks
from chunkrt.simulate.toml_tables import build, read_table

if TYPE_CHECKING:
    from chunkrt.graph.modules import Module

_FOLDER = Path(__file__).parent / "shapes"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder's dimensions, in elements.

    Attributes:
        intermediate_size: width of the gated feed-forward network, which has three matrices of this width.
        source: source of the dimensions.
        approximations: differences between the plan and the model.
    """

    source: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    approximations: tuple[str, ...] = field(default=(), repr=False)

    def plan(
        self,
        placement: Placement | None = None,
        ranks: Ranks = ALONE,
        *,
        is_shadowed: Callable[[str], bool] | None = None,
    ) -> Plan:
        """Return the plan of this decoder with placed modules, or of one rank's share of it.

        Args:
            is_shadowed: returns whether the linear of a weight gets a shadow.

        Raises:
            ConfigError: the placement names no module, or a linear cannot be shared evenly among the ranks.
        """
        from chunkrt.graph.ops import trace
        from chunkrt.graph.partition import cut_shadowed, partition, place

        decoder = self.decoder(ranks)
        defaults = {module.path: module.device for module in decoder.modules()}
        place(decoder, placement or {})
        graph = trace(decoder)
        if is_shadowed is not None:
            cut_shadowed(graph, is_shadowed)
        return partition(graph, family="llama", defaults=defaults)

    def decoder(self, ranks: Ranks = ALONE) -> Module:
        """Return the module tree of this decoder. Raises ConfigError if a linear cannot be shared among the ranks."""
        from chunkrt.graph.decoders.config import DecoderConfig
        from chunkrt.graph.decoders.llama import llama

        config = DecoderConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            rms_norm_eps=1e-6,
            tie_word_embeddings=self.tie_word_embeddings,
            raw={"attention_bias": self.attention_bias},
            ranks=ranks,
        )
        return llama(config).named()


def shapes() -> Mapping[str, Path]:
    """Return the files of all shapes by name, sorted."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.toml"))}


def find_shape(name: str) -> Shape:
    """Return a shape by its name.

    Raises:
        ConfigError: the name is unknown; the message suggests the nearest and lists all.
    """
    known = shapes()
    if name not in known:
        raise unknown_name("shape", name, known)
    return read_shape(known[name])


def read_shape(path: Path) -> Shape:
    """Read one file.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown, missing or invalid.
    """
    shape = build(Shape, read_table(path), str(path), {})
    for name in Shape.__dataclass_fields__:
        value = getattr(shape, name)
        if type(value) is int and value < 1:
            raise ConfigError(f"{path}: {name} is {value}, expected at least 1")
    if shape.num_heads % shape.num_kv_heads or shape.head_dim % 2:
        raise ConfigError(
            f"{path}: {shape.num_heads} heads of {shape.head_dim} with {shape.num_kv_heads} KV heads; "
            "expected an even head_dim and a number of heads divisible by the KV heads"
        )
    return shape
