"""Recipes of rotary tables for tests that draw weights instead of reading a checkpoint."""

import numpy as np

BASE = 10000.0


def recipes_of(plan):
    """Magnitude 1 and frequencies of base 10,000, by plan name; see `chunkrt/graph/rotary_tables.py`."""

    def load(name):
        rows, half = plan.tensors[name].shape
        frequencies = BASE ** (-np.arange(half) / half)
        return np.tile(np.concatenate(([1.0], frequencies)), (rows // plan.context_length, 1))

    return load
