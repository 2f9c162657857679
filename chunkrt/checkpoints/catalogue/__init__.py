"""The catalogue of named checkpoints. `catalogue.fetch` downloads them."""

from chunkrt.checkpoints.catalogue.entry import CatalogueEntry, entries, find
from chunkrt.checkpoints.catalogue.storage import damage, home, how_to_fetch, pulled

__all__ = ["CatalogueEntry", "damage", "entries", "find", "home", "how_to_fetch", "pulled"]
