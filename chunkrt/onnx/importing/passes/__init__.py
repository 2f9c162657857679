"""Passes, one per module, which change a `Draft` in place. `importing.PASSES` lists them in order."""
