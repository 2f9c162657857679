"""Own norms: the same as chunkrt's, with a call counter. An LM head in float, whose weight is prepared once. A
recurrence."""

import numpy as np

from tiny_plugins.recurrence import RunningSum

num_calls = 0
num_prepared = 0


def register(registry):
    """Register the operators; chunkrt calls it with its registry."""
    registry.register("rms_norm", "tiny", backends=("native",))(rms_norm)
    registry.register("logits", "tiny", backends=("reference",))(FloatLogits)
    registry.register("tiny_recurrence", "reference")(RunningSum)


class FloatLogits:
    """LM head in float."""

    def __init__(self, node):
        self.shape = node.input_shapes[1]

    def prepare(self, weight):
        """Keep the weight in float32 [K, N], from the stored integers."""
        global num_prepared
        num_prepared += 1
        self.weight = weight if isinstance(weight, np.ndarray) else weight.integers * weight.scale
        assert self.weight.shape == self.shape

    def __call__(self, left):
        """Return left float32 [T, K] @ the weight."""
        return left @ self.weight


def rms_norm(x, weight, *, axis, epsilon):
    """Return x float32 [T, H] over its root mean square, times weight float32 [H]."""
    global num_calls
    num_calls += 1
    mean_square = np.mean(np.square(x, dtype=np.float64), axis=axis, keepdims=True)
    return (x / np.sqrt(mean_square + epsilon) * weight).astype(np.float32)
