"""chunkrt beside other runtimes. `contenders` says who is measured, `engines` how each runtime is called.

Every contender lives in a process of its own (`worker`, `process`) and measures when it is told to, one after another,
round after round (`rounds`), so that a noisy machine is noisy for all of them.
"""
