"""One plug-in of each kind, and one that is broken."""
