"""Ranks: processes that share one decoder, each with a part of its linears, and the sums that they make together."""

from chunkrt.ranks.base import ALONE, Communicator, Key, Ranks, ranks_of

__all__ = ["ALONE", "Communicator", "Key", "Ranks", "ranks_of"]
