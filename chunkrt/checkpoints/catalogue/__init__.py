"""The catalogue of named checkpoints, and their download."""

from chunkrt.checkpoints.catalogue.entry import Entry, entries, find
from chunkrt.checkpoints.catalogue.fetch import damage, home, how_to_fetch, pull, pulled

__all__ = ["Entry", "damage", "entries", "find", "home", "how_to_fetch", "pull", "pulled"]
