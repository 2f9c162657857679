"""Norms of one's own: what chunkrt's are, counted."""

import numpy as np

num_calls = 0


def register(registry):
    """Called by chunkrt with its registry."""
    registry.register("rms_norm", "native", replaces=True)(rms_norm)


def rms_norm(x, weight, *, axis, epsilon):
    """x float32 [T, H] over its root mean square, times weight float32 [H]."""
    global num_calls
    num_calls += 1
    mean_square = np.mean(np.square(x, dtype=np.float64), axis=axis, keepdims=True)
    return (x / np.sqrt(mean_square + epsilon) * weight).astype(np.float32)
