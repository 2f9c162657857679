"""Norms of one's own: what chunkrt's are, counted. A head in float, whose weight is prepared once. And a recurrence."""

import numpy as np

from tiny_plugins.recurrence import recurrence

num_calls = 0
num_prepared = 0


def register(registry):
    """Called by chunkrt with its registry."""
    registry.register("rms_norm", "native", replaces=True)(rms_norm)
    registry.register("logits", "reference", replaces=True, prepare=prepare)(logits)
    registry.register("tiny_recurrence", "tiny")(recurrence)


def prepare(weight):
    """A weight in float32 [K, N], made of the stored integers."""
    global num_prepared
    num_prepared += 1
    return weight if isinstance(weight, np.ndarray) else weight.integers * weight.scale


def logits(left, right):
    """left float32 [T, K] @ what `prepare` made."""
    return left @ right


def rms_norm(x, weight, *, axis, epsilon):
    """x float32 [T, H] over its root mean square, times weight float32 [H]."""
    global num_calls
    num_calls += 1
    mean_square = np.mean(np.square(x, dtype=np.float64), axis=axis, keepdims=True)
    return (x / np.sqrt(mean_square + epsilon) * weight).astype(np.float32)
