"""Recipes of rotary tables for tests with random weights instead of a checkpoint."""

import numpy as np

BASE = 10000.0


def recipes_of(plan):
    """Return recipes by plan name, with magnitude 1 and base 10,000; see `chunkrt/graph/rotary_tables.py`."""

    def load(name):
        rows, half = plan.tensors[name].shape
        frequencies = BASE ** (-np.arange(half) / half)
        return np.tile(np.concatenate(([1.0], frequencies)), (rows // plan.context_length, 1))

    return load
