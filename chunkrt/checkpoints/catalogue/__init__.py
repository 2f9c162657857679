"""The catalogue of named checkpoints, and their download."""

from chunkrt.checkpoints.catalogue.entry import CatalogueEntry, entries, find
from chunkrt.checkpoints.catalogue.fetch import damage, home, how_to_fetch, pull, pulled

__all__ = ["CatalogueEntry", "damage", "entries", "find", "home", "how_to_fetch", "pull", "pulled"]
