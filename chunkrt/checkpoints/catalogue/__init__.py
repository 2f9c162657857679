"""The catalogue: checkpoints that chunkrt knows by name, and fetching them."""

from chunkrt.checkpoints.catalogue.entry import Entry, entries, find
from chunkrt.checkpoints.catalogue.fetch import damage, home, pull, pulled

__all__ = ["Entry", "damage", "entries", "find", "home", "pull", "pulled"]
