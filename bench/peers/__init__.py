"""Comparison of chunkrt with other runtimes. `contenders` lists them, `engines` calls each runtime.

Every contender runs in a process of its own (`worker`, `process`) and measures on request, one after another, round
after round (`rounds`), so that noise of the machine affects all of them.
"""
