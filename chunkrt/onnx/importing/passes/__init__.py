"""One pass a module, each in place on a `Draft`. `importing.PASSES` has their order."""
