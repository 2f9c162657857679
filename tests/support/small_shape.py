"""Shape of a decoder so small that its simulation takes almost no time."""

from chunkrt.simulate import Shape

SMALL_SHAPE = Shape(
    source="made up",
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=100,
    context_length=512,
)
