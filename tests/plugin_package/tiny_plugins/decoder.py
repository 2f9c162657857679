"""A decoder family: Llama under another name, whose configs omit keys that all its checkpoints share."""

from chunkrt.graph.decoders.llama import llama


def tiny_llama(config):
    """Build the module tree of a checkpoint."""
    return llama(config)


tiny_llama.defaults = {"rms_norm_eps": 1e-5}
